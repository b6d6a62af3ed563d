"""The run's order of rows: a permutation that is computed, and never stored.

Turn q of a dataset of L rows belongs to pass e = q // L. Its row is q % L as the data
lie, or the value there of a permutation of the pass: a Feistel network of four rounds
over 2k bits, walked until it is below L. All arithmetic is modulo 2**64:

    k        = max(1, ceil(bits(L - 1) / 2))
    key(r)   = mix(mix(seed + G) + (4 e + r + 1) G)             r = 0, 1, 2, 3
    i        = q mod L
    repeat     left, right = i >> k, i mod 2^k
               for r in 0..3: left, right = right,
                   left xor (mix(key(r) + right * G) >> (64 - k))
               i = left << k | right
    until i < L

with G = 0x9E3779B97F4A7C15 and the output function `mix` of SplitMix64, as in the wire
format. The walk ends because the network permutes its 2k bits, which are at most 4 L
values: it takes fewer than 4 steps on average.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.data.spans import MAX_TURN

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NUM_ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class RunOrder:
    """The order in which a run takes the rows of its dataset."""

    rows: int
    """Rows of the dataset."""

    seed: int = 0
    is_shuffled: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MAX_TURN:
            raise ValueError(f"A dataset of {self.rows} rows has no order.")

    def rows_of(self, spans: Iterable[tuple[int, int]]) -> I64:
        """Return the row numbers of intervals of turns, in the order of the turns."""
        turns = [np.arange(first, last, dtype=np.int64) for first, last in spans]
        if not turns:
            return np.empty(0, np.int64)
        return self.rows_at(np.concatenate(turns))

    def rows_at(self, turns: I64) -> I64:
        """Return the row numbers of turns, which may be of several passes."""
        passes, indices = np.divmod(turns, self.rows)
        if not self.is_shuffled:
            return indices
        rows = np.empty_like(indices)
        for number in np.unique(passes):
            is_here = passes == number
            rows[is_here] = self._permuted(indices[is_here], int(number))
        return rows

    def _permuted(self, indices: I64, number: int) -> I64:
        keys = [_key(self.seed, number, round) for round in range(_NUM_ROUNDS)]
        half_bits = max(1, ((self.rows - 1).bit_length() + 1) // 2)
        values = indices.astype(np.uint64)
        outside = np.arange(len(values))
        while len(outside):
            values[outside] = _network(values[outside], keys, half_bits)
            outside = outside[values[outside] >= np.uint64(self.rows)]
        return values.astype(np.int64)


def _network(values: U64, keys: list[int], half_bits: int) -> U64:
    """Return the values after the Feistel network, a permutation of 2k bits."""
    shift, top_bits = np.uint64(half_bits), np.uint64(64 - half_bits)
    left, right = values >> shift, values & np.uint64(2**half_bits - 1)
    for key in keys:
        mixed = _mix_all(np.uint64(key) + right * np.uint64(_GOLDEN))
        left, right = right, left ^ (mixed >> top_bits)
    return left << shift | right


def _key(seed: int, number: int, round: int) -> int:
    base = _mix((seed + _GOLDEN) & _MASK)
    return _mix((base + (4 * number + round + 1) * _GOLDEN) & _MASK)


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * _MIX_1 & _MASK
    value = (value ^ (value >> 27)) * _MIX_2 & _MASK
    return value ^ (value >> 31)


def _mix_all(values: U64) -> U64:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))
