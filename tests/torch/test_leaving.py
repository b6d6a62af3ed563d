"""Leaving: what has not counted goes with departing updates, once."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

import atoll.torch
from atoll.exchange import MemoryRun
from tests.torch.runs import (
    Blocks,
    Weights,
    anchor_of,
    run_of,
    sgd,
    together,
    train,
)

pytestmark = pytest.mark.torch


def test_work_since_the_last_round_departs_with_its_island() -> None:
    """With nothing in flight there is one departing update, for the open round."""
    run = run_of(2, every=4)
    stays, goes = Weights(16.0), Weights(16.0)
    leaver = sgd(goes)
    with atoll.torch.join(stays, stayer := sgd(stays), run, island="a") as a:
        with atoll.torch.join(goes, leaver, run, island="b"):
            train(goes, leaver, steps=2, slope=3.0)
        train(stays, stayer, steps=4)

        # Round 1: 4 steps by 1 and 2 steps by 3, mean 5. Nobody waits for b.
        assert (anchor_of(run), a.round) == ([11.0], 1)
        train(stays, stayer, steps=4)
        assert (anchor_of(run), a.round) == ([7.0], 2)


def test_an_island_without_work_sends_nothing_when_it_leaves() -> None:
    """It is not in the roster: the survivor's mean is its own."""
    run = run_of(2, every=2)
    stays, goes = Weights(16.0), Weights(16.0)
    with atoll.torch.join(stays, stayer := sgd(stays), run, island="a") as a:
        with atoll.torch.join(goes, sgd(goes), run, island="b"):
            pass
        train(stays, stayer, steps=2)
        assert (anchor_of(run), a.round) == ([14.0], 1)


def test_an_update_in_flight_counts_in_its_own_round_and_the_rest_in_the_next() -> None:
    """Leaving in flight gives two: the sealed bytes again, and what came since."""
    run = run_of(2, sync={"sync_every": 4, "overlap_steps": 3})
    stays, goes = Weights(64.0), Weights(64.0)
    leaver = sgd(goes)
    with atoll.torch.join(stays, stayer := sgd(stays), run, island="a") as a:
        with atoll.torch.join(goes, leaver, run, island="b"):
            # Sealed after step 4, then two steps more: taken would be after step 7.
            train(goes, leaver, steps=6, slope=3.0)
        train(stays, stayer, steps=7)

        # Round 1: 4 and 12, mean 8: counted once, although b sent its bytes twice.
        assert (anchor_of(run), a.round) == ([56.0], 1)
        train(stays, stayer, steps=4)

    # Round 2: a's 4 steps, and the 6 of b's two steps since its seal: mean 5.
    # Round 3, the rest of a: 3 steps since its seal after step 8.
    assert anchor_of(run) == [48.0]


def test_an_outcome_that_came_but_was_not_taken_is_no_loss() -> None:
    """Leaving between arrival and adoption sends only what came after the seal."""
    run = run_of(sync={"sync_every": 4, "overlap_steps": 3})
    model = Weights(64.0)
    with atoll.torch.join(model, optimizer := sgd(model), run, island="a"):
        # Alone, the outcome of round 1 arrives in the background at once.
        train(model, optimizer, steps=6)

    # Round 1 holds 4 steps, the departing round 2 the two since.
    assert anchor_of(run) == [58.0]


@pytest.mark.parametrize("overlap", [0, 1, 3, 5, 7])
@pytest.mark.parametrize("steps", [1, 5, 8, 10, 13, 16, 19])
def test_nothing_is_lost_or_counted_twice_wherever_an_island_stops(
    steps: int, overlap: int
) -> None:
    """Alone with outer lr 1, the anchor is the local weights once it has left."""
    sync = {"sync_every": 8, "num_fragments": 4, "overlap_steps": overlap}
    run, model = run_of(sync=sync), Blocks(8, 64.0)
    with atoll.torch.join(model, optimizer := sgd(model), run):
        train(model, optimizer, steps=steps)

    # Equal sizes, so that all fragments share their warm buffers.
    assert [x for f in range(4) for x in anchor_of(run, f)] == [64.0 - steps] * 8


@pytest.mark.parametrize("up", ["e3m0", "int8"])
def test_what_the_codec_left_over_departs_too(up: str) -> None:
    """Error feedback's residual is work: it goes with the rest."""
    wire = {"up": up, "error_feedback": True}
    run = run_of(2, every=2, wire=wire, run={"start_islands": 2})

    def live(name: str, steps: int) -> None:
        model = Weights(16.0, 16.0)
        optimizer = sgd(model)
        with atoll.torch.join(model, optimizer, run, island=name):
            for _ in range(steps):
                # Per step 0.5 and 2.5, per round 1 and 5.
                torch.autograd.backward((model.w * torch.tensor([0.5, 2.5])).sum())
                optimizer.step()
                optimizer.zero_grad()

    together(partial(live, "a", 2), partial(live, "b", 2))

    # e3m0 sends powers of two: of (1, 5) it sends (1, 4), and 1 is left over; both
    # islands depart with (0, 1), which e3m0 keeps. int8 scales by 5/127: of 1 it sends
    # 25 * 5/127, and what is left over of that goes with the rest, to rounding.
    # So nothing of 2 steps is missing: 16 - 1 and 16 - 5.
    assert anchor_of(run) == pytest.approx([15.0, 11.0], abs=1e-3)


def test_the_last_island_closes_its_round_by_leaving() -> None:
    """What both left departs together, when nobody is left to wait for."""
    run = run_of(2, every=8)

    def live(name: str, slope: float) -> None:
        model = Weights(16.0)
        with atoll.torch.join(model, optimizer := sgd(model), run, island=name):
            train(model, optimizer, steps=2, slope=slope)

    together(partial(live, "a", 1.0), partial(live, "b", 3.0))

    # 2 and 6: whoever left first, the round closed with both.
    assert anchor_of(run) == [12.0]
    assert run.state(0).header.round == 1


