"""States as bytes and as parcels: exact, bounded, and never executed."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import CorruptError, UsageError
from atoll.integrations.torchft.island import StateRegistry
from atoll.integrations.torchft.state_transfer import (
    ParcelReader,
    pack_tree,
    parcel_bytes,
    split,
    unpack_tree,
)

pytestmark = pytest.mark.torch

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(TREES)
def test_what_is_packed_is_unpacked(tree: Any) -> None:
    """Numbers, text and shape survive to the type, NaN and large integers too."""
    assert repr(unpack_tree(pack_tree(tree))) == repr(tree)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_tensors_keep_their_bits(dtype: torch.dtype) -> None:
    """Shape, dtype and bits of a tensor are the same, shared or strided ones too."""
    whole = torch.arange(12).to(dtype).view(3, 4)
    tree = {"a": whole, "again": [whole, whole.t()], 3: torch.tensor(1, dtype=dtype)}

    back = unpack_tree(pack_tree(tree))

    assert back.keys() == tree.keys()
    for mine, its in ((whole, back["a"]), (whole.t(), back["again"][1])):
        assert its.dtype == dtype
        assert torch.equal(mine, its)
    assert back[3].shape == ()


def test_an_optimizers_state_goes_both_ways() -> None:
    """What torch's optimizers save is what they load."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    other = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())

    other.load_state_dict(unpack_tree(pack_tree(optimizer.state_dict())))

    assert repr(other.state_dict()) == repr(optimizer.state_dict())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, {2}]}, "'state/a/1' of the registered state is a set"),
        ({(1, 2): 3}, r"has the key \(1, 2\)"),
        ({"a": np.float64(1.0)}, "'state/a' of the registered state is a float64"),
    ],
)
def test_what_cannot_be_carried_is_named(value: object, said: str) -> None:
    """A state that would not come out as it went in does not go at all."""
    with pytest.raises(UsageError, match=said):
        pack_tree(value)


def test_a_state_is_not_endlessly_deep() -> None:
    """A tree without a floor is refused on both sides."""
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]

    with pytest.raises(UsageError, match="more than 64 levels deep"):
        pack_tree(deep)


@given(st.binary(max_size=300))
def test_bytes_that_are_no_state_are_refused(data: bytes) -> None:
    """Whatever comes is a state or CorruptError, and nothing else is raised."""
    with pytest.raises(CorruptError, match="cannot be unpacked"):
        unpack_tree(data)


@given(st.binary(max_size=400), st.integers(15, 40))
def test_parcels_give_their_bytes_back(data: bytes, elements: int) -> None:
    """Any bytes come out as they went in, whatever the length of a parcel."""
    parcels = split(data, elements=elements, max_bytes=400)
    reader = ParcelReader(max_bytes=400)
    for parcel in parcels:
        reader.add(parcel)

    assert reader.data() == data
    assert len(parcels) == -(-(len(data) + 40) // parcel_bytes(elements))


@given(st.binary(min_size=100, max_size=200))
def test_parcels_have_one_norm(data: bytes) -> None:
    """No judge of norms can tell one parcel from another."""
    for parcel in split(data, elements=30, max_bytes=200):
        norm = float(np.linalg.norm(parcel.astype(np.float64)))

        assert norm == pytest.approx(2.0**48, rel=1e-6)


def test_a_state_beyond_the_limit_is_neither_given_nor_taken() -> None:
    """The run's limit of bodies is that of states, for both sides."""
    with pytest.raises(UsageError, match=r"101 bytes, and limits\.max_body_bytes=100"):
        split(bytes(101), elements=50, max_bytes=100)
    (parcel,) = split(bytes(101), elements=50, max_bytes=101)

    with pytest.raises(CorruptError, match="promises 141 bytes"):
        ParcelReader(max_bytes=100).add(parcel)


def test_a_spoilt_parcel_is_found() -> None:
    """Other values, other bytes, too many parcels and too few are all corrupt."""
    first, second = split(bytes(range(60)), elements=21, max_bytes=99)
    half = ParcelReader(max_bytes=99)
    half.add(first)
    with pytest.raises(CorruptError, match="do not have its digest"):
        half.data()
    with pytest.raises(CorruptError, match="holds no bytes"):
        half.add(second + np.float32(0.5))
    half.add(second)
    with pytest.raises(CorruptError, match="continues after its 100 bytes"):
        half.add(second)

    other = ParcelReader(max_bytes=99)
    other.add(first)
    second[3] += 1
    other.add(second)
    with pytest.raises(CorruptError, match="do not have its digest"):
        other.data()


def test_a_state_is_not_read_while_a_step_changes_it() -> None:
    """Who reads from another thread waits until the inner step is made."""
    registry, read = StateRegistry(), list[dict[str, Any]]()
    registry.register("a", print, lambda: 1)
    registry.disallow()
    with pytest.raises(UsageError, match="an inner step was in progress"):
        registry.read(0.01)
    thread = threading.Thread(target=lambda: read.append(registry.read(60.0)))
    thread.start()
    registry.allow()
    thread.join()

    assert read == [{"a": 1}]


def test_another_set_of_states_is_refused() -> None:
    """Nothing is loaded from an island that registered other parts."""
    loaded: list[object] = []
    registry = StateRegistry()
    registry.register("model", loaded.append, dict)

    with pytest.raises(CorruptError, match=r"has registered \['other'\]"):
        registry.load({"other": 1})

    assert loaded == []
