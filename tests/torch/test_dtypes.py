"""What is carried and how: precisions, buffers, tied and frozen parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import atoll.torch
from atoll.errors import ModelError
from atoll.exchange import MemoryRun
from tests.torch.runs import Weights, anchor_of, bits, run_of, sgd, together, train

pytestmark = pytest.mark.torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Mixed(torch.nn.Module):
    """One parameter of every dtype, next to each other in one fragment."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.full = torch.nn.Parameter(torch.full((3,), value))
        self.brain = torch.nn.Parameter(torch.full((3,), value, dtype=torch.bfloat16))
        self.short = torch.nn.Parameter(torch.full((3,), value, dtype=torch.float16))

    def forward(self, slope: float) -> torch.Tensor:
        parts = [(p.float() * slope).sum() for p in self.parameters()]
        return torch.stack(parts).sum()


def island_of(
    model: torch.nn.Module, run: MemoryRun, name: str, *, slope: float | None
) -> None:
    """Live through a whole run; without a slope, count inner steps that do nothing."""
    with atoll.torch.join(model, optimizer := sgd(model), run, island=name):
        while True:
            if slope is None:
                optimizer.step()
            else:
                train(model, optimizer, slope=slope)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_island_that_does_not_train_contributes_exactly_zero(
    dtype: torch.dtype,
) -> None:
    """What it sends is what was loaded minus what is there, at every dtype."""
    run = run_of(2, every=2, outer={"lr": 0.375}, run={"end_rounds": 2})
    idle, busy = Weights(1.0, dtype=dtype), Weights(1.0, dtype=dtype)

    together(
        partial(island_of, idle, run, "a", slope=None),
        partial(island_of, busy, run, "b", slope=2.0**-7),
    )

    # b moves by 2 * 2**-7 per round and a by nothing: mean 2**-7, times lr 3/8, is
    # 3 * 2**-10 per round. Below 1, fp16 numbers are 2**-11 apart and load that as it
    # is; bf16 numbers are 2**-8 apart, so 1 - 3 * 2**-10 loads as 1 - 2**-8. Had a sent
    # anchor minus local, round 2 would hold that 2**-10 of rounding, as if it were
    # work.
    # From either start b's two steps of 2**-7 are exact.
    assert anchor_of(run) == [1 - 2 * 3 * 2.0**-10]
    assert bits(idle.w) == bits(torch.tensor([1 - 2 * 3 * 2.0**-10]).to(dtype))
    assert bits(busy.w) == bits(idle.w)


def test_dtypes_side_by_side_in_one_fragment() -> None:
    """Each tensor is cast on its own; the anchor is fp32 for all, and the same."""
    run = run_of(2, outer={"lr": 0.375}, run={"end_rounds": 2})
    idle, busy = Mixed(1.0), Mixed(1.0)

    together(
        partial(island_of, idle, run, "a", slope=None),
        partial(island_of, busy, run, "b", slope=2.0**-6),
    )

    # One step of 2**-6 per round: the same numbers as above.
    expected = 1 - 2 * 3 * 2.0**-10
    assert anchor_of(run) == [expected] * 9
    for parameter in (*idle.parameters(), *busy.parameters()):
        loaded = torch.full((3,), expected).to(parameter.dtype)
        assert bits(parameter) == bits(loaded)


def test_the_anchor_is_kept_beyond_the_precision_of_the_weights() -> None:
    """Steps too small for a dtype still add up in the anchor, and then show."""
    run = run_of(2, outer={"lr": 0.25}, run={"end_rounds": 8})
    models = [Weights(1.0, dtype=torch.bfloat16) for _ in "ab"]

    together(
        *(
            partial(island_of, model, run, name, slope=2.0**-8)
            for model, name in zip(models, "ab", strict=True)
        )
    )

    # bf16 numbers below 1 are 2**-8 apart: each round moves by one, times 1/4. A step
    # of 2**-10 does not show in bf16; eight of them are two bf16 steps.
    assert anchor_of(run) == [1 - 8 * 2.0**-10]
    assert models[0].w.tolist() == [1 - 2 * 2.0**-8]


