"""An island of several ranks that is killed goes on as one of one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import atoll
from tests.torch.processes import Group, run_groups
from tests.torch.rank_loops import settings
from tests.torch.rank_resuming import live, live_until_asked, live_whole

# The first of them loads torch for all.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

STREAMED: dict[str, dict[str, Any]] = {
    "wire": {"up": "int8", "down": "int8"},
    "sync": {"sync_every": 4, "num_fragments": 2, "overlap_steps": 2},
    "limits": {"deadline_min_s": 120.0, "deadline_max_s": 240.0},
}
"""Updates in flight, and a codec that leaves something over."""

AT_ONCE = {**STREAMED, "sync": {"sync_every": 4, "num_fragments": 2}}
"""Nothing is in flight between two inner steps; a fragment is half a window behind."""


def place(folder: Path, tables: dict[str, Any]) -> tuple[str, str]:
    """Return a new run, and where its island saves."""
    folder.mkdir()
    run = str(folder / "bucket")
    atoll.init(run, settings(5, **tables))
    return run, str(folder / "saved")


def group(kind: str, where: tuple[str, str], *how: Any) -> Group:
    """Return an island: its ranks, or one process with the same micro-batches."""
    if kind == "whole":
        return Group(live_whole, (*where, *how))
    ranks = 1 if kind == "alone" else 2
    return Group(live, (kind, *where, *how), ranks=ranks)


ALONE = {"ddp": "alone", "fsdp": "alone", "hsdp": "alone", "pipeline": "whole"}


@pytest.mark.parametrize(
    ("kind", "dies_at", "dies"),
    [
        ("ddp", 10, None),
        ("fsdp", 10, 1),
        ("fsdp", 11, 0),
        ("hsdp", 9, None),
        ("pipeline", 12, None),
    ],
)
def test_ranks_that_are_killed_go_on_exactly(
    kind: str, dies_at: int, dies: int | None, tmp_path: Path
) -> None:
    """With their weights they end on the bits of one process that nobody killed."""
    whole, cut = (place(tmp_path / each, STREAMED) for each in ("whole", "cut"))
    killed, _ = run_groups(
        group(kind, cut, dies_at, dies, True),
        group(ALONE[kind], whole, -1, None, True),
    )
    assert isinstance(killed[dies or 0], RuntimeError)
    again, (expected,) = run_groups(
        group(kind, cut, -1, None, True), group(ALONE[kind], whole, -1, None, True)
    )
    for each in again:
        assert each["told"] == []
        assert each["digest"] == expected["digest"]
        assert each["inner_steps"] == expected["inner_steps"]


def test_ranks_that_are_asked_to_end_go_on_exactly(tmp_path: Path) -> None:
    """SIGTERM at one rank saves all of them, and gives none of their work away."""
    whole, cut = (place(tmp_path / each, STREAMED) for each in ("whole", "cut"))
    asked, (expected,) = run_groups(
        Group(live_until_asked, ("fsdp", *cut, 7), ranks=2),
        group("alone", whole, -1, None, True),
    )
    assert asked[0]["inner_steps"] == asked[1]["inner_steps"] < expected["inner_steps"]
    (again,) = run_groups(group("fsdp", cut, -1, None, True))
    for first, second in zip(asked, again, strict=True):
        assert second["told"] == []
        assert second["digest"] == expected["digest"]
        assert first["rows"] + second["rows"] == expected["rows"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "pipeline"])
def test_ranks_rejoin_with_the_work_that_no_round_has(
    kind: str, tmp_path: Path
) -> None:
    """They end on the bits of one process that was killed at the same step.

    One fragment has two inner steps that are in no update, and goes on with them; the
    rows that have counted are not trained again, and what was lost is told.
    """
    spread, alone = (place(tmp_path / each, AT_ONCE) for each in ("spread", "alone"))
    dead = run_groups(
        group(kind, spread, 9, None, False), group(ALONE[kind], alone, 9, None, False)
    )
    assert all(isinstance(each, RuntimeError) for ranks in dead for each in ranks)
    again, (expected,) = run_groups(group(kind, spread), group(ALONE[kind], alone))

    assert again[0]["told"] == expected["told"]
    assert "1 inner steps with" in expected["told"][0]
    for each in again:
        assert each["digest"] == expected["digest"]
        assert each["rows"] == expected["rows"]
        assert each["inner_steps"] == expected["inner_steps"]


def test_sharded_rows_that_have_counted_are_not_trained_again(tmp_path: Path) -> None:
    """Data that comes after joining stands where the run has counted, on all ranks."""
    where = place(tmp_path / "run", AT_ONCE)
    (dead,) = run_groups(Group(live, ("dealt", *where, 9), ranks=2))
    assert all(isinstance(each, RuntimeError) for each in dead)
    (again,) = run_groups(Group(live, ("dealt", *where), ranks=2))

    # Nothing was saved after joining, and two rounds of 4 inner steps have counted.
    assert [each["rows"][0] for each in again] == [8, 8]
