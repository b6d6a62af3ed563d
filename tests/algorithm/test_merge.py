"""Mean, weighted, trimmed and radial merging."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.algorithm.arithmetic import flush, fp32
from atoll.algorithm.merge import mean, norm, radial, shares, trimmed, weighted
from atoll.errors import UsageError
from tests.algorithm.vectors import array, equal

sane = st.floats(-(2.0**60), 2.0**60, width=32)
weights_of_three = st.lists(st.integers(1, 2**64 - 1), min_size=3, max_size=3)


def test_the_mean_is_an_ordered_sum_divided_once() -> None:
    """fp32 sums depend on their order: islands are summed as given."""
    # 1 + 2**-24 is 1 (ties to even), twice; the other way 2**-23 + 1 is kept.
    tiny = 2.0**-24
    assert mean([array(1), array(tiny), array(tiny), array(0)]).item() == 0.25
    assert mean([array(tiny), array(tiny), array(1), array(0)]).item() > 0.25


def test_one_value_is_its_own_mean() -> None:
    """The mean of one update is that update, whatever its weight."""
    value = array(1 / 3, -5e30)

    assert equal(mean([value]), value)
    assert equal(weighted([value], [7]), value)
    assert equal(trimmed([value]), value)
    assert equal(radial([value], [7]), value)


def test_decoded_values_are_flushed_first() -> None:
    """What lies below 2**-100 cannot add up to something."""
    values = [array(2.0**-101)] * 8

    assert equal(mean(values), array(0))
    assert equal(weighted(values, list(range(1, 9))), array(0))
    assert equal(trimmed(values), array(0))
    assert equal(radial(values, [1] * 8), array(0))


@pytest.mark.parametrize("num_islands", [1, 2, 4, 8, 16])
def test_the_mean_of_equal_values_is_the_value(num_islands: int) -> None:
    """A power of two of islands with one value agree on it, to the bit."""
    # The tree is complete, so every partial sum is x times a power of two: exact.
    # Powers of two change nothing, so the mantissas of one binade are all the cases.
    mantissas = np.arange(2**23, dtype=np.uint32)
    for some in np.array_split(mantissas | np.uint32(0x3F800000), 8):
        value = some.view(np.float32)
        assert equal(mean([value] * num_islands), value)


@given(sane, st.integers(1, 40))
def test_any_number_of_equal_values_agree_to_ulps(x: float, num_islands: int) -> None:
    """For other numbers of islands the mean is within N half-ulps of the value."""
    # Each of N - 1 sums and one division errs by at most half an ulp: 2**-24 of it.
    value = flush(array(x))
    got = mean([value] * num_islands).item()

    assert abs(got - value.item()) <= num_islands * 2.0**-24 * abs(value.item()) * 1.01


@given(st.lists(sane, min_size=1, max_size=9), st.integers(1, 2**64 - 1))
def test_equal_weights_give_the_mean(xs: list[float], weight: int) -> None:
    """Weighted with equal weights is the mean, to the bit."""
    values = [array(x) for x in xs]

    assert equal(weighted(values, [weight] * len(xs)), mean(values))


def test_unequal_weights_by_hand() -> None:
    """Weights 1 and 3 on 8 and 16 give 14."""
    # 0.25 * 8 + 0.75 * 16
    assert weighted([array(8), array(16)], [1, 3]).item() == 14.0


@given(st.lists(st.integers(1, 2**64 - 1), min_size=1, max_size=50))
def test_shares_sum_to_one(weights: list[int]) -> None:
    """Each share is the fp32 number nearest to its part, so together they are whole."""
    parts = shares(weights)

    for part, weight in zip(parts, weights, strict=True):
        assert part == fp32(float(Fraction(weight, sum(weights))))
    assert math.fsum(parts) == pytest.approx(1.0, abs=len(weights) * 2.0**-25)


@pytest.mark.parametrize("wrong", [[], [0], [1, -1], [2**64]])
def test_impossible_weights_are_errors(wrong: list[int]) -> None:
    """Weights are positive 64-bit integers."""
    with pytest.raises(UsageError, match="must be one or more integers from 1"):
        shares(wrong)


@given(
    st.dictionaries(
        st.text(min_size=1), st.tuples(sane, st.integers(1, 9)), min_size=1, max_size=6
    ),
    st.data(),
)
def test_arrival_order_does_not_matter(
    updates: dict[str, tuple[float, int]], data: st.DataObject
) -> None:
    """Merged in the byte order of names, updates may arrive in any order."""

    def merge_all(arrived: Sequence[str]) -> list[bytes]:
        names = sorted(arrived, key=str.encode)
        values = [array(updates[name][0], 1.0) for name in names]
        weights = [updates[name][1] for name in names]
        merged = [
            mean(values),
            weighted(values, weights),
            trimmed(values),
            radial(values, weights),
        ]
        return [value.tobytes() for value in merged]

    arrived = data.draw(st.permutations(list(updates)))

    assert merge_all(arrived) == merge_all(list(updates))


@given(st.lists(sane, min_size=3, max_size=13))
def test_trimmed_drops_both_ends_of_each_coordinate(xs: list[float]) -> None:
    """What is kept is summed in ascending order and divided once."""
    dropped = max(1, len(xs) // 4)
    ascending = sorted(flush(array(*xs)).tolist())
    kept = [array(x) for x in ascending[dropped : len(xs) - dropped]]

    assert equal(trimmed([array(x) for x in xs]), mean(kept))


@given(st.lists(sane, min_size=3, max_size=9), st.permutations(range(9)))
def test_trimmed_needs_no_island_order(xs: list[float], order: list[int]) -> None:
    """Sorting coordinates leaves nothing to the order of islands."""
    values = [array(x) for x in xs]
    shuffled = [values[i] for i in order if i < len(xs)]

    assert equal(trimmed(values), trimmed(shuffled))


@pytest.mark.parametrize(("num_islands", "kept"), [(3, 1), (4, 2), (7, 5), (8, 4)])
def test_how_many_are_trimmed(num_islands: int, kept: int) -> None:
    """max(1, N // 4) outliers at either end have no influence."""
    dropped = (num_islands - kept) // 2
    values = [array(9e9)] * dropped + [array(2)] * kept + [array(-9e9)] * dropped

    assert trimmed(values).item() == 2.0


def test_two_islands_are_not_trimmed() -> None:
    """Below three islands trimmed is the mean."""
    assert trimmed([array(1), array(3)]).item() == 2.0


def test_orthogonal_updates_keep_their_length() -> None:
    """Orthogonal updates merged radially keep their length; the mean halves it."""
    # Four vectors of length 6 along four axes: mean length 6, mean direction has length
    # 1/2 along (1, 1, 1, 1)/2. So 6 * (1, 1, 1, 1)/2, while the mean is 6/4 each, or 3.
    values = [array(*row) for row in 6 * np.eye(4)]

    assert radial(values, [1] * 4).tolist() == [3.0] * 4
    assert norm(radial(values, [1] * 4)) == 6.0
    assert norm(mean(values)) == 3.0


@given(st.lists(sane, min_size=6, max_size=6), st.integers(-20, 20), weights_of_three)
def test_scaling_all_inputs_scales_the_radial_merge(
    xs: list[float], exponent: int, weights: list[int]
) -> None:
    """A power of two on all inputs is that power on the output, to the bit."""
    # Lengths scale exactly, unit vectors do not change at all; values are kept clear of
    # the flush so that the same elements survive.
    values = [flush(array(*xs[i : i + 2])) for i in (0, 2, 4)]
    values = [v * (abs(v) > 2.0**-70) + np.float32(0) for v in values]
    scale = np.float32(2.0**exponent)
    one, scaled = radial(values, weights), radial([v * scale for v in values], weights)
    clear = abs(one) > 2.0**-70

    assert equal(scaled[clear], (one * scale)[clear])


def test_weights_pull_the_radial_merge() -> None:
    """Weights enter both the length and the direction."""
    # Lengths 4 and 8 with shares 3/4 and 1/4: 5. Both along +x.
    merged = radial([array(4, 0), array(8, 0)], [3, 1])

    assert merged.tolist() == [5.0, 0.0]


def test_an_island_that_did_not_move_shortens_only() -> None:
    """unit(0) = 0: a zero update has no direction, but its length counts."""
    # Lengths 0 and 10, mean 5, along (0.6, 0.8).
    merged = radial([array(0, 0), array(6, 8)], [1, 1])

    assert merged.tolist() == pytest.approx([3.0, 4.0], rel=1e-6)


def test_cancelling_directions_fall_back_to_the_mean() -> None:
    """Where no direction is left, length along noise would be wrong."""
    opposite = [array(3, 4), array(-6, -8)]
    # Seven directions around a circle cancel but for rounding.
    turns = [2 * math.pi * k / 7 for k in range(7)]
    around = [array(math.cos(turn), math.sin(turn)) for turn in turns]

    assert equal(radial(opposite, [1, 1]), mean(opposite))
    assert norm(mean(around)) > 0
    assert equal(radial(around, [1] * 7), mean(around))


def test_all_zero_stays_zero() -> None:
    """A round in which nobody moved, and a tensor without elements, merge quietly."""
    assert equal(radial([array(0, 0)] * 2, [1, 2]), array(0, 0))
    assert radial([array()] * 2, [1, 2]).shape == (0,)


def test_a_length_beyond_fp32_falls_back_to_the_mean() -> None:
    """Two updates near the largest fp32 number are averaged, not turned into NaN."""
    # Each has length sqrt(2) * 3e38, beyond 3.4e38; half of it is representable.
    values = [array(3e38, 3e38), array(0, 0)]

    assert equal(radial(values, [1, 1]), mean(values))


@given(st.integers(0, 400), st.integers(0, 2**32 - 1))
def test_a_norm_is_summed_in_64_lanes(size: int, seed: int) -> None:
    """Lane j adds elements j, j + 64, ... in order, then lanes are added in order."""
    x = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    lanes = [0.0] * 64
    for i, value in enumerate(x.tolist()):
        lanes[i % 64] += value * value

    assert norm(x) == fp32(math.sqrt(functools.reduce(operator.add, lanes)))


@pytest.mark.parametrize("stride", [1, 64], ids=["across lanes", "within a lane"])
def test_a_norm_is_added_in_order(stride: int) -> None:
    """Squares too small to matter one by one do not gang up before they are added."""
    # 8192**2 + 16777215**2 = 16777217**2, 49 bits, whose ulp in fp64 is 2**-4. Each of
    # 62 squares 2**-6 after it is below half of that. The root, 2**24 + 1, is halfway
    # between fp32 numbers and goes to the even 2**24. Added first, the 62 squares make
    # 0.97 and the root goes to 2**24 + 2.
    x = np.zeros(64 * stride, np.float32)
    x[::stride] = [8192, 16777215, *[0.125] * 62]

    assert norm(x) == 2**24
    assert norm(np.ascontiguousarray(x[::-1])) == 2**24 + 2


def test_a_norm_does_not_depend_on_shape() -> None:
    """A matrix has the norm of its elements in order."""
    x = np.random.default_rng(0).normal(size=(37, 53)).astype(np.float32)

    assert norm(x) == norm(x.reshape(-1))
    assert norm(x) == pytest.approx(float(np.linalg.norm(x.astype(float))))
