"""Updates that miss their round, or are refused: what becomes of the work."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

import atoll.torch
from atoll.errors import AtollWarning, Refused
from atoll.wire import Verdict
from tests.island.scripted import ISLAND, ScriptedRun
from tests.torch.runs import (
    Weights,
    anchor_of,
    bits,
    join_exchange,
    run_of,
    settings_of,
    sgd,
    together,
    train,
)

pytestmark = pytest.mark.torch


def test_work_that_missed_its_round_is_carried_and_counts_once() -> None:
    """A newcomer that publishes too late keeps its work on top of the new anchor."""
    run = run_of(every=4)
    early, late = Weights(32.0), Weights(0.0)
    first, second = sgd(early), sgd(late)
    with (
        atoll.torch.join(early, first, run, island="a") as a,
        atoll.torch.join(late, second, run, island="b") as b,
    ):
        # Round 1 opened before b joined: it does not wait for b.
        train(early, first, steps=4)
        assert anchor_of(run) == [28.0]

        train(late, second, steps=4, slope=3.0)

        # b's 12 missed round 1: its weights are 28 - 12, not 28 and not 32 - 12.
        assert (late.w.tolist(), b.round) == ([16.0], 1)
        assert b.metrics()["atoll/updates_carried"] == 1
        together(
            partial(train, early, first, steps=4),
            partial(train, late, second, steps=4, slope=3.0),
        )

        # Round 2: a's 4, and b's 12 carried plus 12 new: mean 14.
        assert (anchor_of(run), a.round, b.round) == ([14.0], 2, 2)
        assert late.w.tolist() == early.w.tolist() == [14.0]
        assert b.digest == a.digest


def test_a_late_island_falls_back_into_step() -> None:
    """After a miss its next window is shorter, and ends when the others' does."""
    run = run_of(every=4)
    early, late = Weights(32.0), Weights(0.0)
    first, second = sgd(early), sgd(late)
    with (
        atoll.torch.join(early, first, run, island="a"),
        atoll.torch.join(late, second, run, island="b") as b,
    ):
        train(early, first, steps=6)
        train(late, second, steps=4)
        # b missed round 1 at its step 4, and stands where a does: two steps to go.
        assert (b.run_steps, b.inner_steps) == (6, 4)
        together(
            partial(train, early, first, steps=2), partial(train, late, second, steps=2)
        )

        # a's round 1 made it 28; round 2 holds a's 4 and b's 4 carried and 2 new.
        assert (b.run_steps, b.inner_steps, b.round) == (8, 6, 2)
        assert anchor_of(run) == [23.0]


def test_carried_work_departs_with_its_island() -> None:
    """An island that leaves right after missing a round still gives its work away."""
    run = run_of(every=4)
    early, late = Weights(32.0), Weights(0.0)
    first, second = sgd(early), sgd(late)
    with atoll.torch.join(early, first, run, island="a"):
        with atoll.torch.join(late, second, run, island="b"):
            train(early, first, steps=4)
            train(late, second, steps=4, slope=3.0)
        train(early, first, steps=4)

        # Round 2: a's 4 and b's 12: mean 8.
        assert anchor_of(run) == [20.0]


