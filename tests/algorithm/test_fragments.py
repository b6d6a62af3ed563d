"""Which tensors synchronise together."""

from __future__ import annotations

import math
import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.algorithm.fragments import (
    Named,
    Partition,
    blocks,
    even_cuts,
    imbalance,
    split,
)
from atoll.errors import UsageError


def gpt(layers: int, *, embedding: int = 40) -> list[Named]:
    """Return the tensors of a small transformer, 12 elements per block."""
    tensors: list[Named] = [("wte.weight", (embedding,)), ("wpe.weight", (8,))]
    for i in range(layers):
        tensors += [(f"h.{i}.attn.weight", (2, 4)), (f"h.{i}.mlp.weight", (4,))]
    return [*tensors, ("ln_f.weight", (2,)), ("scale", ())]


def numbers_of(part: tuple[str, ...]) -> list[int]:
    """Return the block numbers in one fragment, once each."""
    return list(
        dict.fromkeys(int(name.split(".")[1]) for name in part if name[:2] == "h.")
    )


def sizes_of(tensors: list[Named], partition: Partition) -> list[int]:
    """Return the elements of each fragment."""
    size = {name: math.prod(shape) for name, shape in tensors}
    return [sum(size[name] for name in part) for part in partition]


def test_strided_deals_blocks_round() -> None:
    """Block i goes to fragment i mod P."""
    parts = split(gpt(5), num_fragments=2, order="strided")

    assert [numbers_of(part) for part in parts] == [[0, 2, 4], [1, 3]]


def test_sequential_keeps_neighbours_together() -> None:
    """Block i of B goes to fragment i * P // B."""
    # 5 blocks, 2 fragments: 0, 2, 4, 6, 8 over 5.
    parts = split(gpt(5), num_fragments=2, order="sequential")

    assert [numbers_of(part) for part in parts] == [[0, 1, 2], [3, 4]]


def test_balanced_rest_fills_the_smallest_fragment() -> None:
    """Tensors outside the blocks go, largest first, where least is."""
    # 5 blocks of 12 strided over 2: 36 and 24. wte 40 -> fragment 1 (64), wpe 8 -> 0
    # (44), ln_f 2 -> 0 (46), scale 1 -> 0 (47).
    tensors = gpt(5)
    parts = split(tensors, num_fragments=2)

    assert sizes_of(tensors, parts) == [47, 64]
    assert "wte.weight" in parts[1]
    assert parts[0][0] == "wpe.weight"


def test_equal_fragments_are_filled_from_the_first() -> None:
    """A tie goes to the lowest fragment, and equal tensors go in model order."""
    tensors: list[Named] = [("b", (3,)), ("a", (3,)), ("h.0.w", (1,)), ("h.1.w", (1,))]

    assert split(tensors, num_fragments=2) == (("b", "h.0.w"), ("a", "h.1.w"))


def test_own_rest_is_fragment_zero() -> None:
    """With rest = "own", fragment 0 holds no block and the others nothing else."""
    parts = split(gpt(4), num_fragments=3, rest="own")

    assert parts[0] == ("wte.weight", "wpe.weight", "ln_f.weight", "scale")
    assert [numbers_of(part) for part in parts[1:]] == [[0, 2], [1, 3]]


def test_an_embedding_larger_than_all_blocks_stays_whole() -> None:
    """It goes to the smallest fragment, and the imbalance says what that costs."""
    # Blocks of 12; wte 1000 -> 0, wpe 8 -> 1, ln_f 2 -> 2, scale 1 -> 3. 1059 in all.
    tensors = gpt(4, embedding=1000)
    parts = split(tensors, num_fragments=4)

    assert sizes_of(tensors, parts) == [1012, 20, 14, 13]
    assert imbalance(tensors, parts) == 1012 * 4 / 1059


def test_two_stacks_are_both_blocks() -> None:
    """Encoder and decoder layers are dealt one after the other, in model order."""
    names = [
        f"{side}.layers.{i}.w" for side in ("encoder", "decoder") for i in range(3)
    ]

    assert list(blocks(names).values()) == [0, 1, 2, 3, 4, 5]
    assert split([(n, (1,)) for n in names], num_fragments=2, order="sequential") == (
        tuple(names[:3]),
        tuple(names[3:]),
    )


