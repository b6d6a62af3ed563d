"""Values of four kinds are summed in one order, and rounded once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.algorithm.merge import mean
from atoll.errors import UsageError
from atoll.exchange.all_reduce.frames import BLOCK_BYTES, Sections

Bytes = NDArray[np.uint8]


def as_bytes(values: object, kind: str) -> Bytes:
    return np.array(values, kind).view(np.uint8)


def one(kind: str, number: int) -> Sections:
    return Sections({kind: number})


@given(st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_the_mean_of_fp32_is_that_of_a_round(num_ranks: int, seed: int) -> None:
    """The same tree, the same division: what the merge of updates gives."""
    rng = np.random.default_rng(seed)
    values = [rng.standard_normal(33).astype(np.float32) for _ in range(num_ranks)]
    sections = one("float32", 33)
    bodies = [each.view(np.uint8) for each in values]
    found = sections.reduced(bodies, first=0, divisor=num_ranks)
    assert found.tobytes() == mean(values).tobytes()


def test_fp64_keeps_its_precision() -> None:
    """1 and 2**-50 differ by more digits than fp32 has."""
    bodies = [as_bytes([1.0], "<f8"), as_bytes([2.0**-50], "<f8")]
    found = one("float64", 1).reduced(bodies, first=0, divisor=None)
    assert found.view("<f8").tolist() == [1.0 + 2.0**-50]


def test_fp16_is_summed_wider_than_it_is() -> None:
    """Twice 60000 has no fp16, but their mean has."""
    bodies = [as_bytes([60000.0, 1.0], "<f2")] * 2
    found = one("float16", 2).reduced(bodies, first=0, divisor=2)
    assert found.view("<f2").tolist() == [60000.0, 1.0]


@pytest.mark.parametrize(
    ("bits", "said"),
    [
        # 1 + 2**-7 is the next bfloat16 after 1. Halfway goes to the even one, 1 ...
        ([0x3F80, 0x3F81], 0x3F80),
        # ... and halfway between 1 + 2**-7 and 1 + 2**-6 to the latter.
        ([0x3F81, 0x3F82], 0x3F82),
        ([0x7F80, 0x3F80], 0x7F80),  # an infinity stays one
        ([0x7F80, 0xFF80], 0x7FC0),  # infinity minus infinity is the quiet NaN
        ([0xFFFF, 0x3F80], 0x7FC0),  # any NaN becomes that one
    ],
)
def test_bfloat16_is_rounded_once_to_nearest_even(bits: list[int], said: int) -> None:
    """The mean of two in fp32 is exact; then it is rounded."""
    bodies = [as_bytes([each], "<u2") for each in bits]
    found = one("bfloat16", 1).reduced(bodies, first=0, divisor=2)
    assert found[:2].view("<u2").tolist() == [said]


def test_kinds_lie_widest_first_and_any_range_can_be_reduced() -> None:
    """A part of the body gives that part of what is reduced."""
    counts = {"float16": 3, "float64": 5, "float32": 7, "bfloat16": 1}
    sections = Sections(counts)
    # 40 bytes, 28, 2 and 6: 76, which are whole words.
    assert [(k, s.start, s.stop) for k, s in sections.within(0, 76)] == [
        ("float64", 0, 40),
        ("float32", 40, 68),
        ("bfloat16", 68, 70),
        ("float16", 70, 76),
    ]
    rng = np.random.default_rng(0)
    bodies = [
        np.concatenate(
            [
                rng.standard_normal(5).astype("<f8").view(np.uint8),
                rng.standard_normal(7).astype("<f4").view(np.uint8),
                as_bytes([0x3F80], "<u2"),
                rng.standard_normal(3).astype("<f2").view(np.uint8),
            ]
        )
        for _ in range(4)
    ]
    whole = sections.reduced(bodies, first=0, divisor=4)
    for first, last in ((0, 8), (8, 48), (40, 76), (68, 72)):
        parts = [body[first:last] for body in bodies]
        found = sections.reduced(parts, first=first, divisor=4)
        assert found.tobytes() == whole[first:last].tobytes()


def test_blocks_do_not_show() -> None:
    """Values beyond one block are summed as those in it."""
    number = BLOCK_BYTES // 4 + 5
    bodies = [np.full(number, each, "<f4").view(np.uint8) for each in (1.0, 2.0)]
    found = one("float32", number).reduced(bodies, first=0, divisor=None)
    assert set(found.view("<f4").tolist()) == {3.0}


def test_what_overflows_is_infinite_without_a_warning() -> None:
    """As it would be on one machine."""
    bodies = [as_bytes([3e38], "<f4")] * 2
    found = one("float32", 1).reduced(bodies, first=0, divisor=None)
    assert math.isinf(found.view("<f4")[0])


@pytest.mark.parametrize("number", [0, 2**31])
def test_nothing_and_too_much_are_refused(number: int) -> None:
    """One object of the store has to hold it."""
    with pytest.raises(UsageError, match=r"cannot be reduced in one call"):
        one("float32", number)
