"""An outer step of a mean that may count is finite, whatever came before."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.algorithm.outer import LARGEST_MOMENT, LARGEST_NORM
from atoll.settings import RunSettings
from atoll.weights import FragmentState
from atoll.wire import (
    FrameKind,
    Header,
    OuterValues,
    Roster,
    RosterEntry,
    Verdict,
    with_body,
)

LARGEST_MOMENTUM = float(np.nextafter(np.float32(1.0), np.float32(0.0)))
LARGEST_LR = 2.0**20
ROUNDS = 300
ROSTER = Roster(
    (
        RosterEntry(
            island="a",
            incarnation=1,
            digest=bytes(32),
            weight=1,
            verdict=Verdict.COUNTED,
        ),
    )
)


def agreed(state: FragmentState, mean: np.ndarray, outer: OuterValues) -> Header:
    header = Header(
        kind=FrameKind.AGREED,
        run="run",
        fragment=0,
        round=state.round + 1,
        base=state.digest,
        elements=mean.size,
        weight=0,
        outer=outer,
        roster=ROSTER,
    )
    return with_body(header, mean.view(np.uint8))


@pytest.mark.parametrize("optimizer", ["sgd", "heavy_ball", "nesterov", "adam"])
@pytest.mark.parametrize("flips", [False, True])
def test_the_largest_means_leave_every_state_finite(
    optimizer: str, flips: bool
) -> None:
    """300 rounds of the largest mean, learning rate and momentum, either sign.

    The first anchor holds the largest and the smallest finite number, too.
    """
    most = np.finfo(np.float32).max
    anchor = np.array([most, -most, 0.0, 1.0], np.float32)
    state = FragmentState.found(anchor, optimizer)
    momentum = 0.0 if optimizer == "sgd" else LARGEST_MOMENTUM
    outer = OuterValues(optimizer=optimizer, lr=LARGEST_LR, momentum=momentum)
    mean = np.array([-1.0, 1.0, -1.0, 1.0], np.float32) * np.float32(2 * LARGEST_NORM)
    for number in range(ROUNDS):
        step = -mean if flips and number % 2 else mean
        state.apply(agreed(state, step, outer), step.view(np.uint8))

        assert all(np.isfinite(vector).all() for vector in state.vectors)
        assert all(np.abs(each).max() <= LARGEST_MOMENT for each in state.moments)


def test_settings_take_no_larger_learning_rate() -> None:
    """The bound of the derivation is the bound of the run file."""
    assert RunSettings.from_dict({"outer": {"lr": LARGEST_LR}}).outer.lr == LARGEST_LR
    with pytest.raises(Exception, match=r"outer\.lr=1048577\.0 must be .* at most"):
        RunSettings.from_dict({"outer": {"lr": LARGEST_LR + 1}})
