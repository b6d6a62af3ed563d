"""A model that is built empty has every value from somewhere, and none by chance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import atoll.torch
from atoll import checkpoint
from atoll.errors import ModelError, UsageError
from atoll.exchange import MemoryRun
from tests.torch.runs import bits, run_of

pytestmark = pytest.mark.torch


class Net(torch.nn.Module):
    """Tied weights, statistics, and caches that are not saved."""

    cos: torch.Tensor
    scale: torch.Tensor
    table: torch.nn.Parameter

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in "ab")
        self.norm = torch.nn.BatchNorm1d(width)
        self.head = torch.nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight
        rates = 1.0 / 100.0 ** (torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(8).float(), rates)
        self.register_buffer("cos", angles.cos(), persistent=False)
        mask = torch.full((4, 4), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("scale", torch.tensor([2.0, 3.0]), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(rows) * self.cos.sum() * self.scale.sum()
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def a_run() -> tuple[MemoryRun, Net]:
    """Return a run, and the model that founded it and trained a while."""
    run, model = run_of(every=2), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    island = atoll.torch.join(model, optimizer, run, island="founder")
    for _ in range(4):
        model(torch.arange(4)).sum().backward()
        optimizer.step()
    island.leave()
    return run, model


def drawn() -> torch.Tensor:
    return torch.get_rng_state()


def test_every_tensor_has_the_runs_values() -> None:
    """Parameters and statistics are the anchor's; what is tied is one tensor."""
    run, _ = a_run()
    before = drawn()
    built = atoll.torch.build(Net, run)

    assert torch.equal(drawn(), before)  # no number was drawn
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    anchor = atoll.torch.join(built, optimizer, run, island="b").anchor()
    state = built.state_dict()
    for name, values in anchor.items():
        assert bits(state[name]) == bits(values), name
    assert built.head.weight is built.embed.weight
    assert not any(tensor.is_meta for tensor in built.state_dict().values())


def test_what_is_not_saved_is_what_the_constructor_makes() -> None:
    """Caches are computed by the same operations, to the bit."""
    run, _ = a_run()
    built, made = atoll.torch.build(Net, run), Net()

    for name in ("cos", "mask", "scale"):
        assert bits(built.get_buffer(name)) == bits(made.get_buffer(name)), name
    assert built.get_buffer("norm.num_batches_tracked").item() == 0


def test_a_tensor_that_nobody_has_is_named() -> None:
    """A frozen table is not in the run: its founder had none."""
    run, _ = a_run()

    def with_table() -> Net:
        net = Net()
        net.table = torch.nn.Parameter(torch.empty(3), requires_grad=False)
        return net

    with pytest.raises(UsageError, match=r"1 tensors .* 'table' \(frozen\)"):
        atoll.torch.build(with_table, run)
    built = atoll.torch.build(
        with_table, run, source={"table": torch.tensor([1.0, 2.0, 3.0])}.get
    )
    assert built.table.tolist() == [1.0, 2.0, 3.0]


def test_another_shape_is_refused_by_name() -> None:
    """Both shapes are told."""
    run, _ = a_run()
    with pytest.raises(ModelError, match=r"'embed.weight' has shape \(5, 8\) here"):
        atoll.torch.build(lambda: Net(8), run)


def test_an_empty_run_fills_nothing() -> None:
    """Its founder must have weights of its own."""
    with pytest.raises(UsageError, match="has no weights yet"):
        atoll.torch.build(Net, run_of())


class Random(torch.nn.Module):
    """Draws a buffer that is not saved, and leaves another one empty."""

    noise: torch.Tensor
    room: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(3))
        self.register_buffer("noise", torch.randn(3), persistent=False)
        self.register_buffer("room", torch.empty(2, dtype=torch.bool), persistent=False)

    def forward(self) -> torch.Tensor:
        return (self.w + self.noise).sum()


def test_no_random_initialisation_survives() -> None:
    """A buffer that is drawn, or never written, needs somebody who knows it."""
    source = {"w": torch.ones(3)}.get
    with pytest.raises(UsageError, match=r"'noise', 'room' is not persistent"):
        atoll.torch.build(Random, source=source)

    def half(net: Random) -> None:
        net.noise.zero_()

    with pytest.raises(UsageError, match=r"'room' is not persistent"):
        atoll.torch.build(Random, source=source, initialise=half)

    def both(net: Random) -> None:
        net.noise.zero_()
        net.room = torch.zeros(2, dtype=torch.bool)

    built = atoll.torch.build(Random, source=source, initialise=both)
    assert built().item() == 3.0


def test_a_checkpoint_with_weights_fills_a_model(tmp_path: Path) -> None:
    """An ordinary resume goes the same way, and needs no run."""
    model = Net()
    checkpoint.save(tmp_path, {"model": model}, components=["model"])

    built = atoll.torch.build(Net, checkpoint=tmp_path)

    for name, values in model.state_dict().items():
        assert bits(built.state_dict()[name]) == bits(values), name
    assert built.head.weight is built.embed.weight


def test_external_weights_need_a_run_or_a_source(tmp_path: Path) -> None:
    """A checkpoint that says so is believed; nothing else is put there instead."""
    run, model = a_run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint.save(tmp_path, {"optimizer": optimizer}, components=["optimizer"])

    with pytest.raises(UsageError, match="are external"):
        atoll.torch.build(Net, checkpoint=tmp_path)
    atoll.torch.build(Net, run, checkpoint=tmp_path)


def test_an_island_on_meta_is_refused_by_name() -> None:
    """Nobody trains what is not there."""
    with torch.device("meta"):
        model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"'embed.weight' is on the meta device"):
        atoll.torch.join(model, optimizer, run_of())


def test_an_optimizer_of_replaced_parameters_is_refused_by_name() -> None:
    """`to_empty` replaces them: the model would stand still, and nobody would know."""
    with torch.device("meta"):
        model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to_empty(device="cpu")
    with pytest.raises(
        UsageError, match=r"trains 2 tensors .* does not train 'weight', 'bias'"
    ):
        atoll.torch.join(model, optimizer, run_of())


def frozen() -> Net:
    """Return the model with a table that nobody trains."""
    net = Net()
    net.table = torch.nn.Parameter(torch.arange(3.0), requires_grad=False)
    return net


@pytest.mark.parametrize("most", [2**20, 0])
def test_constants_come_from_the_run_unless_it_declines_them(most: int) -> None:
    """What the founder froze is the model's again; a run that keeps none is told."""
    run = run_of(limits={"max_constants_bytes": most})
    model = frozen()
    with torch.no_grad():
        model.table.copy_(torch.tensor([4.0, 5.0, 6.0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    island = atoll.torch.join(model, optimizer, run, island="founder")
    model.table.data.zero_()  # the run has a copy

    if most:
        assert atoll.torch.build(frozen, run).table.tolist() == [4.0, 5.0, 6.0]
    else:
        with pytest.raises(UsageError, match=r"'table' \(frozen\).* founder uploaded"):
            atoll.torch.build(frozen, run)
    island.leave()
