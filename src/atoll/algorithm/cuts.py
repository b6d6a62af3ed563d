"""Cutting a list of sizes into consecutive stretches of near-equal sums."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise


def even_cuts(sizes: Sequence[int], count: int) -> list[int]:
    """Return where each stretch but the first begins; the largest is least.

    Sizes are positive and no fewer than `count`. Among the cuts that reach that least
    size, each stretch is as near as possible to the mean of the remaining sizes.

    >>> even_cuts([1, 1, 1, 5, 1, 1], 3)  # 3, 5, 2
    [3, 4]
    """
    ends = [0, *accumulate(sizes)]
    limit = _least_limit(ends, count)
    needed = _needed(ends, limit)
    cuts: list[int] = []
    start = 0
    for remaining_cuts in range(count - 1, 0, -1):
        possible = [
            cut
            for cut in range(start + 1, len(sizes) - remaining_cuts + 1)
            if ends[cut] - ends[start] <= limit and needed[cut] <= remaining_cuts
        ]
        goal = ends[-1] - ends[start]
        start = min(
            possible,
            key=lambda cut: abs(
                (ends[cut] - ends[start]) * (remaining_cuts + 1) - goal
            ),
        )
        cuts.append(start)
    return cuts


def _least_limit(ends: Sequence[int], count: int) -> int:
    """Return the least size that the largest of `count` stretches can have."""
    low = max(after - before for before, after in pairwise(ends))
    high = ends[-1]
    while low < high:
        middle = (low + high) // 2
        if _needed(ends, middle)[0] <= count:
            high = middle
        else:
            low = middle + 1
    return low


def _needed(ends: Sequence[int], limit: int) -> list[int]:
    """Return, for each start, the fewest stretches within `limit` to the end."""
    needed = [0] * len(ends)
    for start in range(len(ends) - 2, -1, -1):
        furthest = bisect_right(ends, ends[start] + limit) - 1
        needed[start] = needed[furthest] + 1
    return needed
