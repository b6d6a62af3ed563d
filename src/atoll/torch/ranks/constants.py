"""Constants that lie on several ranks: one of them at a time, at the leader.

A frozen base under FSDP2 is compared with the run's, as a whole one is, and brought to
a run that it founds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.exchange.constants import in_parts
from atoll.protocol import ModelSpec, TensorSpec
from atoll.torch.model import raw_bytes
from atoll.torch.ranks.holdings import Shelves
from atoll.torch.ranks.line import LEADER, Line, Message
from atoll.torch.ranks.shares import Table
from atoll.torch.ranks.view import CHUNK
from atoll.weights.ranges import Ranges, box_runs
from atoll.wire import blake3_digest
from atoll.wire.digests import Bytes

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
        whole[ranges.cut(0, elements).at] = values.reshape(-1, width)
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
