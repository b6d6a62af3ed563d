"""A part of a fragment: what it has, and where."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from atoll.weights.ranges import Ranges, box_runs


def mask(ranges: Ranges, elements: int) -> np.ndarray:
    has = np.zeros(elements, bool)
    for start, stop in zip(ranges.starts, ranges.stops, strict=True):
        assert not has[start:stop].any()
        has[start:stop] = True
    return has


def some(seed: int, elements: int = 60) -> Ranges:
    has = np.random.default_rng(seed).random(elements) < 0.5
    places = np.flatnonzero(has)
    return Ranges.of([(places, places + 1)])


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (3, 4, 2)])
def test_a_box_has_the_elements_that_numpy_says(shape: tuple[int, ...]) -> None:
    """The stretches of every box of a tensor are the elements of that slice of it."""
    whole = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    axes = [
        [(a, b) for a in range(n + 1) for b in range(n + 1 - a)] for n in whole.shape
    ]
    for box in itertools.product(*axes):
        start, size = [a for a, _ in box], [b for _, b in box]
        here = whole[tuple(slice(a, a + b) for a, b in box)].reshape(-1)
        ranges = Ranges.of([box_runs(shape, start, size, first=11)])
        assert np.flatnonzero(mask(ranges, 11 + whole.size)).tolist() == [
            11 + place for place in here
        ]


@pytest.mark.parametrize("seed", range(4))
def test_a_cut_says_where_the_elements_are_on_both_sides(seed: int) -> None:
    """A cut's places are the part's elements there, in the order it keeps them."""
    ranges = some(seed)
    kept = np.flatnonzero(mask(ranges, 60))
    for first, last in itertools.combinations(range(61), 2):
        cut = ranges.cut(first, last)
        assert (
            kept[cut.compact].tolist() == np.arange(first, last)[cut.positions].tolist()
        )
        assert cut.size == len(kept[cut.compact])


@pytest.mark.parametrize("seed", range(4))
def test_a_part_of_a_part_is_found_in_its_vector(seed: int) -> None:
    """`within` keeps what is between, and `inside` says where the holder keeps it."""
    ranges = some(seed)
    kept = np.flatnonzero(mask(ranges, 60))
    less = ranges.within(13, 41)
    assert kept[(kept >= 13) & (kept < 41)].tolist() == (
        np.flatnonzero(mask(less, 60)).tolist()
    )
    places = np.flatnonzero(mask(less.inside(ranges), len(kept)))
    assert kept[places].tolist() == np.flatnonzero(mask(less, 60)).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_stretches_go_over_every_element_once(seed: int) -> None:
    """Stretches from one element's number to another's name all of them in order."""
    ranges = some(seed)
    kept = np.flatnonzero(mask(ranges, 60))
    for first, last in itertools.combinations(range(len(kept) + 1), 2):
        found = list(ranges.stretches(first, last))
        assert [n for own, _ in found for n in range(own.start, own.stop)] == list(
            range(first, last)
        )
        places = [n for _, at in found for n in range(at.start, at.stop)]
        assert places == kept[first:last].tolist()