def test_weights_at_the_edge_of_fp16_stay_finite() -> None:
    """The largest fp16 number is loaded, trained and sent like any other."""
    run = run_of(outer={"lr": 0.5}, run={"end_rounds": 2})
    model = Weights(65504.0, dtype=torch.float16)

    island_of(model, run, "a", slope=64.0)

    # fp16 numbers there are 32 apart. Round 1: 64 half counted, 65472; then 65440.
    assert anchor_of(run) == [65440.0]
    assert model.w.tolist() == [65440.0]


class Tied(torch.nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(2, 1)
        self.head = torch.nn.Linear(1, 2, bias=False)
        torch.nn.init.constant_(self.embed.weight, value)
        self.head.weight = self.embed.weight

    def forward(self, slope: float) -> torch.Tensor:
        return (self.embed.weight * slope).sum()


def test_a_tied_parameter_is_carried_once_and_stays_tied() -> None:
    """One name, one tensor, the same storage before and after adopting."""
    run = run_of(2, run={"end_rounds": 1})
    models = [Tied(8.0), Tied(0.0)]
    storage = models[1].head.weight.data_ptr()

    def live(model: Tied, name: str, slope: float) -> list[str]:
        with atoll.torch.join(model, optimizer := sgd(model), run, island=name) as i:
            train(model, optimizer, slope=slope)
        return list(i.anchor())

    names = together(
        partial(live, models[0], "a", 1.0), partial(live, models[1], "b", 3.0)
    )

    # Mean of 1 and 3 is 2: had the tied weight counted twice, it would be 8 - 4.
    assert names == [["embed.weight"], ["embed.weight"]]
    assert anchor_of(run) == [6.0, 6.0]
    assert models[1].head.weight is models[1].embed.weight
    assert models[1].head.weight.data_ptr() == storage
    assert models[1].head.weight.tolist() == [[6.0], [6.0]]


class Adapted(torch.nn.Module):
    """A large frozen base and a small adapter, as LoRA has them."""

    def __init__(self, base: float, *, width: int = 4096) -> None:
        super().__init__()
        self.base = torch.nn.Parameter(torch.full((width,), base), requires_grad=False)
        self.adapter = torch.nn.Parameter(torch.ones(2))

    def forward(self, slope: float) -> torch.Tensor:
        return (self.adapter * slope).sum() + self.base.sum() * 0


def test_a_frozen_base_is_not_carried() -> None:
    """It is in no anchor and in no update, and training leaves its bytes alone."""
    run = run_of(run={"end_rounds": 4})
    model = Adapted(0.5)
    with atoll.torch.join(model, optimizer := sgd(model), run) as island:
        train(model, optimizer, steps=9)

    # Four steps by 1. Two weights travel, not 4098: 16 KB each way would show.
    assert list(island.anchor()) == ["adapter"]
    assert island.anchor()["adapter"].tolist() == [-3.0, -3.0]
    assert island.metrics()["atoll/bytes_up"] < 4 * 1000
    assert island.metrics()["atoll/bytes_down"] < 4 * 1000
    assert model.base.eq(0.5).all()


def test_a_frozen_base_that_differs_is_refused_by_name() -> None:
    """Constants are compared by digest when an island joins."""
    run, founder, other = run_of(), Adapted(0.5), Adapted(0.25)
    with (
        atoll.torch.join(founder, sgd(founder), run),
        pytest.raises(ModelError, match=r"'base' is a constant.*digest.* and a"),
    ):
        atoll.torch.join(other, sgd(other), run)


@pytest.mark.parametrize(
    ("freezes", "sentence"),
    [
        (True, "'adapter' was trained when the island joined, and is frozen now"),
        (False, "'base' was frozen when the island joined, and is trained now"),
    ],
)
def test_what_is_trained_cannot_change_during_a_run(
    freezes: bool, sentence: str
) -> None:
    """The next seal finds it, by name, and says when to do it."""
    run, model = run_of(every=2), Adapted(0.5)
    with atoll.torch.join(model, optimizer := sgd(model), run):
        train(model, optimizer)
        (model.adapter if freezes else model.base).requires_grad_(not freezes)
        with pytest.raises(ModelError, match=f"{sentence}.*before joining"):
            optimizer.step()


def reload(model: torch.nn.Module) -> None:
    model.load_state_dict(
        {k: v + 1 for k, v in model.state_dict().items()}, assign=True
    )


def new_buffer(model: torch.nn.Module) -> None:
    model.register_buffer("mean", torch.zeros(1))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (reload, "'w' is another tensor than when the island joined"),
        (new_buffer, "'mean' is another tensor than when the island joined"),
        (torch.nn.Module.bfloat16, r"'w' was torch\.float32 .* torch\.bfloat16 now"),
    ],
)
def test_tensors_that_were_replaced_are_not_lost_from_sight(
    change: Callable[[torch.nn.Module], object], sentence: str
) -> None:
    """Without this an island would go on contributing what it no longer trains."""
    run, model = run_of(every=2), Weights(1.0)
    model.register_buffer("mean", torch.ones(1))
    with atoll.torch.join(model, optimizer := sgd(model), run):
        train(model, optimizer)
        change(model)
        with pytest.raises(ModelError, match=f"{sentence}.*before joining"):
            optimizer.step()


