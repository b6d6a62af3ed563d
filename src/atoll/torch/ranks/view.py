"""Live weights and constants of one rank: it reads the elements that it owns.

`RankView` implements `ParameterView` on the rank's compact vectors. All ranks write at
the same time: the owner of elements sends their new values to its replicas, so that
replicas have the same bits.

Constants, such as a frozen base under FSDP2, are compared with those of the run, and
uploaded to a run that the island founds, one at a time at the leader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.exchange.base import in_parts
from atoll.protocol import ModelSpec, TensorSpec
from atoll.torch.model import raw_bytes
from atoll.torch.ranks.channel import LEADER, RankChannel
from atoll.torch.ranks.dispatcher import RankDispatcher, Thread, on_all_ranks
from atoll.torch.ranks.ownership import Ownership, RankTensors, Table
from atoll.weights import Layout
from atoll.weights.layout import F32
from atoll.weights.ranges import Ranges, box_runs
from atoll.wire import PIECE_ELEMENTS, blake3_digest
from atoll.wire.digests import Bytes

CHUNK = PIECE_ELEMENTS
"""Elements that go from rank to rank at a time: a megabyte."""


Route = tuple[int, Ranges]
"""Another rank, and elements of this rank's vector."""


class TensorVector:
    """Tensors of a rank, end to end, as if they were one vector."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.elements = sum(tensor.numel() for tensor in tensors)

    @torch.no_grad()
    def read(self, first: int, out: F32) -> None:
        """Copy elements from `first` on, as fp32."""
        values = torch.from_numpy(out)
        for tensor, source, target in self._between(first, len(out)):
            values[target].copy_(tensor.reshape(-1)[source])

    @torch.no_grad()
    def write(self, first: int, new: F32) -> None:
        """Change elements from `first` on, each cast to its own dtype."""
        values = torch.from_numpy(new)
        for tensor, target, source in self._between(first, len(new)):
            if tensor.is_contiguous():
                tensor.view(-1)[target].copy_(values[source])
            else:
                flat = tensor.reshape(-1)
                flat[target].copy_(values[source])
                tensor.copy_(flat.view(tensor.shape))

    def _between(
        self, first: int, size: int
    ) -> Iterator[tuple[torch.Tensor, slice, slice]]:
        """Yield tensors, the slice of each, and its slice of the requested elements."""
        start, last = 0, first + size
        for tensor in self._tensors:
            stop = start + tensor.numel()
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                inside = slice(begin - start, end - start)
                yield tensor, inside, slice(begin - first, end - first)
            start = stop


class RankView:
    """The live weights that one rank owns, of an island of several."""

    def __init__(self, rank_tensors: RankTensors, channel: RankChannel) -> None:
        self._tensors, self._channel = rank_tensors, channel
        self._ownership: Ownership | None = None
        self.vectors: list[TensorVector] = []
        """Per fragment, all values of this rank."""

        self._owned: list[Ranges] = []
        """Per fragment, the positions of the owned elements in `vectors`."""

        self._routes: dict[int, tuple[list[Route], list[Route]]] = {}
        """Per fragment, the owned elements to send, and the held ones to receive."""

    def set_ownership(self, ownership: Ownership) -> None:
        """Set the owners of all elements, and lay out accordingly."""
        self._ownership, rank = ownership, self._channel.rank
        self.vectors, self._owned, self._routes = [], [], {}
        for index in range(len(ownership.layout)):
            tensors = ownership.part(rank, index, owned=False).tensors
            locals_ = [self._tensors.local(tensor.name) for tensor in tensors]
            self.vectors.append(TensorVector(locals_))
            held_ranges = ownership.held_ranges(rank, index)
            self._owned.append(ownership.owned(rank, index).inside(held_ranges))

    def lay_out(self, layout: Layout) -> None:
        """Do nothing: `set_ownership` has laid out the fragments."""

    def read(self, fragment: int, out: F32) -> None:
        self._tensors.require_same_training()
        for compact, position in self._owned[fragment].stretches(0, len(out)):
            self.vectors[fragment].read(position.start, out[compact])

    def write(self, fragment: int, values: F32) -> None:
        self._tensors.reshard()
        for compact, position in self._owned[fragment].stretches(0, len(values)):
            self.vectors[fragment].write(position.start, values[compact])
        self._swap(fragment, values)

    def keep_local(self) -> list[F32]:
        """Return a copy of all values of this rank, for `restore_local`."""
        vectors = [np.empty(vector.elements, np.float32) for vector in self.vectors]
        for vector, values in zip(self.vectors, vectors, strict=True):
            vector.read(0, values)
        return vectors

    def restore_local(self, vectors: list[F32]) -> None:
        """Write back the values that `keep_local` has returned."""
        self._tensors.reshard()
        for vector, values in zip(self.vectors, vectors, strict=True):
            vector.write(0, values)

    def _swap(self, fragment: int, values: F32) -> None:
        """Exchange the elements that several ranks hold, a chunk of each at a time."""
        if fragment not in self._routes:
            self._routes[fragment] = self._find_routes(fragment)
        gives, gets = self._routes[fragment]
        for number in count():
            outgoing = [
                (rank, _picked(values, ranges, number))
                for rank, ranges in gives
                if number * CHUNK < ranges.elements
            ]
            incoming = [
                (rank, ranges, np.empty(_size(ranges, number), np.float32))
                for rank, ranges in gets
                if number * CHUNK < ranges.elements
            ]
            if not (outgoing or incoming):
                return
            self._channel.exchange_vectors(
                outgoing, [(rank, new) for rank, _, new in incoming]
            )
            for _, ranges, new in incoming:
                self._put(fragment, ranges, number, new)

    def _put(self, fragment: int, ranges: Ranges, number: int, new: F32) -> None:
        first = number * CHUNK
        for compact, position in ranges.stretches(first, first + len(new)):
            part = new[compact.start - first : compact.stop - first]
            self.vectors[fragment].write(position.start, part)

    def _find_routes(self, fragment: int) -> tuple[list[Route], list[Route]]:
        ownership, me = self._ownership, self._channel.rank
        assert ownership is not None
        owned = ownership.owned(me, fragment)
        held_ranges = ownership.held_ranges(me, fragment)
        others = self._channel.others
        gives = [
            (to, ownership.shared(me, to, fragment).inside(owned)) for to in others
        ]
        gets = [
            (by, ownership.shared(by, me, fragment).inside(held_ranges))
            for by in others
        ]
        return gives, gets


def _size(ranges: Ranges, number: int) -> int:
    return min(CHUNK, ranges.elements - number * CHUNK)


def _picked(values: F32, ranges: Ranges, number: int) -> F32:
    """Return a copy of a chunk of some of a vector's elements."""
    first, size = number * CHUNK, _size(ranges, number)
    picked = np.empty(size, np.float32)
    for compact, position in ranges.stretches(first, first + size):
        picked[compact.start - first : compact.stop - first] = values[position]
    return picked