def test_stages_of_a_convolutional_net_are_blocks() -> None:
    """`layer1.0.` and `layer2.0.` are members; the number in `layer1` is none."""
    names = [f"layer{s}.{i}.conv.weight" for s in (1, 2) for i in (0, 1)]

    assert list(blocks(["conv1.weight", *names]).values()) == [0, 1, 2, 3]


def test_the_outermost_number_names_the_block() -> None:
    """Experts inside layers belong to their layer."""
    names = [f"layers.{i}.experts.{e}.w" for i in range(2) for e in range(3)]

    assert list(blocks(names).values()) == [0, 0, 0, 1, 1, 1]


def test_a_number_without_siblings_is_no_block() -> None:
    """A container of one is passed over for the next numbered level inside it."""
    names = ["tower.0.layers.0.w", "tower.0.layers.1.w"]

    assert list(blocks(names).values()) == [0, 1]
    assert blocks(["tower.0.w", "head.0.w"]) == {}


def test_a_plain_sequential_has_blocks() -> None:
    """Numbers at the root count as members of the model itself."""
    assert blocks(["0.weight", "0.bias", "2.weight"]) == {
        "0.weight": 0,
        "0.bias": 0,
        "2.weight": 1,
    }


def test_members_of_a_parameter_list_are_no_blocks() -> None:
    """A number that ends the name is a tensor's own, not a block's."""
    assert blocks(["scales.0", "scales.1"]) == {}


def test_blocks_are_ordered_by_number() -> None:
    """Block 10 comes after block 2, even where names are sorted as text."""
    names = sorted(f"h.{i}.w" for i in range(12))

    assert blocks(names) == {f"h.{i}.w": i for i in range(12)}


def test_one_fragment_needs_no_blocks() -> None:
    """Any model is one fragment, in model order."""
    assert split([("w", (3,)), ("b", ())], num_fragments=1) == (("w", "b"),)


def test_by_size_cuts_near_the_middle() -> None:
    """Contiguous parts whose largest is least."""
    # 4 + 1 | 2 + 3: largest 5; cutting elsewhere leaves 6 or 7.
    tensors: list[Named] = [("a", (4,)), ("b", ()), ("c", (2,)), ("d", (3,))]

    assert split(tensors, num_fragments=2, order="by_size") == (("a", "b"), ("c", "d"))


def test_empty_tensors_make_no_fragment() -> None:
    """A tensor without elements goes with the one before it, or with the first."""
    tensors: list[Named] = [("e0", (0,)), ("a", (1,)), ("e1", (3, 0)), ("b", (1,))]

    assert split(tensors, num_fragments=2, order="by_size") == (
        ("e0", "a", "e1"),
        ("b",),
    )


def test_by_size_looks_ahead() -> None:
    """A first part nearest to the mean is not taken where the rest would suffer."""
    # 9 over 3 parts: cutting after 3, the mean, leaves 1 | 4 1 or 1 4 | 1, largest 5.
    assert even_cuts([3, 1, 4, 1], 3) == [2, 3]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.data())
def test_by_size_minimises_the_largest_part(
    sizes: list[int], data: st.DataObject
) -> None:
    """No other contiguous cut into as many parts has a smaller largest one."""
    count = data.draw(st.integers(1, len(sizes)))

    def largest(cuts: list[int]) -> int:
        edges = [0, *cuts, len(sizes)]
        return max(sum(sizes[a:b]) for a, b in pairwise(edges))

    every = [list(c) for c in combinations(range(1, len(sizes)), count - 1)]
    cuts = even_cuts(sizes, count)

    assert cuts in every
    assert largest(cuts) == min(largest(other) for other in every)