def test_memory_formats_do_not_matter() -> None:
    """A channels-last convolution shares a run with a plain one, value by value."""
    run = run_of(2, run={"end_rounds": 1})
    plain, last = torch.nn.Conv2d(2, 2, 3), torch.nn.Conv2d(2, 2, 3)
    founded = plain.weight.detach().clone()
    values = last.weight.detach().contiguous(memory_format=torch.channels_last)
    last.weight = torch.nn.Parameter(values)
    stride = last.weight.stride()

    def live(model: torch.nn.Conv2d, name: str) -> None:
        with atoll.torch.join(model, sgd(model), run, island=name) as island:
            island.sync_now()

    with atoll.torch.join(plain, sgd(plain), run, island="founder"):
        pass
    together(partial(live, plain, "a"), partial(live, last, "b"))

    assert torch.equal(last.weight, founded)
    assert last.weight.stride() == stride != plain.weight.stride()


def test_floating_buffers_become_the_mean_and_counters_stay() -> None:
    """BatchNorm's running mean is averaged in every round, whatever the outer step."""
    nesterov = {"optimizer": "nesterov", "lr": 0.5, "momentum": 0.5}
    run = run_of(2, every=2, outer=nesterov, run={"end_rounds": 1})

    def live(name: str, value: float) -> torch.nn.BatchNorm1d:
        norm = torch.nn.BatchNorm1d(1, momentum=0.5)
        optimizer = sgd(norm)
        with atoll.torch.join(norm, optimizer, run, island=name):
            while True:
                norm(torch.full((2, 1), value)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return norm

    norms = together(partial(live, "a", 4.0), partial(live, "b", 8.0))

    # From 0, two batches of a constant x with momentum 1/2 give 3/4 x: 3 and 6, so
    # 4.5. The variance halves twice from 1, as these batches have none: 1/4.
    for norm in norms:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert norm.running_mean.tolist() == [4.5]
        assert norm.running_var.tolist() == [0.25]
        assert norm.num_batches_tracked is not None
        assert norm.num_batches_tracked.item() == 2
    assert anchor_of(run, fragment=1) == [4.5, 0.25]


def test_counters_are_nobodys_business() -> None:
    """Batch counters may differ between islands; tables of integers must agree."""
    run, norms = run_of(), [torch.nn.BatchNorm1d(1), torch.nn.BatchNorm1d(1)]
    norms[1](torch.zeros(2, 1))
    with (
        atoll.torch.join(norms[0], sgd(norms[0]), run),
        atoll.torch.join(norms[1], sgd(norms[1]), run),
    ):
        assert norms[1].num_batches_tracked is not None
        assert norms[1].num_batches_tracked.item() == 1

    tables = [Weights(1.0), Weights(1.0)]
    for value, model in enumerate(tables):
        model.register_buffer("table", torch.tensor([value]))
    run = run_of()
    with (
        atoll.torch.join(tables[0], sgd(tables[0]), run),
        pytest.raises(ModelError, match="'table' is a constant"),
    ):
        atoll.torch.join(tables[1], sgd(tables[1]), run)


def test_buffers_that_are_not_saved_are_not_carried() -> None:
    """A non-persistent buffer belongs to each island."""
    models = [Weights(1.0), Weights(1.0)]
    for value, model in enumerate(models):
        model.register_buffer("cache", torch.tensor([float(value)]), persistent=False)
    run = run_of()
    with (
        atoll.torch.join(models[0], sgd(models[0]), run) as a,
        atoll.torch.join(models[1], sgd(models[1]), run),
    ):
        assert list(a.anchor()) == ["w"]
        assert models[1].get_buffer("cache").tolist() == [1.0]
