"""An all-reduce of tensors over an object store, without islands or rounds of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.errors import UsageError
from atoll.exchange.all_reduce import (
    KINDS,
    AllReduce,
    RequestCounts,
    Sections,
    Store,
    open_rendezvous,
)
from atoll.wire import blake3_digest

Bytes = NDArray[np.uint8]

T = TypeVar("T", bound=torch.Tensor)

_KINDS = {getattr(torch, kind): kind for kind in KINDS}


class StoreAllReduce:
    """Reduces tensors over a fixed number of ranks that share only a store.

    Every rank calls it equally often, with equal tensors in the same order. A rank
    that is started again continues with the round it was in.

    Args:
        url: The rendezvous of the ranks: `s3://bucket/path`, `gs://`, `az://`, or a
            directory that all of them see.
        name: Reductions of different names are independent, each with its own rounds.
        timeout_s: Longest wait of a call for the other ranks.
        start_round: The round of the first call of `name`, if you have saved `round`
            with your own checkpoint; None: the first that this rank has not done.

    Raises:
        UsageError: the store cannot put an object only where there is none, or the name
            belongs to another `world_size`.
        StoreDenied: a permission is missing.
        Unreachable: the store does not answer.
    """

    def __init__(
        self,
        url: str | PathLike[str] | Store,
        rank: int,
        world_size: int,
        *,
        name: str = "default",
        timeout_s: float = 600.0,
        start_round: int | None = None,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._name, self._timeout_s = name, timeout_s
        self._rendezvous = open_rendezvous(url)
        self._named = {name: self._new(name, start_round)}

    @property
    def round(self) -> int:
        """The round of the next call; save it with the reduced tensors."""
        return self._named[self._name].round

    @property
    def requests(self) -> RequestCounts:
        """The requests to the store until now, and their price on S3."""
        return self._rendezvous.requests

    def allreduce(self, tensor: T, name: str | None = None, *, op: str = "mean") -> T:
        """Make `tensor` the mean over all ranks, or the sum, and return it.

        Safe to repeat after an error, which leaves `tensor` unchanged.

        Raises:
            Unreachable: a rank has not come in time. The message has the rank, the
                round, the missing object and the time waited for it.
            UsageError: the tensor cannot be reduced, or others reduce something else.
            CorruptError: an object in the store does not verify.
        """
        self._reduce([tensor], name or self._name, op)
        return tensor

    def __call__(self, *tensors: T, op: str = "mean") -> T | tuple[T, ...]:
        """Reduce one tensor as `allreduce` does, or several in one round."""
        self._reduce(tensors, self._name, op)
        return tensors[0] if len(tensors) == 1 else tensors

    def close(self) -> None:
        """End its threads. Objects stay in the store: other ranks may read them."""
        self._rendezvous.close()

    def _reduce(self, tensors: Sequence[torch.Tensor], name: str, op: str) -> None:
        for index, tensor in enumerate(tensors):
            _check(tensor, index)
        ordered = sorted(tensors, key=lambda tensor: list(_KINDS).index(tensor.dtype))
        sections = Sections(_counts(ordered))
        body = np.zeros(sections.body_bytes, np.uint8)
        for tensor, view in _body_views(ordered, body):
            view[:] = _bytes(tensor)
        if name not in self._named:
            self._named[name] = self._new(name, None)
        reduced = self._named[name](body, sections, layout=_layout(tensors), op=op)
        with torch.no_grad():
            for tensor, view in _body_views(ordered, reduced):
                values = torch.from_numpy(view).view(tensor.dtype)
                tensor.copy_(values.view(tensor.shape))

    def _new(self, name: str, start_round: int | None) -> AllReduce:
        return AllReduce(
            self._rendezvous,
            rank=self._rank,
            world_size=self._world_size,
            name=name,
            timeout_s=self._timeout_s,
            start_round=start_round,
        )


def _check(tensor: torch.Tensor, index: int) -> None:
    """Raise UsageError unless a tensor can be read, and written in place."""
    prefix, kind = f"Tensor {index} cannot be reduced:", type(tensor).__name__
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise UsageError(
            f"{prefix} it is a {kind}. Give plain tensors, as local parts."
        )
    if tensor.layout is not torch.strided:
        raise UsageError(f"{prefix} its layout is {tensor.layout}. Make it dense.")
    if tensor.device.type != "cpu":
        raise UsageError(
            f"{prefix} it is on {tensor.device}. Copy it to the CPU first."
        )
    if tensor.dtype not in _KINDS:
        raise UsageError(
            f"{prefix} its dtype is {tensor.dtype}. Known are {', '.join(KINDS)}."
        )
    if any(
        stride == 0 and size > 1
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise UsageError(
            f"{prefix} several of its values are one in memory (strides "
            f"{tensor.stride()}). Clone it first."
        )


def _counts(tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    counts = dict.fromkeys(KINDS, 0)
    for tensor in tensors:
        counts[_KINDS[tensor.dtype]] += tensor.numel()
    return counts


def _layout(tensors: Sequence[torch.Tensor]) -> str:
    """Return a digest of the kinds and shapes of the tensors, in order."""
    kinds = ";".join(f"{_KINDS[t.dtype]}{tuple(t.shape)}" for t in tensors)
    return blake3_digest(kinds.encode()).hex()[:32]


def _bytes(tensor: torch.Tensor) -> Bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def _body_views(
    tensors: Sequence[torch.Tensor], body: Bytes
) -> Iterator[tuple[torch.Tensor, Bytes]]:
    """Yield each tensor, and the view of its bytes in a body."""
    start = 0
    for tensor in tensors:
        end = start + tensor.numel() * tensor.element_size()
        yield tensor, body[start:end]
        start = end
