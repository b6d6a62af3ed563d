"""States as JSON and arrays: a value is restored equal, or refused with its path."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from atoll.checkpoint.arrays import HostArray, size_bytes
from atoll.checkpoint.frameworks import (
    RestoreContext,
    TreePath,
)
from atoll.checkpoint.tree import MAX_DEPTH, Encoder, Json, children, decode
from atoll.errors import CorruptError, UsageError


class _Memory:
    """The arrays of an encoder, read back. Implements `Source`."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def read(self, name: str, rank: int | None = None) -> HostArray:
        array = self._encoder.arrays[name]
        data = np.empty(size_bytes(array.kind, array.shape), np.uint8)
        array.copy_to(data)
        assert data.tobytes() == array.flat().tobytes()
        return HostArray(data, array.kind, array.shape)

    def elsewhere(self, path: TreePath) -> dict[int, object]:
        return {}


def _there_and_back(value: object) -> object:
    encoder = Encoder()
    text = json.dumps(encoder.encode(value, ("part",)), allow_nan=False)
    context = RestoreContext(_Memory(encoder), lambda path: None)
    return decode(json.loads(text), ("part",), context)


def _is_same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(_is_same(a, b) for a, b in pairs)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        both = zip(one, other, strict=False)
        return len(one) == len(other) and all(_is_same(a, b) for a, b in both)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and one.tobytes() == other.tobytes()
    if isinstance(one, np.generic) and isinstance(other, np.generic):
        return one.tobytes() == other.tobytes()
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return one == other and repr(one) == repr(other)


_NUMBERS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=-(2**200), max_value=2**200),
    st.floats(),
    st.text(),
)
_KEYS = st.recursive(
    st.one_of(st.text(), st.integers(), st.none(), st.floats(allow_nan=False)),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
_ARRAYS = hnp.arrays(
    dtype=st.sampled_from(["?", "u1", "i2", "f2", "<f4", "f8", "i8", "c8", "u4"]),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
_SCALARS = st.sampled_from([np.float32(1.5), np.int64(-3), np.True_, np.float64("nan")])
_LEAVES = st.one_of(_NUMBERS, _ARRAYS, _SCALARS, st.binary(max_size=9))
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(_KEYS, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


@given(_TREES)
def test_every_tree_comes_back_as_it_was(tree: object) -> None:
    """Types, keys, order, bits: a state is the same after it was written and read."""
    assert _is_same(_there_and_back(tree), tree)


def test_a_counter_stays_a_counter() -> None:
    """MultiStepLR counts its milestones, and asks the counter for its elements."""
    restored = _there_and_back(Counter({80: 1, 120: 2}))

    assert isinstance(restored, Counter)
    assert sorted(restored.elements()) == [80, 120, 120]


def test_an_array_that_is_there_twice_is_written_once() -> None:
    """Tied weights are one memory, and one array of the file."""
    weight = np.ones(4, np.float32)
    encoder = Encoder()

    encoder.encode({"a": weight, "b": weight, "c": weight.copy()}, ("model",))

    assert list(encoder.arrays) == ["a", "c"]


def test_arrays_whose_paths_look_alike_have_names_of_their_own() -> None:
    """A key with a dot does not take the name of a key below another."""
    tree = {"a.b": np.zeros(1), "a": {"b": np.ones(1)}}

    assert _is_same(_there_and_back(tree), tree)


def test_memory_in_another_order_is_written_in_ours() -> None:
    """Transposed, strided and big-endian arrays come back with their numbers."""
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    for array in (base.T, base[:, ::2], base.astype(">f4")):
        assert np.array_equal(_there_and_back(array), array)  # type: ignore[arg-type]


_Point = namedtuple("_Point", ["x", "y"])


class _Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: None,
        {1, 2},
        _Point(1, 2),
        _Colour.RED,
        1j,
        np.array(["word"]),
        np.array([object()]),
        np.zeros(2, "longdouble"),
        {b"key": 1},
        {frozenset(): 1},
        2**5000,
        range(3),
        int,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_represented_is_named_by_its_path(value: object) -> None:
    """An error says where in the state the value is, and nothing is guessed."""
    with pytest.raises(UsageError, match=r"^optimizer\.state\.0\.odd"):
        Encoder().encode({"state": {0: {"odd": value}}}, ("optimizer",))


def test_a_state_that_contains_itself_is_refused() -> None:
    """A cycle ends in an error, not in a stack overflow."""
    tree: dict[str, object] = {}
    tree["again"] = tree

    with pytest.raises(UsageError, match=rf"nested more than {MAX_DEPTH} deep"):
        Encoder().encode(tree, ("trainer",))


@pytest.mark.parametrize(
    "value",
    [
        {"!float": "1"},
        {"!float": 3},
        {"!tuple": {}},
        {"!dict": [[1]]},
        {"!dict": [[1, 2], [1, 3]]},
        {"!dict": [[[1], 2]]},
        {"!dict": 3},
        {"!counter": [["a"]]},
        {"!bytes": 7},
        {"!numpy": None},
        {"!pickle": "gASV"},
        {"!os.system": "true"},
        {"!torch.function": "load"},
        {"!torch.dtype": "load"},
        {"!torch.size": ["x"]},
        {"!torch.device": "moon:0"},
        {"!torch.piece": {}},
        {"!torch.tensor": {"array": "x"}},
        {"!tuple": [], "more": 1},
        {"": {"!": 1}},
    ],
    ids=repr,
)
def test_a_tag_that_means_nothing_is_corrupt(value: Json) -> None:
    """The decoder refuses trees that no encoder writes."""
    context = RestoreContext(_Memory(Encoder()), lambda path: None)

    with pytest.raises(CorruptError):
        decode(value, ("part",), context)


def test_depth_is_bounded_when_reading() -> None:
    """A tree that is deeper than any that is written is refused."""
    value: Json = 1
    for _ in range(MAX_DEPTH + 5):
        value = [value]

    with pytest.raises(CorruptError, match="nested too deep"):
        decode(value, ("part",), RestoreContext(_Memory(Encoder()), lambda path: None))


@given(_TREES)
def test_one_level_can_be_read_alone(tree: object) -> None:
    """The children of an encoded tree have the keys of the tree itself."""
    encoded = Encoder().encode(tree, ("part",))

    if isinstance(tree, dict):
        assert list(children(encoded)) == list(tree)
    elif isinstance(tree, list | tuple):
        assert list(children(encoded)) == list(range(len(tree)))
    else:
        assert children(encoded) == {}
