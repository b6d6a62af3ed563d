"""Live weights and constants of one rank: it reads the elements that it owns.

`RankView` implements `ParameterView` on the rank's compact vectors. All ranks write at
the same time: the owner of elements sends their new values to its replicas, so that
replicas have the same bits.

Constants, such as a frozen base under FSDP2, are compared with those of the run, and
uploaded to a run that the island founds, one at a time at the leader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.exchange.base import in_parts
from atoll.protocol import ModelSpec, TensorSpec
from atoll.torch.model import raw_bytes
from atoll.torch.ranks.channel import LEADER, Line, Message
from atoll.torch.ranks.ownership import Shares, Shelves, Table
from atoll.weights import Layout
from atoll.weights.layout import F32
from atoll.weights.ranges import Ranges, box_runs
from atoll.wire import PIECE_ELEMENTS, blake3_digest
from atoll.wire.digests import Bytes

CHUNK = PIECE_ELEMENTS
"""Elements that go from rank to rank at a time: a megabyte."""


Route = tuple[int, Ranges]
"""Another rank, and elements of a vector of this one."""


class Shelf:
    """Tensors of a rank, end to end, as if they were one vector."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.elements = sum(tensor.numel() for tensor in tensors)

    @torch.no_grad()
    def read(self, first: int, out: F32) -> None:
        """Copy elements from `first` on, as fp32."""
        values = torch.from_numpy(out)
        for tensor, at, here in self._between(first, len(out)):
            values[here].copy_(tensor.reshape(-1)[at])

    @torch.no_grad()
    def write(self, first: int, new: F32) -> None:
        """Change elements from `first` on, each cast to its own dtype."""
        values = torch.from_numpy(new)
        for tensor, at, here in self._between(first, len(new)):
            if tensor.is_contiguous():
                tensor.view(-1)[at].copy_(values[here])
            else:
                flat = tensor.reshape(-1)
                flat[at].copy_(values[here])
                tensor.copy_(flat.view(tensor.shape))

    def _between(
        self, first: int, size: int
    ) -> Iterator[tuple[torch.Tensor, slice, slice]]:
        """Yield tensors, where in each, and where among the elements asked for."""
        start, last = 0, first + size
        for tensor in self._tensors:
            stop = start + tensor.numel()
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                at = slice(begin - start, end - start)
                yield tensor, at, slice(begin - first, end - first)
            start = stop


class RankView:
    """The live weights that one rank owns, of an island of several."""

    def __init__(self, shelves: Shelves, line: Line) -> None:
        self._shelves, self._line = shelves, line
        self._shares: Shares | None = None
        self.held: list[Shelf] = []
        """Per fragment, everything that is here."""

        self._owned: list[Ranges] = []
        """Per fragment, where in that the owned elements are."""

        self._routes: dict[int, tuple[list[Route], list[Route]]] = {}
        """Per fragment, who is given which owned elements, and who gives which held."""

    def share(self, shares: Shares) -> None:
        """Learn who owns what, and lay out accordingly."""
        self._shares, rank = shares, self._line.rank
        self.held, self._owned, self._routes = [], [], {}
        for index in range(len(shares.layout)):
            tensors = shares.part(rank, index, owned=False).tensors
            locals_ = [self._shelves.local(tensor.name) for tensor in tensors]
            self.held.append(Shelf(locals_))
            held = shares.held(rank, index)
            self._owned.append(shares.owned(rank, index).inside(held))

    def lay_out(self, layout: Layout) -> None:
        """Nothing: `share` has said it."""

    def read(self, fragment: int, out: F32) -> None:
        self._shelves.require_same_training()
        for own, at in self._owned[fragment].stretches(0, len(out)):
            self.held[fragment].read(at.start, out[own])

    def write(self, fragment: int, values: F32) -> None:
        self._shelves.reshard()
        for own, at in self._owned[fragment].stretches(0, len(values)):
            self.held[fragment].write(at.start, values[own])
        self._swap(fragment, values)

    def read_held(self, fragment: int) -> F32:
        """Return a copy of everything that is here."""
        shelf = self.held[fragment]
        values = np.empty(shelf.elements, np.float32)
        shelf.read(0, values)
        return values

    def write_held(self, fragment: int, values: F32) -> None:
        """Put back what `read_held` has returned."""
        self._shelves.reshard()
        self.held[fragment].write(0, values)

    def _swap(self, fragment: int, values: F32) -> None:
        """Give and get what several ranks hold, a chunk of each at a time."""
        if fragment not in self._routes:
            self._routes[fragment] = self._find_routes(fragment)
        gives, gets = self._routes[fragment]
        for number in count():
            outgoing = [
                (rank, _picked(values, own, number))
                for rank, own in gives
                if number * CHUNK < own.elements
            ]
            incoming = [
                (rank, at, np.empty(_size(at, number), np.float32))
                for rank, at in gets
                if number * CHUNK < at.elements
            ]
            if not (outgoing or incoming):
                return
            self._line.swap(outgoing, [(rank, new) for rank, _, new in incoming])
            for _, at, new in incoming:
                self._put(fragment, at, number, new)

    def _put(self, fragment: int, at: Ranges, number: int, new: F32) -> None:
        first = number * CHUNK
        for own, here in at.stretches(first, first + len(new)):
            part = new[own.start - first : own.stop - first]
            self.held[fragment].write(here.start, part)

    def _find_routes(self, fragment: int) -> tuple[list[Route], list[Route]]:
        shares, me = self._shares, self._line.rank
        assert shares is not None
        owned, held = shares.owned(me, fragment), shares.held(me, fragment)
        others = self._line.others
        gives = [(to, shares.shared(me, to, fragment).inside(owned)) for to in others]
        gets = [(by, shares.shared(by, me, fragment).inside(held)) for by in others]
        return gives, gets


