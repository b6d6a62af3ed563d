"""Loops as people write them: compiled, accumulated, scaled, with two optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import cast

import pytest
import torch

import atoll.torch
from tests.torch.runs import Weights, anchor_of, bits, run_of, sgd, together, train

pytestmark = pytest.mark.torch


def compile_model(model: torch.nn.Module, *, backend: str) -> torch.nn.Module:
    return cast(torch.nn.Module, torch.compile(model, backend=backend))


def test_a_compiled_model_has_the_names_of_the_plain_one() -> None:
    """One island compiles and the other does not; they share a run, and its rounds."""
    run = run_of(2, every=2, run={"end_rounds": 2})
    torch._dynamo.reset()

    def live(model: torch.nn.Module, name: str, slope: float) -> list[str]:
        with atoll.torch.join(model, optimizer := sgd(model), run, island=name) as i:
            while True:
                train(model, optimizer, slope=slope)
        return list(i.anchor())

    plain = Weights(8.0)
    compiled = compile_model(Weights(0.0), backend="aot_eager")
    names = together(partial(live, plain, "a", 0.5), partial(live, compiled, "b", 1.5))

    # Each round: two steps by 0.5 and by 1.5, mean 2. 8 - 2 - 2.
    assert names == [["w"], ["w"]]
    assert anchor_of(run) == [4.0]
    assert [p.tolist() for p in compiled.parameters()] == [[4.0]]


def test_a_compiled_part_of_a_model_has_the_names_of_the_plain_one() -> None:
    """torch.compile of a submodule changes names too, and the run does not see it."""
    plain = torch.nn.Sequential(torch.nn.Linear(1, 1))
    partly = torch.nn.Sequential(torch.nn.Linear(1, 1))
    partly[0] = compile_model(partly[0], backend="eager")
    run = run_of()
    with (
        atoll.torch.join(plain, sgd(plain), run) as a,
        atoll.torch.join(partly, sgd(partly), run) as b,
    ):
        assert list(a.anchor()) == list(b.anchor()) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("compiles_first", [True, False])
def test_a_compiled_optimizer_step_is_counted(compiles_first: bool) -> None:
    """Hooks run under torch.compile(optimizer.step), made before or after joining."""
    torch._dynamo.reset()
    run = run_of(every=2, run={"end_rounds": 3})
    model = Weights(8.0)
    optimizer = sgd(model)
    step: Callable[[], object] = optimizer.step
    if compiles_first:
        step = torch.compile(optimizer.step, backend="eager")
    with atoll.torch.join(model, optimizer, run) as island:
        if not compiles_first:
            step = torch.compile(optimizer.step, backend="eager")
        while True:
            model(1.0).backward()
            step()
            optimizer.zero_grad()

    # 3 rounds of 2 steps by 1.
    assert island.inner_steps == 6
    assert anchor_of(run) == [2.0]
    assert model.w.tolist() == [2.0]


def test_rounds_count_optimizer_steps_not_batches() -> None:
    """With gradient accumulation of 4, a round of 2 inner steps takes 8 batches."""
    run, model = run_of(every=2, run={"end_rounds": 2}), Weights(8.0)
    optimizer = sgd(model)
    batches = 0
    with atoll.torch.join(model, optimizer, run) as island:
        while True:
            for _ in range(4):
                (model(1.0) / 4).backward()
                batches += 1
            optimizer.step()
            optimizer.zero_grad()

    # 4 inner steps by 4 * 1/4.
    assert (batches, island.inner_steps, island.round) == (16, 4, 2)
    assert anchor_of(run) == [4.0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_gradient_scaler_skips_is_no_inner_step(fused: bool) -> None:
    """An overflow costs a batch, not an inner step, for plain and fused optimizers."""
    run, model = run_of(every=2, run={"end_rounds": 1}), Weights(8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    slopes = iter([1.0, float("inf"), float("nan"), 1.0, 1.0])
    with atoll.torch.join(model, optimizer, run) as island:
        for slope in slopes:
            scaler.scale(model(slope)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    # Two of the first four batches overflow, so that the fourth ends the round.
    assert list(slopes) == [1.0]
    assert island.inner_steps == 2
    assert anchor_of(run) == [6.0]


class MatrixAndVector(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.eye(2) * 4)
        self.vector = torch.nn.Parameter(torch.full((2,), 4.0))

    def forward(self, slope: float) -> torch.Tensor:
        return (self.matrix * slope).sum() + (self.vector * slope).sum()


def test_of_two_optimizers_the_last_counts() -> None:
    """Muon trains the matrices and AdamW the rest; one inner step is both of them."""
    run, model = run_of(every=2, run={"end_rounds": 2}), MatrixAndVector()
    twin = copy.deepcopy(model)

    def optimizers(of: MatrixAndVector) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Muon([of.matrix], lr=0.125, weight_decay=0.0),
            torch.optim.AdamW([of.vector], lr=0.125, weight_decay=0.0),
        ]

    def loop(of: MatrixAndVector, both: list[torch.optim.Optimizer], to: int) -> None:
        for _ in range(to):
            of(1.0).backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()

    both = optimizers(model)
    with atoll.torch.join(model, both, run) as island:
        loop(model, both, 99)
    loop(twin, optimizers(twin), 4)

    # Alone with outer lr 1: 2 rounds of 2 inner steps are 4 steps of a plain loop, to
    # the rounding of anchor - (anchor - local): half an ulp of 4 per round at most.
    assert island.inner_steps == 4
    for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, plain, rtol=0.0, atol=2 * 2.0**-22)
    assert model.vector.tolist() != [4.0, 4.0]
    assert model.matrix.tolist() != (torch.eye(2) * 4).tolist()


@pytest.mark.parametrize("foreach", [False, True])
def test_a_sync_does_not_touch_the_inner_optimizers_state(foreach: bool) -> None:
    """Adam's moments and count are those of a twin that never synchronised."""
    run, model = run_of(every=3, outer={"lr": 0.5}), Weights(1.5, 1.25)
    twin = copy.deepcopy(model)

    def adam(of: Weights) -> torch.optim.Adam:
        return torch.optim.Adam(of.parameters(), lr=0.125, foreach=foreach)

    optimizer, plain = adam(model), adam(twin)
    with atoll.torch.join(model, optimizer, run) as island:
        for step, slope in enumerate((1.0, 3.0, -2.0, 0.5), start=1):
            train(model, optimizer, slope=slope)
            train(twin, plain, slope=slope)
            assert island.round == (step >= 3)

    # The gradient is the slope alone, so that both see the same ones; outer lr 1/2
    # makes the weights differ after the sync, while the moments do not.
    assert model.w.tolist() != twin.w.tolist()
    mine, theirs = optimizer.state[model.w], plain.state[twin.w]
    assert mine.keys() == theirs.keys() == {"step", "exp_avg", "exp_avg_sq"}
    for key in mine:
        assert bits(mine[key]) == bits(theirs[key])


def test_the_optimizer_still_holds_the_very_same_parameters() -> None:
    """Adopting writes into the storage there is; no tensor is replaced."""
    run, model = run_of(every=2), Weights(8.0)
    optimizer = torch.optim.AdamW(model.parameters())
    parameter, storage = model.w, model.w.data_ptr()
    with atoll.torch.join(model, optimizer, run):
        train(model, optimizer, steps=4)

    assert model.w is parameter
    assert model.w.data_ptr() == storage
    assert optimizer.param_groups[0]["params"][0] is parameter
    assert model.w.requires_grad


def test_an_optimizer_with_a_closure_is_counted_once_per_step() -> None:
    """LBFGS calls its closure many times; a step is a step."""
    run, model = run_of(every=2, run={"end_rounds": 1}), Weights(8.0)
    optimizer: torch.optim.Optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.5, max_iter=4
    )

    def closure() -> float:
        optimizer.zero_grad()
        loss = model() * model()
        torch.autograd.backward(loss)
        return float(loss.item())

    with atoll.torch.join(model, optimizer, run) as island:
        while True:
            optimizer.step(closure)

    assert (island.inner_steps, island.round) == (2, 1)
