"""The same run again, in another order, with a late island: the same bits."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

import atoll.torch
from tests.torch.networks import streamed
from tests.torch.runs import (
    Weights,
    anchor_of,
    bits,
    run_of,
    sgd,
    state_of,
    together,
    train,
)

pytestmark = pytest.mark.torch


def test_the_same_seeds_give_the_same_bits() -> None:
    """The whole run again, with threads as they come, ends in the same bits."""
    sync = {"num_fragments": 2, "fragment_order": "by_size", "overlap_steps": 1}
    assert streamed(**sync) == streamed(**sync)


def test_the_order_of_arrival_does_not_matter() -> None:
    """Who joins and who publishes first changes no bit of the mean."""
    slopes = {"a": 0.1, "b": 0.7, "c": 1e-3}
    seen = set()
    for order in ("abc", "cab", "bca", "cba"):
        run = run_of(3, sync={"sync_every": 2, "overlap_steps": 1})
        models = {name: Weights(1.0, 1e-3) for name in order}
        optimizers = {name: sgd(models[name]) for name in order}
        islands = {
            name: atoll.torch.join(models[name], optimizers[name], run, island=name)
            for name in order
        }
        for steps in (2, 1):
            for name in order:
                train(models[name], optimizers[name], steps=steps, slope=slopes[name])
        seen.add(bits(state_of(run).anchor))
        for island in islands.values():
            island.leave()

    assert len(seen) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_late_island_that_does_not_train_contributes_zero(
    dtype: torch.dtype,
) -> None:
    """It starts from the anchor, and its pseudo-gradient is exactly zero."""
    run = run_of(every=2, outer={"lr": 0.375})
    early, late = Weights(1.0, dtype=dtype), Weights(0.0, dtype=dtype)
    first = sgd(early)
    with atoll.torch.join(early, first, run, island="a"):
        train(early, first, steps=2, slope=2.0**-7)
        # Two steps of 2**-7, times 3/8: 1 - 3 * 2**-9, which bf16 cannot hold.
        assert anchor_of(run) == [1 - 3 * 2.0**-9]
        with atoll.torch.join(late, sgd(late), run, island="b") as b:
            assert bits(late.w) == bits(torch.tensor(anchor_of(run)).to(dtype))
            # Round 2 is a's alone: another 3 * 2**-9. b comes too late for it, and
            # carries nothing.
            train(early, first, steps=2, slope=2.0**-7)
            b.sync_now()
            assert b.metrics()["atoll/updates_carried"] == 1
            assert anchor_of(run) == [1 - 6 * 2.0**-9]
            assert bits(late.w) == bits(torch.tensor(anchor_of(run)).to(dtype))

            together(b.sync_now, partial(train, early, first, steps=2, slope=2.0**-7))

            # Round 3: half of a's 2**-6, as b adds exactly nothing: 3 * 2**-10 more.
            assert anchor_of(run) == [1 - 15 * 2.0**-10]


def test_a_copy_of_a_model_is_another_model() -> None:
    """Islands share nothing but the run: a deep copy trains on its own."""
    run, model = run_of(2, run={"end_rounds": 1}), Weights(8.0)
    twin = copy.deepcopy(model)

    def go(own: Weights, name: str, slope: float) -> None:
        with atoll.torch.join(own, optimizer := sgd(own), run, island=name):
            train(own, optimizer, slope=slope)

    together(partial(go, model, "a", 1.0), partial(go, twin, "b", 3.0))
    assert model.w.tolist() == twin.w.tolist() == [6.0]
