"""The learning rate of islands that come at different times to one real run."""

from __future__ import annotations

import pytest

from tests.e2e.rate_island import DECAY, RATE, REWARM, WARMUP
from tests.e2e.stage import Stage, until

EVERY = 20
PATIENT_S = 150.0
"""To start a process that loads torch, on a busy machine."""


def rates_of(stage: Stage, told: dict[str, float], name: str) -> dict[int, float]:
    """Return the rate of each schedule step, and print some of them."""
    rates = {int(step): rate for step, rate in told.items()}
    shown = [
        f"{step}: {rates[step]:.5f}" for step in sorted(rates)[-250:] if step % 5 == 0
    ]
    stage.tell(f"{name}  " + "  ".join(shown))
    return rates


@pytest.mark.torch
@pytest.mark.timeout(360)
def test_a_late_island_has_the_others_rate_and_decays_with_them(stage: Stage) -> None:
    """After its re-warm-up their rates are equal, to the step at which both fall."""
    stage.settings = {
        "run": {"name": "stage"},
        "sync": {
            **{"sync_every": EVERY, "num_fragments": 2},
            **{"fragment_order": "by_size", "overlap_steps": 3},
        },
    }
    stage.serve()
    a = stage.island("a", module="tests.e2e.rate_island")
    until("a trains", lambda: stage.committed() >= 2, within_s=PATIENT_S)
    b = stage.island("b", module="tests.e2e.rate_island")
    until(
        "b joins", lambda: stage.events("island_joined", island="b"), within_s=PATIENT_S
    )
    stage.until_committed(stage.committed() + 3)
    decay_round = stage.committed() + 4
    values = {"run.decay_round": decay_round}
    assert stage.ask("POST", "/control/set", {"values": values}).status == 200
    stage.until_committed(decay_round + DECAY // EVERY + 1)
    assert stage.ask("POST", "/control/stop", {}).status == 200
    first, late = (rates_of(stage, each.wait(120), each.name) for each in (a, b))

    joined, begins = min(late), (decay_round - 1) * EVERY
    assert joined >= 2 * EVERY
    assert begins > joined + REWARM
    assert [first[step] for step in range(WARMUP)] == pytest.approx(
        [RATE * (step + 1) / WARMUP for step in range(WARMUP)]
    )
    assert late[joined] == pytest.approx(RATE / REWARM)
    shared = sorted(step for step in first.keys() & late if step >= joined + REWARM)
    assert len(shared) > 4 * EVERY
    assert [late[step] for step in shared] == [first[step] for step in shared]
    for rates in (first, late):
        assert rates[begins - 1] == RATE
        assert rates[begins] == pytest.approx(RATE * DECAY / (DECAY + 1))
        assert rates[begins + DECAY] == pytest.approx(RATE / (DECAY + 1))