def test_work_that_missed_in_flight_departs_too() -> None:
    """The island leaves before it has taken the outcome that did not list it."""
    run = run_of(sync={"sync_every": 4, "overlap_steps": 3})
    early, late = Weights(32.0), Weights(0.0)
    first, second = sgd(early), sgd(late)
    with atoll.torch.join(early, first, run, island="a") as a:
        with atoll.torch.join(late, second, run, island="b"):
            train(early, first, steps=7)
            assert (anchor_of(run), a.round) == ([28.0], 1)
            # Sealed after step 4 for round 1, which is over, and one step more.
            train(late, second, steps=5, slope=3.0)
        train(early, first, steps=1)

    # Round 2: a's 4 and all 15 of b, mean 9.5.
    assert anchor_of(run) == [18.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_two_missed_rounds_are_carried_and_a_third_is_dropped(
    dtype: torch.dtype,
) -> None:
    """Work is carried over two rounds; beyond that the anchor is taken."""
    fates = iter(["missed", "missed", "counted", "missed", "missed", "missed"])
    run = ScriptedRun(settings_of(every=2), fates)
    model = Weights(16.0, dtype=dtype)
    seen = []
    with join_exchange(model, optimizer := sgd(model), run, island=ISLAND) as island:
        for _ in range(6):
            train(model, optimizer, steps=2)
            seen.append((anchor_of(run)[0], model.w.item()))

    # Two steps by 1 a round. Two rounds miss: the anchor stays, local goes on. The
    # third holds all 6. Then three rounds miss, and the 6 of those are dropped.
    assert seen == [
        (16.0, 14.0),
        (16.0, 12.0),
        (10.0, 10.0),
        (10.0, 8.0),
        (10.0, 6.0),
        (10.0, 10.0),
    ]
    metrics = island.metrics()
    assert metrics["atoll/updates_carried"] == 4
    assert metrics["atoll/updates_counted"] == 1
    assert metrics["atoll/updates_dropped"] == 1
    assert metrics["atoll/dropped_steps"] == 6


def test_missing_a_round_with_error_feedback_restores_the_residual() -> None:
    """Sealing is tentative: after a miss the residual is the one from before."""
    wire = {"up": "e3m0", "down": "fp32"}
    run = ScriptedRun(settings_of(wire=wire), iter(["missed", "counted", "counted"]))
    model = Weights(16.0, 16.0)
    optimizer = sgd(model)
    with join_exchange(model, optimizer, run, island=ISLAND):
        for slopes in ([1.0, 5.0], [1.0, 5.0], [0.0, 0.0]):
            torch.autograd.backward((model.w * torch.tensor(slopes)).sum())
            optimizer.step()
            optimizer.zero_grad()

    # Round 1 misses (1, 5) and e3m0's leftovers of it. Round 2 seals (2, 10): e3m0
    # sends (2, 8) and leaves (0, 2), which round 3 sends: 16 - 2 and 16 - 8 - 2. Had
    # round 1's leftover stayed, round 2 would hold it twice.
    assert anchor_of(run) == [14.0, 6.0]


def poison(model: Weights) -> None:
    with torch.no_grad():
        model.w[1] = float("nan")


def train_poisoned(model: Weights, optimizer: torch.optim.Optimizer) -> None:
    """Make an inner step from which the island learns that it was refused."""
    poison(model)
    with pytest.warns(AtollWarning, match="'w' is NaN"):
        train(model, optimizer)


def test_a_value_that_is_not_finite_costs_its_island_the_round() -> None:
    """It is told which parameter, takes the anchor, and the others go on."""
    run = run_of(2, every=2, run={"end_rounds": 2})

    def live(name: str, slope: float, *, breaks: bool) -> dict[str, float]:
        model = Weights(16.0, 16.0)
        with atoll.torch.join(model, optimizer := sgd(model), run, island=name) as i:
            train(model, optimizer, slope=slope)
            if breaks:
                poison(model)
            train(model, optimizer, slope=slope)
            # Round 1: only a counts, by 2.
            assert model.w.tolist() == [14.0, 14.0]
            train(model, optimizer, steps=9, slope=slope)
        return i.metrics()

    with pytest.warns(AtollWarning, match=r"Round 1 refused .*'b'.*'w' is NaN") as seen:
        a, b = together(
            partial(live, "a", 1.0, breaks=False), partial(live, "b", 3.0, breaks=True)
        )

    # Round 2: 2 and 6, mean 4. b counts again, from the anchor.
    assert anchor_of(run) == [10.0, 10.0]
    assert len(seen) == 1
    assert (b["atoll/updates_refused"], b["atoll/updates_counted"]) == (1, 1)
    assert (a["atoll/updates_refused"], a["atoll/updates_counted"]) == (0, 2)


def test_three_refusals_in_succession_end_the_island() -> None:
    """Its moments are poisoned too, and the message says what to do."""
    run, model = run_of(), Weights(16.0, 16.0)
    with atoll.torch.join(model, optimizer := sgd(model), run, island="a"):
        for _ in range(2):
            train_poisoned(model, optimizer)
            assert model.w.tolist() == [16.0, 16.0]
        with pytest.raises(Refused, match=r"3 times in succession.*fresh optimizer"):
            train_poisoned(model, optimizer)
        # Who goes on all the same is told again, and does not train apart unnoticed.
        with pytest.raises(Refused, match="3 times in succession"):
            train(model, optimizer)


def test_a_counted_round_between_refusals_starts_the_count_again() -> None:
    """Only refusals in succession end an island."""
    run, model = run_of(), Weights(16.0, 16.0)
    with atoll.torch.join(model, optimizer := sgd(model), run):
        for fails in (True, True, False, True, True):
            (train_poisoned if fails else train)(model, optimizer)

    # One round of five counted, by 1.
    assert anchor_of(run) == [15.0, 15.0]
    assert run.state(0).header.round == 5


def test_a_round_whose_every_update_was_refused_is_void() -> None:
    """State unchanged, bit for bit, velocity included; the round number is used."""
    nesterov = {"optimizer": "nesterov", "lr": 0.5, "momentum": 0.5}
    run, model = run_of(outer=nesterov), Weights(16.0, 16.0)
    with atoll.torch.join(model, optimizer := sgd(model), run) as island:
        train(model, optimizer)
        before, digest = run.state(0), island.digest
        train_poisoned(model, optimizer)

        after = run.state(0)
        assert bits(after.body) == bits(before.body)
        assert (after.header.round, island.round, island.digest) == (2, 2, digest)
        # b = 1, change -(1 + 1/2)/2; the void round in between left b as it was, so
        # that round 3 has b = 1/2 + 1 and change -(1 + 3/4)/2.
        train(model, optimizer)
        assert anchor_of(run) == [16 - 0.75 - 0.875] * 2


def test_an_update_far_beyond_the_others_is_refused_by_its_norm() -> None:
    """From three islands on, ten times the median norm is the limit."""
    run = run_of(3, run={"end_rounds": 1})

    def live(name: str, slope: float) -> None:
        model = Weights(16.0)
        with atoll.torch.join(model, optimizer := sgd(model), run, island=name):
            train(model, optimizer, slope=slope)

    with pytest.warns(AtollWarning, match=r"refused .*'c': norm: 11 is beyond 10"):
        together(
            partial(live, "a", 1.0), partial(live, "b", 1.0), partial(live, "c", 11)
        )

    assert anchor_of(run) == [15.0]


def flip_a_bit(island: atoll.torch.Island) -> None:
    """Spoil the island's own anchor, as failing memory would.

    Nothing public can do this, and nothing public should: hence the private names.
    """
    island._handle.host.slots[0].state.anchor.view(np.uint32)[0] ^= 1 << 10


@pytest.mark.parametrize("up", ["fp32", "e3m0"])
def test_a_flipped_bit_in_an_anchor_is_found_repaired_and_reported(up: str) -> None:
    """The next update names a state nobody knows: it is refused and cannot spoil."""
    run = run_of(2, every=2, wire={"up": up}, run={"end_rounds": 3})

    def live(name: str, meddle: Callable[[atoll.torch.Island], None]) -> str:
        model = Weights(16.0)
        with atoll.torch.join(model, optimizer := sgd(model), run, island=name) as i:
            train(model, optimizer, steps=3)
            meddle(i)
            train(model, optimizer)
            # Round 2 holds a's 2 alone; b has a's weights again, from the run.
            assert model.w.tolist() == [12.0]
            train(model, optimizer, steps=9)
        return i.digest

    with pytest.warns(AtollWarning, match=r"Round 2 refused .*'b': base: .* is not"):
        a, b = together(
            partial(live, "a", lambda island: None), partial(live, "b", flip_a_bit)
        )

    assert anchor_of(run) == [10.0]
    assert a == b
    outcome = run.outcome(0, 2, wait_s=0.0)
    assert outcome is not None
    roster = outcome.agreed.header.roster
    assert roster is not None
    assert [entry.verdict for entry in roster.entries] == [
        Verdict.COUNTED,
        Verdict.REFUSED,
    ]


def test_warnings_as_errors_do_not_hurt_the_others() -> None:
    """An island whose warnings are errors stops by itself; the run does not."""
    run = run_of(2, run={"end_rounds": 2})

    def breaks() -> None:
        model = Weights(16.0, 16.0)
        with atoll.torch.join(model, optimizer := sgd(model), run, island="b"):
            poison(model)
            train(model, optimizer)

    def goes_on() -> None:
        model = Weights(16.0, 16.0)
        with atoll.torch.join(model, optimizer := sgd(model), run, island="a"):
            train(model, optimizer, steps=9)

    with warnings.catch_warnings():
        warnings.simplefilter("error", AtollWarning)
        with pytest.raises(AtollWarning, match="'w' is NaN"):
            together(goes_on, breaks)

    assert anchor_of(run) == [14.0, 14.0]
