"""Fragments of trees: every element once, stacked or not."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from atoll.errors import UsageError
from atoll.jax import fragments as pieces
from atoll.jax.fragments import Leaf
from atoll.settings import SyncSection

pytestmark = pytest.mark.jax

STACKED = [
    Leaf("dec.w", (4, 6), "float32"),
    Leaf("embed", (7,), "float32"),
    Leaf("enc.b", (2, 3), "float32"),
    Leaf("enc.w", (2, 3, 3), "float32"),
]
STACKS = {"dec": 1, "enc": 0}


def layers(
    sync: SyncSection, stacks: dict[str, int] = STACKS
) -> list[dict[str, tuple[int, ...] | None]]:
    """Return, for each fragment, which layers it has of each leaf."""
    found = pieces.lay_out(STACKED, stacks, sync)
    return [{p.leaf_spec.name: p.layers for p in fragment.pieces} for fragment in found]


def test_layers_of_stacks_of_different_depth_are_dealt_out() -> None:
    """Two containers of 6 and 2 layers are eight blocks; the rest is fragment 0."""
    sync = SyncSection(num_fragments=3, rest="own")

    # Blocks 0 to 5 are of dec, 6 and 7 of enc; even ones go to fragment 1.
    assert layers(sync) == [
        {"embed": None},
        {"dec.w": (0, 2, 4), "enc.b": (0,), "enc.w": (0,)},
        {"dec.w": (1, 3, 5), "enc.b": (1,), "enc.w": (1,)},
    ]


def test_sequential_layers_stay_together() -> None:
    """Four blocks and four: enc is in the second fragment as a whole."""
    sync = SyncSection(num_fragments=2, fragment_order="sequential")

    assert layers(sync) == [
        {"dec.w": (0, 1, 2, 3), "embed": None},
        {"dec.w": (4, 5), "enc.b": (0, 1), "enc.w": (0, 1)},
    ]


def test_fragments_of_equal_shapes_are_of_one_kind() -> None:
    """The programs of a run do not grow with the number of its fragments."""
    for count in (2, 3, 4, 6, 12):
        sync = SyncSection(num_fragments=count + 1, rest="own", sync_every=500)
        leaves = [Leaf("h.w", (12, 8), "float32"), Leaf("embed", (9,), "float32")]
        found = pieces.lay_out(leaves, {"h": 0}, sync)

        assert [len(kind.fragments) for kind in pieces.kinds(found)] == [1, count]


def test_a_piece_is_read_and_written_with_or_without_islands() -> None:
    """Layers are taken along their own axis, whatever comes before it."""
    (piece,) = pieces.lay_out(STACKED, STACKS, SyncSection(num_fragments=2))[0].pieces[
        :1
    ]
    alone = np.arange(24, dtype=np.float32).reshape(4, 6)
    for lead, whole in ((0, alone), (1, np.stack([alone, alone + 100]))):
        x = jax.numpy.asarray(whole)
        part = pieces.take(x, piece, piece.layer_indices, lead=lead)
        back = pieces.put(x, part + 1, piece, piece.layer_indices, lead=lead)

        np.testing.assert_array_equal(part, whole[..., list(piece.layers or ())])
        assert float((back - x).sum()) == part.size


@pytest.mark.parametrize(
    ("stacks", "message"),
    [
        ({"decoder": 0}, "'decoder', and no parameter's path begins so"),
        ({"embed": 1}, r"'embed' .* has shape \(7,\), without an axis 1"),
        ({"enc": 0, "enc.w": 0}, "'enc.w' lies in two stacks, 'enc' and 'enc.w'"),
    ],
)
def test_a_stack_that_is_none_is_named(stacks: dict[str, int], message: str) -> None:
    """What is said to be a stack and is not is an error with its path."""
    with pytest.raises(UsageError, match=message):
        layers(SyncSection(), stacks)


def test_leaves_of_one_stack_have_one_depth() -> None:
    """A leaf whose depth differs from its neighbours' is an error with its path."""
    leaves = [*STACKED, Leaf("enc.z", (3,), "float32")]

    with pytest.raises(UsageError, match=r"'enc.z' has 3 layers .* 'enc.b' .* has 2"):
        pieces.lay_out(leaves, STACKS, SyncSection())


def test_what_is_not_covered_once_is_named() -> None:
    """The check of coverage can fail, and says which leaf and which layers."""
    found = pieces.lay_out(STACKED, STACKS, SyncSection(num_fragments=2))
    leaves = pieces.stacked(STACKED, STACKS)
    missing = [replace(found[0], pieces=found[0].pieces[1:]), found[1]]

    with pytest.raises(UsageError, match=r"'dec.w' .* 6 layers .* have \[1, 3, 5\]"):
        pieces.require_coverage(leaves, missing)
    with pytest.raises(UsageError, match="not covered exactly once"):
        pieces.require_coverage(leaves, [*found, found[0]])