@pytest.mark.filterwarnings("ignore:.*fresh optimizer")
def test_a_rejoined_island_contributes_its_new_work_only() -> None:
    """What its first life sent stands; the second starts from the anchor."""
    run = run_of(every=2)
    model = Weights(16.0)
    for _ in range(3):
        with atoll.torch.join(model, optimizer := sgd(model), run, island="a"):
            train(model, optimizer)

    # Three lives of one step each, each in a round of its own.
    assert anchor_of(run) == [13.0]
    assert model.w.tolist() == [13.0]


def test_what_an_earlier_life_sent_stands_and_the_new_work_is_carried() -> None:
    """An island that left and came back within a round counts once in it."""
    run = run_of(2, sync={"sync_every": 4, "overlap_steps": 3})
    stays, returns = Weights(32.0), Weights(32.0)
    stayer = sgd(stays)
    with atoll.torch.join(stays, stayer, run, island="a") as a:
        with atoll.torch.join(returns, optimizer := sgd(returns), run, island="b"):
            # Sealed for round 1 after step 4, and one step for round 2.
            train(returns, optimizer, steps=5, slope=3.0)
        with atoll.torch.join(returns, optimizer := sgd(returns), run, island="b") as b:
            train(returns, optimizer, steps=4, slope=5.0)
            train(stays, stayer, steps=7)
            train(returns, optimizer, steps=3, slope=5.0)
            # Round 1: a's 4 and the 12 of b's first life: 32 - 8. b keeps its 35.
            assert (anchor_of(run), returns.w.tolist()) == ([24.0], [-11.0])
            assert b.metrics()["atoll/updates_carried"] == 1
            train(returns, optimizer, slope=5.0)
            train(stays, stayer, steps=4)
            train(returns, optimizer, steps=3, slope=5.0)

            # Round 2: a's 4 and the 3 of the first life, mean 3.5. b carries on.
            assert (anchor_of(run), a.round, b.round) == ([20.5], 2, 2)
            assert b.metrics()["atoll/updates_carried"] == 2


@pytest.mark.parametrize("killed_after", [0, 1, 2, 3, 4, 5])
def test_an_island_that_dies_costs_the_others_nothing(killed_after: int) -> None:
    """At whatever inner step b dies, a's rounds hold all of a's work."""
    run = run_of(2, every=2, run={"end_rounds": 3})
    is_dead = threading.Event()

    def dies() -> None:
        model = Weights(32.0)
        try:
            with atoll.torch.join(model, optimizer := sgd(model), run, island="b"):
                train(model, optimizer, steps=killed_after, slope=3.0)
                raise ZeroDivisionError
        except ZeroDivisionError:
            is_dead.set()

    def survives() -> int:
        model = Weights(32.0)
        with atoll.torch.join(model, optimizer := sgd(model), run, island="a") as a:
            train(model, optimizer, steps=killed_after)
            assert is_dead.wait(timeout=60)
            while True:
                train(model, optimizer)
        return a.inner_steps

    inner_steps, _ = together(survives, dies)

    # a's 6 steps are 2 per round. Rounds b sealed before dying hold the mean of 2 and
    # 6, which is 4; the others hold a's 2. What b had not sealed dies with it.
    shared = killed_after // 2
    assert inner_steps == 6
    assert anchor_of(run) == [32.0 - 4 * shared - 2 * (3 - shared)]


def leave_with_tokens(run: MemoryRun, name: str, tokens: int) -> None:
    model = Weights(16.0)
    with atoll.torch.join(model, optimizer := sgd(model), run, island=name) as island:
        for _ in range(2):
            island.report(tokens=tokens)
            train(model, optimizer)


@pytest.mark.parametrize("up", ["fp32", "e3m0"])
def test_leaving_right_after_a_round_needs_no_tokens(up: str) -> None:
    """With weights by tokens, an island that has nothing to add may simply go."""
    run = run_of(every=2, wire={"up": up}, outer={"weight": "tokens"})

    leave_with_tokens(run, "a", 5)

    assert anchor_of(run) == [14.0]


def test_departing_work_is_weighed_by_its_own_tokens() -> None:
    """Tokens of an update in flight are that update's, not the rest's as well."""
    run = run_of(
        2, sync={"sync_every": 2, "overlap_steps": 1}, outer={"weight": "tokens"}
    )
    stays, goes = Weights(64.0), Weights(64.0)
    leaver, stayer = sgd(goes), sgd(stays)

    def step(island: atoll.torch.Island, model: Weights, tokens: int) -> None:
        island.report(tokens=tokens)
        train(model, stayer if model is stays else leaver, slope=float(tokens))

    with atoll.torch.join(stays, stayer, run, island="a") as a:
        with atoll.torch.join(goes, leaver, run, island="b", count="manual") as b:
            for tokens in (3, 3):
                step(b, goes, tokens)
                b.stepped()
            # Round 1 is in flight with 6 tokens; one step of 2 tokens since its seal.
            step(b, goes, 2)
        for _ in range(3):
            step(a, stays, 1)
        # Round 1: a sends 2 by 2 tokens, b 6 by 6: 2/8 * 2 + 6/8 * 6 = 5.
        assert anchor_of(run) == [59.0]
        step(a, stays, 1)
        step(a, stays, 1)
        # Round 2: a sends 2 by 2 tokens, b's rest 2 by 2: 2, by whatever weights.
        assert anchor_of(run) == [57.0]
