"""Giant updates of one island: repeated, claimed to be small, or near fp32's end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atoll.errors import CorruptError, Refused
from atoll.exchange import Frame
from atoll.store import MemoryStore
from atoll.testing.fixtures import (
    StoreRun,
    anchor_of,
    enter,
    plain_settings,
    roster_of,
    update_of,
    verdicts_of,
)
from atoll.weights import FragmentState
from atoll.wire import MOMENTS, OuterValues, Verdict
from tests.attacks.conftest import Serve
from tests.attacks.islands import islands_of, status_of

HONEST, GIANT = 1.0, 1e6


def test_refused_giants_do_not_become_usual(serve: Serve) -> None:
    """With two islands, twenty giants in a row are all refused.

    The honest island moves the anchor by -1 in each of the 25 rounds.
    """
    with islands_of(serve(start_islands=2), "a", "b") as (a, b):
        for round in range(1, 26):
            a.publish(HONEST, round=round)
            b.publish(HONEST if round <= 5 else GIANT, round=round)
            entry = a.roster(round).entry("b")
            assert entry is not None
            assert (entry.verdict is Verdict.REFUSED) == (round > 5)

        last = a.roster(25).entry("b")
        assert last is not None
        assert "limits.max_update_norm=10" in last.reason
        assert anchor_of(a.exchange) == -25.0


def test_a_new_name_brings_no_giant_into_a_run_of_two(serve: Serve) -> None:
    """An attacker without a history is judged by the other island's."""
    coordinator = serve()
    with islands_of(coordinator, "a") as (a,):
        for round in range(1, 7):
            a.publish(HONEST, round=round)
            a.outcome(round)
        with islands_of(coordinator, "b") as (b,):
            b.publish(GIANT, round=7)
            a.publish(HONEST, round=7)
            entry = a.roster(7).entry("b")

            assert entry is not None
            assert entry.verdict is Verdict.REFUSED
            assert "other islands' last norms" in entry.reason


@pytest.mark.parametrize("value", [1e16, 1e30, 3e38])
def test_a_finite_update_cannot_overflow_the_outer_step(
    serve: Serve, value: float
) -> None:
    """In the very first rounds, and often: every state can be taken and is finite.

    The status and an event name the reason.
    """
    coordinator = serve(start_islands=2)
    with islands_of(coordinator, "a", "b") as (a, b):
        for round in range(1, 5):
            a.publish(HONEST, round=round)
            b.publish(value, round=round)
            entry = a.roster(round).entry("b")
            assert entry is not None
            assert "the outer step could overflow" in entry.reason
            assert anchor_of(b.exchange) == -round

        islands = status_of(coordinator)["islands"]
        shown = next(each for each in islands if each["island"] == "b")
        assert "the outer step could overflow" in str(shown)


def test_a_round_of_giants_alone_is_void(serve: Serve) -> None:
    """Nothing moves, and the next round opens."""
    with islands_of(serve(start_islands=2), "a", "b") as (a, b):
        for each in (a, b):
            each.publish(-3e38, round=1)

        assert not a.roster(1).counted
        assert a.outcome(1).agreed.header.elements == 0
        assert anchor_of(a.exchange) == 0.0
        assert a.outcome(1).position.rounds == (2,)


def test_a_norm_is_measured_and_not_believed(serve: Serve) -> None:
    """A giant whose header claims a small norm is refused before it is staged."""
    with islands_of(serve(), "a") as (a,):
        giant = update_of(a.exchange, a.joined, GIANT)
        lie = Frame(replace(giant.header, norm=1.0), giant.body)

        with pytest.raises(Refused, match=r"says that its norm is 1, and it is 1\.7"):
            a.exchange.publish(lie)
        a.publish(HONEST, round=1)
        assert anchor_of(a.exchange) == -1.0
        assert np.isfinite(a.exchange.state(0).body.view(np.float32)).all()


def test_a_claimed_norm_in_a_store_does_not_overflow_the_outer_step() -> None:
    """There the header is believed, so the mean is measured: the round is void."""
    run = StoreRun(MemoryStore(), plain_settings(start_islands=2))
    a, b = run(key=b"a"), run(key=b"b")
    first, second = enter(a, "a"), enter(b, "b")
    a.publish(update_of(a, first, HONEST))
    b.publish(update_of(b, second, 3e38, norm=1.0))

    assert set(verdicts_of(a, 1).values()) == {Verdict.REFUSED}
    assert {each.reason for each in roster_of(a, 1).entries} == {
        "norm: the mean overflows"
    }
    assert anchor_of(a) == anchor_of(b) == 0.0


@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
def test_a_run_is_not_founded_with_moments(optimizer: str) -> None:
    """A velocity of 3e38 would overflow the first outer step of an honest round."""
    moments = MOMENTS[optimizer]
    state = FragmentState(
        np.zeros(3, np.float32), [np.full(3, 3e38, np.float32)] * moments
    )
    outer = OuterValues(optimizer=optimizer, lr=1.0, momentum=0.5)
    header, body = state.to_frame(run="run", fragment=0, outer=outer)

    with pytest.raises(CorruptError, match=r"moment of 3e\+38, above 0"):
        FragmentState.from_frame(header, body)
