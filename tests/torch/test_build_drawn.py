"""Whatever a constructor takes from chance is named, and never trained with."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

import atoll.torch
from atoll.errors import UsageError
from tests.torch.runs import bits, run_of

pytestmark = pytest.mark.torch


def _filled(values: torch.Tensor) -> torch.Tensor:
    into = torch.empty(4)
    into.copy_(values)
    return into


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "torch": lambda: torch.randn(4),
    "torch, on a device": lambda: torch.rand(4, device="cpu"),
    "torch, and computed": lambda: torch.randn(4).mul(2).cumsum(0).abs(),
    "torch, into memory": lambda: _filled(torch.randn(4)),
    "init": lambda: torch.nn.init.normal_(torch.empty(4)),
    "init, on a device": lambda: torch.nn.init.uniform_(torch.empty(4, device="cpu")),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(64), 0.5),
    "permutation": lambda: torch.randperm(64),
    "compared": lambda: torch.rand(64) > 0.5,
    "sorted": lambda: torch.rand(64).argsort(),
    "cast": lambda: torch.randn(4).bool(),
    "empty, compared": lambda: torch.empty(4) > 0.5,
    "decomposed": lambda: torch.linalg.svd(torch.randn(4, 4)).U.contiguous(),
    "indexed": lambda: torch.arange(4)[torch.randint(0, 2, (3,))],
    "numpy": lambda: torch.from_numpy(np.random.randn(4)),
    "numpy, copied": lambda: torch.tensor(np.random.randn(4)),
    "numpy, of its own": lambda: torch.as_tensor(
        np.random.default_rng().normal(size=4)
    ),
    "numpy, a scalar": lambda: torch.full((4,), float(np.random.rand())),
    "python": lambda: torch.tensor([random.random() for _ in range(4)]),
    "python, a factor": lambda: torch.ones(4) * random.random(),
    "empty": lambda: torch.empty(4),
    "empty, on a device": lambda: torch.empty(4, device="cpu"),
    "empty, of bytes": lambda: torch.empty(4, dtype=torch.uint8, device="cpu"),
    "empty, in part": lambda: torch.cat([torch.ones(2), torch.empty(2)]),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("place", ["parameter", "buffer", "cache", "attribute"])
def test_no_value_of_chance_survives(
    place: str, draw: Callable[[], torch.Tensor]
) -> None:
    """Wherever it is, it is named; a plain attribute may also stay without values."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(3))
            if place == "parameter":
                self.odd = torch.nn.Parameter(draw(), requires_grad=False)
            elif place == "attribute":
                self.odd = draw()  # type: ignore[assignment]
            else:
                self.register_buffer("odd", draw(), persistent=place == "buffer")

    source = {"w": torch.ones(3)}.get
    if place == "attribute":
        try:
            assert atoll.torch.build(Net, source=source).odd.is_meta
        except UsageError as exc:
            assert "'odd' is a plain attribute" in str(exc)  # noqa: PT017 # or meta
        return
    named = "'odd' is not persistent" if place == "cache" else r"'odd' \("
    with pytest.raises(UsageError, match=named):
        atoll.torch.build(Net, source=source)


def test_what_initialise_leaves_of_a_draw_is_named() -> None:
    """Nothing of the constructor's draw is there when it writes a part of it."""

    class Net(torch.nn.Module):
        odd: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer(
                "odd", torch.from_numpy(np.random.randn(3)), persistent=False
            )

    def part(net: Net) -> None:
        net.odd[0] = 1.0

    with pytest.raises(UsageError, match="'odd' is not persistent"):
        atoll.torch.build(Net, source=lambda name: None, initialise=part)


def test_a_count_that_is_drawn_is_named() -> None:
    """Counts begin as the constructor begins them, unless that is by chance."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.tensor(0))
            self.register_buffer("odd", torch.tensor(random.getrandbits(60)))

    with pytest.raises(UsageError, match=r"1 tensors .*'odd' \(buffer\)"):
        atoll.torch.build(Net, source=lambda name: None)


def test_what_is_the_same_twice_is_the_constructors() -> None:
    """Seeded numbers, scalars and plain attributes have their values, to the bit."""

    class Net(torch.nn.Module):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            rows = np.random.default_rng(3).normal(size=4)
            self.register_buffer("table", torch.tensor(rows), persistent=False)
            self.angles = torch.arange(4).float().cos() * 0.5

    built, made = atoll.torch.build(Net, source=lambda name: None), Net()

    assert bits(built.table) == bits(made.table)
    assert bits(built.angles) == bits(made.angles)


def test_parametrizations_are_filled_by_their_own_names() -> None:
    """A weight that is computed of others is never loaded, drawn or empty."""

    def make() -> torch.nn.Linear:
        layer = torch.nn.Linear(3, 2, bias=False)
        torch.nn.utils.parametrizations.weight_norm(layer)
        return layer

    with pytest.raises(UsageError, match=r"'parametrizations.weight.original1' \(par"):
        atoll.torch.build(make, source=lambda name: None)
    values = {
        "parametrizations.weight.original0": torch.full((2, 1), 2.0),
        "parametrizations.weight.original1": torch.eye(2, 3),
    }
    built = atoll.torch.build(make, source=values.get)
    # Rows of length 1, of which original0 makes rows of length 2.
    assert built.weight.tolist() == [[2, 0, 0], [0, 2, 0]]


def test_a_lazy_parameter_is_named() -> None:
    """It has no shape that anything could be loaded into, or joined with."""
    with pytest.raises(UsageError, match=r"'weight' is lazy.*Give the constructor"):
        atoll.torch.build(lambda: torch.nn.LazyLinear(4), source=lambda name: None)
    lazy = torch.nn.LazyLinear(4)
    optimizer = torch.optim.SGD(lazy.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="'weight' is lazy"):
        atoll.torch.join(lazy, optimizer, run_of())