@given(
    st.integers(2, 7),
    st.lists(st.integers(0, 50), max_size=6),
    st.sampled_from(["strided", "sequential", "by_size"]),
    st.data(),
)
def test_every_name_is_in_exactly_one_fragment(
    layers: int, rest_sizes: list[int], order: str, data: st.DataObject
) -> None:
    """A partition covers the model once, no fragment is empty, model order is kept."""
    tensors: list[Named] = [(f"rest{i}", (n,)) for i, n in enumerate(rest_sizes)]
    tensors += [(f"m.h.{i}.{leaf}", (3,)) for i in range(layers) for leaf in "wb"]
    num_fragments = data.draw(st.integers(1, layers))
    parts = split(tensors, num_fragments=num_fragments, order=order)
    names = [name for name, _ in tensors]

    assert len(parts) == num_fragments
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert min(sizes_of(tensors, parts)) > 0
    assert all(list(part) == [n for n in names if n in part] for part in parts)


def test_interleaved_registration_changes_nothing_but_order() -> None:
    """Only names, shapes and their order matter: blocks keep their fragments."""
    tensors = gpt(6)
    shuffled = tensors.copy()
    random.Random(0).shuffle(shuffled)
    one = split(tensors, num_fragments=3, rest="own")
    other = split(shuffled, num_fragments=3, rest="own")

    assert [set(part) for part in one] == [set(part) for part in other]


@pytest.mark.parametrize("order", ["strided", "sequential"])
def test_too_few_blocks_is_an_error_with_the_way_out(order: str) -> None:
    """More fragments than blocks names both numbers and `by_size`."""
    with pytest.raises(UsageError, match=r'show 2\. .* at most 2, .*"by_size"'):
        split(gpt(2), num_fragments=3, order=order)


def test_no_blocks_is_an_error_with_the_way_out() -> None:
    """A model without numbered members is told about `by_size`."""
    with pytest.raises(UsageError, match=r'show 0\. Set fragment_order = "by_size"'):
        split([("w", (3,)), ("b", (3,))], num_fragments=2)


def test_own_rest_needs_two_fragments() -> None:
    """With one fragment there is none left for the blocks."""
    with pytest.raises(UsageError, match="num_fragments=1 leaves no fragment"):
        split(gpt(2), num_fragments=1, rest="own")


def test_own_rest_needs_a_rest() -> None:
    """A model made of blocks only has nothing for fragment 0."""
    with pytest.raises(UsageError, match="all 2 tensors lie in blocks"):
        split([("h.0.w", (1,)), ("h.1.w", (1,))], num_fragments=2, rest="own")


def test_own_rest_contradicts_by_size() -> None:
    """What was asked for and cannot be active is an error."""
    with pytest.raises(UsageError, match="has no meaning"):
        split(gpt(2), num_fragments=2, order="by_size", rest="own")


def test_more_fragments_than_tensors_is_an_error() -> None:
    """A tensor is never cut; empty ones do not count."""
    with pytest.raises(UsageError, match=r"exceeds the 1 tensors .*num_fragments=1"):
        split([("w", (3,)), ("e", (0,))], num_fragments=2, order="by_size")


def test_a_fragment_without_elements_is_an_error() -> None:
    """A block of empty tensors cannot be a fragment by itself."""
    with pytest.raises(UsageError, match="Fragment 1 would have no elements"):
        split([("h.0.w", (1,)), ("h.1.w", (0,))], num_fragments=2)


def test_a_repeated_name_is_an_error() -> None:
    """A tied parameter is given once."""
    with pytest.raises(UsageError, match="'w' is given 2 times"):
        split([("w", (1,)), ("w", (1,))], num_fragments=1)


def test_an_empty_model_is_an_error() -> None:
    """Nothing to synchronise is said before the first step."""
    with pytest.raises(UsageError, match="nothing to synchronise"):
        split([], num_fragments=1)


@pytest.mark.parametrize(
    ("order", "rest", "num_fragments", "message"),
    [
        ("random", "balanced", 1, "fragment_order = 'random' must be one of strided"),
        ("strided", "first", 1, "rest = 'first' must be one of balanced"),
        ("strided", "balanced", 0, "num_fragments=0 must be at least 1"),
    ],
)
def test_unknown_ways_of_splitting_are_errors(
    order: str, rest: str, num_fragments: int, message: str
) -> None:
    """A value outside the list is refused with the list."""
    with pytest.raises(UsageError, match=message):
        split(gpt(2), num_fragments=num_fragments, order=order, rest=rest)
