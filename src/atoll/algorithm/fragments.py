"""Which tensors synchronise together.

A *block* is one numbered member of a container, found from names: in
`encoder.layers.3.mlp.weight` the outermost number that has a name after it and at least
one sibling makes block 3 of `encoder.layers`. Several containers (encoder and decoder,
the stages of a convolutional net) all count, in model order. Tensors in no block
(embeddings, final norm, head) is the *rest*.

A tensor is never cut. An embedding larger than all blocks together stays whole: with
`rest = "balanced"` it goes to the smallest fragment, which is then larger than the
others. `imbalance` says by how much; `rest = "own"` or fewer fragments are the cures.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from atoll.errors import UsageError

Shape = tuple[int, ...]
Named = tuple[str, Shape]
Partition = tuple[tuple[str, ...], ...]
"""The names of each fragment, in model order within it."""

Block = tuple[str, str]
"""A container's name and the number of one member, as it is spelt."""


def split(
    tensors: Sequence[Named],
    *,
    num_fragments: int,
    order: str = "strided",
    rest: str = "balanced",
) -> Partition:
    """Return the names of each fragment; every name exactly once, no fragment empty.

    Args:
        tensors: names and shapes in model order, a tied parameter once.
        order: "strided" gives block i to fragment i mod P, "sequential" to fragment
            i * P // blocks; "by_size" ignores blocks and cuts the list of tensors into
            P stretches whose largest is as small as can be.
        rest: "balanced" gives every tensor outside the blocks, largest first, to the
            fragment that is smallest then; "own" makes them fragment 0 and shares the
            blocks among the others.

    Raises:
        UsageError: the model cannot be split so; the message names a possible split.

    >>> names = ["embed", "h.0.w", "h.1.w", "h.2.w", "h.3.w", "norm"]
    >>> shapes = [(8,), (4,), (4,), (4,), (4,), (1,)]
    >>> split(list(zip(names, shapes)), num_fragments=2)
    (('embed', 'h.0.w', 'h.2.w'), ('h.1.w', 'h.3.w', 'norm'))
    """
    _require_known(order, rest)
    _require_names(tensors, num_fragments)
    if num_fragments == 1 and rest == "balanced":
        return (tuple(name for name, _ in tensors),)
    if order == "by_size":
        parts = _by_size(tensors, num_fragments, rest)
    elif rest == "own":
        parts = _own_rest(tensors, num_fragments, order)
    else:
        parts = _balanced_rest(tensors, num_fragments, order)
    _require_elements(tensors, parts)
    return parts


def imbalance(tensors: Sequence[Named], partition: Partition) -> float:
    """Return the largest fragment's size over the mean size; 1.0 is perfect.

    Large when one tensor, such as an embedding, outweighs the blocks: the peak of
    traffic is then that of this tensor.

    >>> imbalance([("embed", (6,)), ("h.0.w", (1,)), ("h.1.w", (1,))],
    ...           (("embed", "h.0.w"), ("h.1.w",)))
    1.75
    """
    sizes = _sizes(tensors, partition)
    return max(sizes) * len(sizes) / sum(sizes) if sum(sizes) else 1.0


def blocks(names: Sequence[str]) -> dict[str, int]:
    """Return the number of the block of each name that lies in one.

    Blocks are numbered from 0: containers in model order, members by their number.
    """
    siblings: dict[str, set[str]] = {}
    for name in names:
        for container, member in _numbered(name):
            siblings.setdefault(container, set()).add(member)
    home: dict[str, Block] = {}
    for name in names:
        shared = (block for block in _numbered(name) if len(siblings[block[0]]) > 1)
        if outermost := next(shared, None):
            home[name] = outermost
    rank = {container: number for number, container in enumerate(siblings)}
    ordered = sorted(set(home.values()), key=lambda b: (rank[b[0]], int(b[1]), b[1]))
    numbers = {block: number for number, block in enumerate(ordered)}
    return {name: numbers[block] for name, block in home.items()}


def _numbered(name: str) -> Iterator[Block]:
    """Yield container and number of every numbered level but the last, from outside."""
    levels = name.split(".")
    for depth, level in enumerate(levels[:-1]):
        if level.isascii() and level.isdecimal():
            yield ".".join(levels[:depth]), level


