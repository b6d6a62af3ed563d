"""Real objects of PyTorch are saved and restored, and continue without a difference."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler

import atoll.checkpoint
from atoll.errors import UsageError

pytestmark = pytest.mark.torch

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def _model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def _step(model: nn.Module, optimizer: Optimizer) -> None:
    torch.manual_seed(7)
    batch = torch.randn(8, 4)

    def loss() -> float:
        optimizer.zero_grad()
        value = model(batch).square().mean()
        value.backward()
        return float(value.detach())

    optimizer.step(loss)


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_same(a, b) for a, b in pairs)
    return one == other


_OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "Adam with a tensor for lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "two groups": lambda p: torch.optim.AdamW(
        [{"params": p[:2], "lr": 0.2}, {"params": p[2:], "weight_decay": 0.0}]
    ),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_an_optimizer_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    """Three steps, a checkpoint, two steps: the same bits as a fresh one restored."""
    make = _OPTIMIZERS[name]
    model = _model(0)
    optimizer = make(list(model.parameters()))
    for _ in range(3):
        _step(model, optimizer)
    atoll.checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer})
    again = _model(1)
    restored = make(list(again.parameters()))

    atoll.checkpoint.load(tmp_path, {"model": again, "optimizer": restored})

    for _ in range(2):
        _step(model, optimizer)
        _step(again, restored)
    assert _same(model.state_dict(), again.state_dict())
    assert _same(optimizer.state_dict(), restored.state_dict())


def _chained(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    first = lr_scheduler.LinearLR(optimizer, total_iters=3)
    second = lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)
    return lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[3])


class _Ramp:
    """A callable with state, which LambdaLR saves."""

    def __init__(self, width: object) -> None:
        self.width = width

    def __call__(self, step: int) -> float:
        return 1.0 / (1.0 + step)


_SCHEDULERS: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "LambdaLR of an object": lambda o: lr_scheduler.LambdaLR(o, _Ramp(3)),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(
        o, 2
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "SequentialLR": _chained,
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


def _sgd(seed: int) -> Optimizer:
    return SGD(_model(seed).parameters(), lr=0.1, momentum=0.5)


def _advance(
    optimizer: Optimizer, scheduler: lr_scheduler.LRScheduler, steps: int
) -> list[float]:
    rates = []
    for _ in range(steps):
        optimizer.step()
        with warnings.catch_warnings():
            # SequentialLR of torch calls its parts in a way that torch deprecates.
            warnings.simplefilter("ignore", UserWarning)
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(1.0)
            else:
                scheduler.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize("name", _SCHEDULERS)
def test_a_scheduler_goes_on_where_it_was(tmp_path: Path, name: str) -> None:
    """The learning rates after a restart are those of a training without one."""
    optimizer = _sgd(0)
    scheduler = _SCHEDULERS[name](optimizer)
    _advance(optimizer, scheduler, 4)
    chosen = ["optimizer", "scheduler"]
    atoll.checkpoint.save(
        tmp_path, {"optimizer": optimizer, "scheduler": scheduler}, components=chosen
    )
    expected = _advance(optimizer, scheduler, 5)
    again = _sgd(1)
    restored = _SCHEDULERS[name](again)

    atoll.checkpoint.load(
        tmp_path, {"optimizer": again, "scheduler": restored}, components=chosen
    )

    assert _advance(again, restored, 5) == expected


def test_a_scheduler_with_what_cannot_be_saved_is_refused_by_name(
    tmp_path: Path,
) -> None:
    """A LambdaLR of an object that holds a function says where the function is."""
    scheduler = lr_scheduler.LambdaLR(_sgd(0), _Ramp(lambda step: step))

    with pytest.raises(
        UsageError, match=r"scheduler\.lr_lambdas\.0\.width is of the type function"
    ):
        atoll.checkpoint.save(
            tmp_path, {"scheduler": scheduler}, components=["scheduler"]
        )


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
    ids=str,
)
@pytest.mark.parametrize("is_copied", [False, True])
def test_tensors_of_every_dtype_come_back(
    tmp_path: Path, dtype: torch.dtype, is_copied: bool
) -> None:
    """Bits, shape and dtype; scalars, empty and transposed ones too."""
    base = torch.randint(0, 2, (3, 4)).to(dtype)
    state = {
        "t": base.t(),
        "scalar": base[0, 0],
        "empty": base[:0],
        "slice": base[:, 1],
    }
    with atoll.checkpoint.Saver(
        tmp_path, {"trainer": state}, components=["trainer"]
    ) as saver:
        if is_copied:
            saver.save()
        else:
            saver.save_and_wait()
    found: dict[str, torch.Tensor] = {}

    atoll.checkpoint.load(tmp_path, {"trainer": found}, components=["trainer"])

    for name, value in state.items():
        assert found[name].dtype == dtype
        assert found[name].shape == value.shape
        bits = [
            t.contiguous().reshape(-1).view(torch.uint8) for t in (value, found[name])
        ]
        assert torch.equal(*bits)


def test_small_values_of_torch_come_back(tmp_path: Path) -> None:
    """Sizes, dtypes and devices keep their types, and are no strings or tuples."""
    state = {
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "at": torch.device("cpu"),
    }
    atoll.checkpoint.save(tmp_path, {"trainer": state}, components=["trainer"])
    found: dict[str, object] = {}

    atoll.checkpoint.load(tmp_path, {"trainer": found}, components=["trainer"])

    assert found == state
    assert type(found["size"]) is torch.Size


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.empty(2, device="meta"), "meta device has no numbers"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.zeros(2, dtype=torch.complex128), "complex128 cannot be saved"),
    ],
    ids=["meta", "sparse", "complex128"],
)
def test_a_tensor_that_cannot_be_written_is_named(
    tmp_path: Path, value: torch.Tensor, why: str
) -> None:
    """The error has the path of the value and a remedy."""
    with pytest.raises(UsageError, match=rf"^trainer\.odd: .*{why}"):
        atoll.checkpoint.save(
            tmp_path, {"trainer": {"odd": value}}, components=["trainer"]
        )


def test_random_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    """The state of torch comes by itself, and a generator of the program with it."""
    mine = torch.Generator().manual_seed(3)
    atoll.checkpoint.save(tmp_path, {"rng": mine}, components=["rng"])
    expected = [torch.rand(3), torch.rand(3, generator=mine)]
    again = torch.Generator()

    atoll.checkpoint.load(tmp_path, {"rng": again}, components=["rng"])

    assert _same([torch.rand(3), torch.rand(3, generator=again)], expected)


class _Loader:
    """A loader that knows where it is, as stateful loaders do."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.given = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.given += 1
            yield torch.rand(2, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {
            "given": self.given,
            "generator": self.generator.get_state(),
            "w": {0: b"x"},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["w"] == {0: b"x"}
        self.given = state["given"]
        self.generator.set_state(state["generator"])


def test_a_loader_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    """No batch is given twice, and none is left out."""
    loader = _Loader()
    batches = iter(loader)
    next(batches)
    atoll.checkpoint.save(tmp_path, {"data": loader}, components=["data"])
    expected = next(batches)
    again = _Loader()

    atoll.checkpoint.load(tmp_path, {"data": again}, components=["data"])

    assert again.given == 1
    assert torch.equal(next(iter(again)), expected)


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    """One memory under two names is one array, and is restored under both."""
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    model["b"].weight = model["a"].weight
    path = atoll.checkpoint.save(tmp_path, {"model": model})

    assert (path / "model-00000.safetensors").stat().st_size < 2 * 64 * 64 * 4
    again = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    atoll.checkpoint.load(tmp_path, {"model": again})
    assert _same(model.state_dict(), again.state_dict())


def test_a_model_that_differs_is_refused_in_torchs_words(tmp_path: Path) -> None:
    """A missing or misshapen weight is an error of ours that names it."""
    atoll.checkpoint.save(tmp_path, {"model": _model(0)})

    with pytest.raises(UsageError, match=r"(?s)model does not take.*Missing key"):
        atoll.checkpoint.load(tmp_path, {"model": nn.Linear(3, 3)})


def test_nothing_is_loaded_into_a_model_without_memory(tmp_path: Path) -> None:
    """A model on meta would swallow its weights without a word: it is refused."""
    atoll.checkpoint.save(tmp_path, {"model": _model(0)})
    with torch.device("meta"):
        model = _model(1)

    with pytest.raises(UsageError, match=r"0\.weight is on the meta device"):
        atoll.checkpoint.load(tmp_path, {"model": model})


def test_momentum_is_never_given_to_another_parameter(tmp_path: Path) -> None:
    """An optimizer made of the same parameters in another order is refused by name."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    optimizer = torch.optim.AdamW(model.parameters())
    atoll.checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer})
    swapped = torch.optim.AdamW(
        list(model["b"].parameters()) + list(model["a"].parameters())
    )

    with pytest.raises(
        UsageError, match=r"Parameter 0 .* is b\.weight here and a\.weight"
    ):
        atoll.checkpoint.load(tmp_path, {"model": model, "optimizer": swapped})


def test_a_compiled_model_is_the_model_that_it_wraps(tmp_path: Path) -> None:
    """A compiled model is restored into a plain one: the names have no prefix."""
    model = _model(0)
    wrapped = torch.compile(model)
    assert isinstance(wrapped, nn.Module)
    atoll.checkpoint.save(tmp_path, {"model": wrapped})
    again = _model(1)

    atoll.checkpoint.load(tmp_path, {"model": again})

    assert _same(model.state_dict(), again.state_dict())


def test_training_beside_a_save_changes_nothing_of_it(tmp_path: Path) -> None:
    """Tensors are copied before the call returns, momentum too."""
    model = _model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)
    with atoll.checkpoint.Saver(
        tmp_path, {"model": model, "optimizer": optimizer}
    ) as s:
        s.save()
        expected = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        _step(model, optimizer)
    again = _model(1)
    restored = torch.optim.AdamW(again.parameters())

    atoll.checkpoint.load(tmp_path, {"model": again, "optimizer": restored})

    assert _same((again.state_dict(), restored.state_dict()), expected)
