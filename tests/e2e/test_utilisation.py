"""Overlap hides a link: training stands still for it only where there is none.

What islands say of their own waiting is compared, and with bounds that a busy machine
cannot break: nothing is faster than the link. The figures are for bench/utilisation.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from atoll import RunSettings
from atoll.simulate import Latency
from atoll.simulate.run import Conditions, simulate
from atoll.testing import Link, vector_model
from tests.e2e.rounds_again import ended_well
from tests.e2e.stage import Settings, Stage, settings_for

RATE_BYTES_PER_S, DELAY_S = 100e6 / 8, 0.04
STEP_S, SYNC_EVERY, ROUNDS = 0.05, 20, 8
OVERLAP_STEPS = 15
ELEMENTS = 50_000
"""In each of two fragments: 200 KB up and 50 KB down, 16 ms and 4 ms at this rate."""

FASTEST_S = 4 * DELAY_S + 0.016 + 0.004
"""An update and its receipt, a question and its outcome: no wait is shorter without
overlap, and with it a wait of 0.75 s is spent training."""


def settings(overlap_steps: int) -> Settings:
    given = settings_for(2, ROUNDS)
    sync = {"sync_every": SYNC_EVERY, "num_fragments": 2}
    # A busy machine delays an island beyond a learned deadline, and what it missed
    # counts in the next round: no island is late within a minute here.
    return {
        **given,
        "sync": {**sync, "overlap_steps": overlap_steps},
        "limits": {"deadline_min_s": 60.0},
    }


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[dict[int, Stage]]:
    """Return a stage for each overlap."""
    stages = {}
    for overlap_steps in (0, OVERLAP_STEPS):
        folder = tmp_path / f"overlap-{overlap_steps}"
        folder.mkdir()
        stages[overlap_steps] = Stage(folder, settings(overlap_steps))
    yield stages
    for stage in stages.values():
        stage.close()


def reports(stage: Stage) -> list[dict[str, Any]]:
    """Train on two islands, each across a link of its own; return what they say."""
    stage.serve()
    target = ("127.0.0.1", stage.port)
    with ExitStack() as links:
        for name in "ab":
            link = Link(target, rate_bytes_per_s=RATE_BYTES_PER_S, delay_s=DELAY_S)
            url = stage.url_at(links.enter_context(link).address)
            stage.island(name, url=url, elements=ELEMENTS, step_s=STEP_S)
        _, reports = ended_well(stage)
    return [dict(each) for each in reports.values()]


def utilisation(report: dict[str, Any]) -> float:
    """Return the part of the time that was training, by the island's own account."""
    training_s = report["inner_steps"] * STEP_S
    return float(training_s / (training_s + report["wait_s"]))


def simulated(overlap_steps: int) -> float:
    """Return the best utilisation that the simulator gives an island."""
    shapes = {f"blocks.{number}.weight": (ELEMENTS,) for number in range(2)}
    latency = Latency(base_s=DELAY_S, jitter_s=0.0, bytes_per_s=RATE_BYTES_PER_S)
    result = simulate(
        RunSettings.from_dict(settings(overlap_steps)),
        islands=2,
        conditions=Conditions(
            model=vector_model(shapes), step_s=STEP_S, latency=latency
        ),
    )
    assert result.violations == []
    return max(result.utilisation.values())


def test_overlap_hides_a_link_of_100_mbit_and_40_ms(stages: dict[int, Stage]) -> None:
    """Without it every outcome is waited for; with it less than half as long.

    Whoever comes first waits for the other in its first round, however long that
    takes to start; the other's waiting is the link's.
    """
    said = {overlap: reports(stage) for overlap, stage in stages.items()}
    used = {overlap: max(map(utilisation, each)) for overlap, each in said.items()}
    for overlap, each in used.items():
        stages[overlap].tell(
            f"utilisation with overlap {overlap}: {each:.1%}, "
            f"simulated {simulated(overlap):.1%}"
        )

    for report in said[0]:
        # 8 rounds of 2 fragments.
        assert report["updates_counted"] == 16
        assert report["wait_s"] >= 16 * FASTEST_S
    least_s = min(report["wait_s"] for report in said[OVERLAP_STEPS])
    assert least_s < 16 * FASTEST_S / 2


def test_no_run_is_faster_than_its_simulation() -> None:
    """Without overlap the simulator makes each outcome wait as the link does.

    A fragment is due after 10 steps, 0.5 s: of 0.68 s, 73.5 % are training. The first
    waits are longer, since one island founds the run with 800 KB and the other takes
    them.
    """
    with_overlap, without = simulated(OVERLAP_STEPS), simulated(0)

    assert 0.70 < without < 0.5 / (0.5 + FASTEST_S)
    assert with_overlap > 0.97
