"""A torch island and a JAX island in one run, which a coordinator serves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import atoll
from atoll import RunSettings
from tests.e2e.stage import Island, Settings, Stage

pytestmark = [pytest.mark.jax, pytest.mark.torch]

SETTINGS: Settings = {
    "run": {"name": "stage", "start_islands": 2, "end_rounds": 4},
    "sync": {"sync_every": 5, "num_fragments": 2, "overlap_steps": 2},
    "wire": {"up": "int8", "down": "bf16"},
    "outer": {"momentum": 0.5},
    # A round waits for an island as long as its restart may take on a busy machine.
    "limits": {"deadline_min_s": 500.0, "deadline_max_s": 600.0},
}
PATIENT_S = 240.0
"""Two frameworks are loaded at the same time, on a machine that may be busy."""


def start(stage: Stage, framework: str, *, dies_at: int = -1, url: str = "") -> Island:
    url = url or stage.url
    command = [
        *(sys.executable, "-m", "tests.e2e.twin_island", url, framework),
        *("--folder", str(stage.folder), "--seed", str(len(framework))),
        *("--framework", framework, "--dies-at", str(dies_at), "--step-s", "0.01"),
    ]
    return stage._island(framework, command, None)


@pytest.mark.timeout(900)
def test_torch_and_jax_agree_though_the_jax_island_is_killed(
    stage: Stage, tmp_path: Path
) -> None:
    """Both end on one digest; SIGKILL and a restart change no bit of the JAX island."""
    stage.settings = SETTINGS
    stage.serve()
    islands = [start(stage, framework) for framework in ("torch", "jax")]
    whole = [island.wait(PATIENT_S) for island in islands]
    stage.close()

    (tmp_path / "cut").mkdir()
    cut = Stage(tmp_path / "cut", settings=SETTINGS)
    try:
        cut.serve()
        torch = start(cut, "torch")
        killed = start(cut, "jax", dies_at=13)
        assert killed.process.wait(PATIENT_S) == -9, killed.log.read_text()[-3000:]
        jax = start(cut, "jax").wait(PATIENT_S)
        resumed = [torch.wait(PATIENT_S), jax]
    finally:
        cut.close()

    assert {each["digest"] for each in (*whole, *resumed)} == {whole[0]["digest"]}
    assert [each["round"] for each in resumed] == [4, 4]
    assert jax["told"] == []
    for found, expected in zip(resumed, whole, strict=True):
        assert found["weights"] == expected["weights"]
        assert found["inner_steps"] == expected["inner_steps"]


UNEQUAL: Settings = {
    **SETTINGS,
    "sync": {**SETTINGS["sync"], "mode": "async", "dynamic_local_updates": True},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["coordinator", "bucket"])
def test_torch_and_jax_end_an_asynchronous_run_on_one_state(
    stage: Stage, tmp_path: Path, place: str
) -> None:
    """Rounds take what has arrived, and windows follow the pace of each framework."""
    stage.settings = UNEQUAL
    url = ""
    if place == "coordinator":
        stage.serve()
    else:
        url = str(tmp_path / "bucket")
        given = {table: dict(values) for table, values in UNEQUAL.items()}
        atoll.init(url, RunSettings.from_dict(given))
    islands = [start(stage, framework, url=url) for framework in ("torch", "jax")]
    ended = [island.wait(PATIENT_S) for island in islands]

    assert ended[0]["digest"] == ended[1]["digest"]
    assert ended[0]["round"] == ended[1]["round"] >= 4
