"""Digests of constants that lie on several ranks: one of them at a time, at the leader.

A frozen base under FSDP2 is compared with the run's, as a whole one is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.protocol import ModelSpec, TensorSpec
from atoll.torch.model import raw_bytes
from atoll.torch.ranks.holdings import Shelves
from atoll.torch.ranks.line import LEADER, Line
from atoll.torch.ranks.shares import Table
from atoll.torch.ranks.view import CHUNK
from atoll.weights.ranges import Ranges, box_runs
from atoll.wire import blake3_digest

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


def _digest(line: Line, table: Table, shelves: Shelves, spec: TensorSpec) -> str:
    holders = dict(_holders(table, spec))
    mine: U8 = np.empty(0, np.uint8)
    if line.rank in holders:
        mine = np.frombuffer(raw_bytes(shelves.local(spec.name)), np.uint8)
    if not line.is_leader:
        if line.rank in holders:
            for part in _chunked(mine):
                line.put(LEADER, part.copy())
        return spec.digest
    return blake3_digest(_gathered(line, holders, mine, spec)).hex()


def _gathered(line: Line, holders: dict[int, Ranges], mine: U8, spec: TensorSpec) -> U8:
    """Return all bytes of a constant."""
    elements = math.prod(spec.shape)
    width = _width(spec.dtype)
    whole = np.empty((elements, width), np.uint8)
    for rank, ranges in holders.items():
        values = mine
        if rank != line.rank:
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