def _size(ranges: Ranges, number: int) -> int:
    return min(CHUNK, ranges.elements - number * CHUNK)


def _picked(values: F32, ranges: Ranges, number: int) -> F32:
    """Return a chunk of some of a vector's elements, in memory of its own."""
    first, size = number * CHUNK, _size(ranges, number)
    picked = np.empty(size, np.float32)
    for own, at in ranges.stretches(first, first + size):
        picked[own.start - first : own.stop - first] = values[at]
    return picked


U8 = NDArray[np.uint8]


def with_digests(
    line: Line, table: Table, shelves: Shelves, model: ModelSpec
) -> ModelSpec:
    """Return the model with the digests of all constants, at the leader.

    The other ranks end with what they had: they compare nothing with the run.
    """
    return ModelSpec(
        tuple(
            replace(spec, digest=_digest(line, table, shelves, spec))
            if spec.role == "constant" and not spec.digest
            else spec
            for spec in model.tensors
        )
    )


class RankConstants:
    """The constants of all ranks, at their leader. Implements `Constants`."""

    def __init__(
        self,
        line: Line,
        table: Table,
        shelves: Shelves,
        order: Callable[[Message], None],
    ) -> None:
        self._line, self._table, self._shelves = line, table, shelves
        self._order = order

    def parts(self, constant: TensorSpec, first: int = 0) -> Iterator[Bytes]:
        self._order({"do": "constant", "name": constant.name})
        yield from in_parts(
            gather(self._line, self._table, self._shelves, constant), first
        )


def _digest(line: Line, table: Table, shelves: Shelves, spec: TensorSpec) -> str:
    if line.is_leader:
        return blake3_digest(gather(line, table, shelves, spec)).hex()
    give(line, table, shelves, spec)
    return spec.digest


def give(line: Line, table: Table, shelves: Shelves, spec: TensorSpec) -> None:
    """Give the leader what this rank has of a constant, if that is asked of it."""
    if line.rank in dict(_holders(table, spec)):
        for part in _chunked(_mine(shelves, spec)):
            line.put(LEADER, part.copy())


def _mine(shelves: Shelves, spec: TensorSpec) -> U8:
    return np.frombuffer(raw_bytes(shelves.local(spec.name)), np.uint8)


def gather(line: Line, table: Table, shelves: Shelves, spec: TensorSpec) -> U8:
    """Return all bytes of a constant, while the other ranks give theirs."""
    holders = dict(_holders(table, spec))
    if list(holders) == [line.rank]:
        return _mine(shelves, spec)
    elements = math.prod(spec.shape)
    width = _width(spec.dtype)
    whole = np.empty((elements, width), np.uint8)
    for rank, ranges in holders.items():
        if rank == line.rank:
            values = _mine(shelves, spec)
        else:
            values = np.empty(ranges.elements * width, np.uint8)
            for part in _chunked(values):
                line.get(rank, part)
        whole[ranges.cut(0, elements).positions] = values.reshape(-1, width)
    return whole.reshape(-1)


def _holders(table: Table, spec: TensorSpec) -> Iterator[tuple[int, Ranges]]:
    """Yield one rank for each box of a tensor, with the elements that it has."""
    boxes = set()
    for rank, holdings in enumerate(table):
        for each in holdings:
            if each.spec.name != spec.name or each.is_copy or each.box in boxes:
                continue
            boxes.add(each.box)
            if 0 not in each.size:
                yield rank, Ranges.of([box_runs(spec.shape, *each.box)])


def _chunked(values: U8) -> Iterator[U8]:
    step = 4 * CHUNK
    for first in range(0, len(values), step):
        yield values[first : first + step]


def _width(dtype: str) -> int:
    """Return the bytes of an element, whose dtype torch spells like this."""
    return torch.empty(0, dtype=vars(torch)[dtype]).element_size()