def _balanced_rest(tensors: Sequence[Named], count: int, order: str) -> Partition:
    home = _home_of_blocks(tensors, count, order)
    sizes = [0] * count
    for name, shape in tensors:
        if name in home:
            sizes[home[name]] += math.prod(shape)
    outside = [(name, math.prod(shape)) for name, shape in tensors if name not in home]
    for name, size in sorted(outside, key=lambda item: -item[1]):
        smallest = sizes.index(min(sizes))
        home[name] = smallest
        sizes[smallest] += size
    return _gather(tensors, home, count)


def _own_rest(tensors: Sequence[Named], count: int, order: str) -> Partition:
    if count < 2:
        raise UsageError(
            f'rest = "own" with num_fragments={count} leaves no fragment for the '
            'blocks. Choose num_fragments=2 or more, or rest = "balanced".'
        )
    inner = _home_of_blocks(tensors, count - 1, order)
    if len(inner) == len(tensors):
        raise UsageError(
            'rest = "own" would make fragment 0 empty: all '
            f'{len(tensors)} tensors lie in blocks. Choose rest = "balanced".'
        )
    home = {name: inner[name] + 1 if name in inner else 0 for name, _ in tensors}
    return _gather(tensors, home, count)


def _home_of_blocks(tensors: Sequence[Named], count: int, order: str) -> dict[str, int]:
    """Return the fragment, of `count`, of each name that lies in a block."""
    numbers = blocks([name for name, _ in tensors])
    num_blocks = len(set(numbers.values()))
    if count > num_blocks:
        raise UsageError(
            f"{count} fragments of blocks need as many blocks, and the names show "
            f"{num_blocks}. "
            + (f"Ask for at most {num_blocks}, or s" if num_blocks else "S")
            + "et "
            'fragment_order = "by_size", which needs no blocks.'
        )
    if order == "strided":
        return {name: number % count for name, number in numbers.items()}
    return {name: number * count // num_blocks for name, number in numbers.items()}


def _by_size(tensors: Sequence[Named], count: int, rest: str) -> Partition:
    if rest == "own":
        raise UsageError(
            'rest = "own" has no meaning with fragment_order = "by_size", which looks '
            'for no blocks. Choose rest = "balanced".'
        )
    sizes = [math.prod(shape) for _, shape in tensors]
    solid = [index for index, size in enumerate(sizes) if size]
    if count > len(solid):
        raise UsageError(
            f"num_fragments={count} exceeds the {len(solid)} tensors that have "
            "elements, and a tensor is never cut. "
            f"Choose num_fragments={max(1, len(solid))}."
        )
    cuts = [solid[cut] for cut in even_cuts([sizes[index] for index in solid], count)]
    home = {name: bisect_right(cuts, index) for index, (name, _) in enumerate(tensors)}
    return _gather(tensors, home, count)


def _gather(tensors: Sequence[Named], home: dict[str, int], count: int) -> Partition:
    return tuple(
        tuple(name for name, _ in tensors if home[name] == fragment)
        for fragment in range(count)
    )


def _sizes(tensors: Sequence[Named], partition: Partition) -> list[int]:
    size_of = {name: math.prod(shape) for name, shape in tensors}
    return [sum(size_of[name] for name in names) for names in partition]


def _require_known(order: str, rest: str) -> None:
    for key, value, choices in (
        ("fragment_order", order, ("strided", "sequential", "by_size")),
        ("rest", rest, ("balanced", "own")),
    ):
        if value not in choices:
            raise UsageError(f"{key} = {value!r} must be one of {', '.join(choices)}.")


def _require_names(tensors: Sequence[Named], count: int) -> None:
    names = [name for name, _ in tensors]
    if not names:
        raise UsageError(
            "There is nothing to synchronise: the model has no tensor that is trained."
        )
    if repeated := sorted(name for name, times in Counter(names).items() if times > 1):
        raise UsageError(
            f"The name {repeated[0]!r} is given {names.count(repeated[0])} times. "
            "Give each tensor once, a tied one under its first name."
        )
    if count < 1:
        raise UsageError(f"num_fragments={count} must be at least 1.")


def _require_elements(tensors: Sequence[Named], partition: Partition) -> None:
    for fragment, size in enumerate(_sizes(tensors, partition)):
        if not size:
            raise UsageError(
                f"Fragment {fragment} would have no elements. "
                'Choose fewer fragments, or fragment_order = "by_size".'
            )


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