U8 = NDArray[np.uint8]


def with_digests(
    channel: RankChannel, table: Table, rank_tensors: RankTensors, model: ModelSpec
) -> ModelSpec:
    """Return the model with the digests of all constants, at the leader.

    The other ranks return their own model: they compare nothing with the run.
    """
    return ModelSpec(
        tuple(
            replace(spec, digest=_digest(channel, table, rank_tensors, spec))
            if spec.role == "constant" and not spec.digest
            else spec
            for spec in model.tensors
        )
    )


class RankConstants:
    """The constants of all ranks. Implements `Constants` at the leader."""

    def __init__(
        self, ranks: RankDispatcher, table: Table, tensors: RankTensors, spec: ModelSpec
    ) -> None:
        self.ranks, self._table, self._tensors = ranks, table, tensors
        self._specs = {tensor.name: tensor for tensor in spec.tensors}
        ranks.register(self)

    def parts(self, constant: TensorSpec, first: int = 0) -> Iterator[Bytes]:
        yield from in_parts(self.gather(constant.name), first)

    @on_all_ranks(Thread.TRAINING)
    def gather(self, name: str) -> U8:
        """Return all bytes of a constant, at the leader."""
        channel, spec = self.ranks.orders, self._specs[name]
        if channel.is_leader:
            return gather(channel, self._table, self._tensors, spec)
        give(channel, self._table, self._tensors, spec)
        return np.empty(0, np.uint8)


def _digest(
    channel: RankChannel, table: Table, rank_tensors: RankTensors, spec: TensorSpec
) -> str:
    if channel.is_leader:
        return blake3_digest(gather(channel, table, rank_tensors, spec)).hex()
    give(channel, table, rank_tensors, spec)
    return spec.digest


def give(
    channel: RankChannel, table: Table, rank_tensors: RankTensors, spec: TensorSpec
) -> None:
    """Send the leader this rank's part of a constant, if this rank is to send it."""
    if channel.rank in dict(_holders(table, spec)):
        for part in _chunked(_mine(rank_tensors, spec)):
            channel.send_vector(LEADER, part.copy())


def _mine(rank_tensors: RankTensors, spec: TensorSpec) -> U8:
    return np.frombuffer(raw_bytes(rank_tensors.local(spec.name)), np.uint8)


def gather(
    channel: RankChannel, table: Table, rank_tensors: RankTensors, spec: TensorSpec
) -> U8:
    """Return all bytes of a constant, while the other ranks call `give`."""
    holders = dict(_holders(table, spec))
    if list(holders) == [channel.rank]:
        return _mine(rank_tensors, spec)
    elements = math.prod(spec.shape)
    width = _width(spec.dtype)
    full = np.empty((elements, width), np.uint8)
    for rank, ranges in holders.items():
        if rank == channel.rank:
            values = _mine(rank_tensors, spec)
        else:
            values = np.empty(ranges.elements * width, np.uint8)
            for part in _chunked(values):
                channel.receive_vector(rank, part)
        full[ranges.cut(0, elements).positions] = values.reshape(-1, width)
    return full.reshape(-1)


def _holders(table: Table, spec: TensorSpec) -> Iterator[tuple[int, Ranges]]:
    """Yield one rank for each box of a tensor, with the elements that it has."""
    boxes = set()
    for rank, held_tensors in enumerate(table):
        for tensor in held_tensors:
            if tensor.spec.name != spec.name or tensor.is_copy or tensor.box in boxes:
                continue
            boxes.add(tensor.box)
            if 0 not in tensor.size:
                yield rank, Ranges.of([box_runs(spec.shape, *tensor.box)])


def _chunked(values: U8) -> Iterator[U8]:
    step = 4 * CHUNK
    for first in range(0, len(values), step):
        yield values[first : first + step]


def _width(dtype: str) -> int:
    """Return the bytes of an element of a dtype of torch."""
    return torch.empty(0, dtype=vars(torch)[dtype]).element_size()
