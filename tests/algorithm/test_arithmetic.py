"""The rules that make bits equal."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.algorithm.arithmetic import TINY, divide, flush, fp32, power


def bits(x: float) -> int:
    """Return the bits of an fp32 number."""
    return int(np.float32(x).view(np.uint32))


@pytest.mark.parametrize(
    "small", [0.0, -0.0, 1e-45, -1e-45, 2.0**-126, -(2.0**-127), TINY * (1 - 2.0**-24)]
)
def test_below_tiny_is_positive_zero(small: float) -> None:
    """Signed zeros, subnormal numbers and all below 2**-100 become +0.0."""
    assert bits(flush(np.array([small], np.float32))[0]) == 0


@pytest.mark.parametrize("kept", [TINY, -TINY, 1.5, -3e38, math.inf, -math.inf])
def test_the_rest_is_untouched(kept: float) -> None:
    """From 2**-100 on, infinities included, no bit changes."""
    assert bits(flush(np.array([kept], np.float32))[0]) == bits(kept)


def test_nan_stays_nan() -> None:
    """A poisoned value is not laundered into a zero."""
    assert math.isnan(flush(np.array([math.nan], np.float32))[0])


def test_flushed_stays_fp32() -> None:
    """Masks and Python scalars do not widen the result."""
    assert flush(np.ones(2, np.float32)).dtype == np.float32
    assert divide(np.ones(2, np.float32), 3.0).dtype == np.float32


@given(st.floats(2.0**-60, 2.0**60, width=32), st.floats(2.0**-30, 2.0**30, width=32))
def test_division_is_rounded_once(value: float, by: float) -> None:
    """A quotient is the fp32 number nearest to the rational one."""
    got = divide(np.array([value], np.float32), by).item()

    # One fp64 division then one rounding is innocuous for fp32: 53 >= 2 * 24 + 2.
    assert got == fp32(value / by)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_fp32_leaves_fp32_numbers_alone(value: float) -> None:
    """Rounding to fp32 twice is rounding once."""
    assert bits(fp32(value)) == bits(value)


def test_fp32_rounds_to_nearest_even() -> None:
    """Halfway between two fp32 numbers the even one is taken."""
    # Neighbours of 1 are 2**-23 apart above it.
    assert fp32(1 + 2.0**-24) == 1.0
    assert fp32(1 + 3 * 2.0**-24) == 1 + 2.0**-22


@given(st.integers(0, 2**53), st.integers(0, 12))
def test_power_is_exact_while_fp64_can_hold_it(numerator: int, exponent: int) -> None:
    """Powers that need no rounding are exact."""
    base = (numerator % 16) / 8

    assert Fraction(power(base, exponent)) == Fraction(base) ** exponent


@given(st.floats(0.5, 0.999), st.integers(1, 5000))
def test_power_agrees_with_the_library(base: float, exponent: int) -> None:
    """Squaring stays within two ulps per factor of what the C library says."""
    # A relative error of one ulp doubles with each squaring: exponent ulps in all.
    assert power(base, exponent) == pytest.approx(
        base**exponent, rel=2 * exponent * 2.0**-52, abs=1e-300
    )
