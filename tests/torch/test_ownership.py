"""Who owns what: every element has one owner, whoever holds it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from atoll.errors import ModelError
from atoll.protocol import ModelSpec, TensorSpec
from atoll.torch.ranks.ownership import HeldTensor, Ownership, Table, model_of
from atoll.weights import FragmentLayout
from atoll.wire import STATE_PIECE

pytestmark = pytest.mark.torch

ROWS, COLUMNS = 700, 301
"""Some pieces, and no multiple of anything."""


def tensor(name: str, shape: tuple[int, ...], role: str = "parameter") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype="float32", role=role)  # type: ignore[arg-type]


WEIGHT, BIAS = tensor("w", (ROWS, COLUMNS)), tensor("b", (COLUMNS,))


def held(
    spec: TensorSpec,
    start: tuple[int, ...] | None = None,
    size: tuple[int, ...] | None = None,
    *,
    is_copy: bool = False,
    stage: int = 0,
) -> HeldTensor:
    return HeldTensor(
        spec=spec,
        stage=stage,
        start=start or (0,) * len(spec.shape),
        size=size or spec.shape,
        is_buffer=spec.role == "buffer",
        is_copy=is_copy,
    )


def by_rows(ranks: int) -> Table:
    """Cut rows, as FSDP2 does; the bias is whole on every rank."""
    cuts = np.linspace(0, ROWS, ranks + 1).astype(int).tolist()
    return [
        [held(WEIGHT, (a, 0), (b - a, COLUMNS)), held(BIAS)]
        for a, b in itertools.pairwise(cuts)
    ]


def by_columns() -> Table:
    """Cut columns, as tensor parallel does, on two ranks of two replicas each."""
    left = held(WEIGHT, (0, 0), (ROWS, 100))
    right = held(WEIGHT, (0, 100), (ROWS, COLUMNS - 100))
    return [[left, held(BIAS)], [right, held(BIAS)]] * 2


TABLES = {
    "replicas": [[held(WEIGHT), held(BIAS)] for _ in range(3)],
    "rows": by_rows(3),
    "columns and replicas": by_columns(),
    "tied": [[held(WEIGHT)], [held(BIAS), held(WEIGHT, is_copy=True)]],
}
LAYOUT = (FragmentLayout((WEIGHT, BIAS)),)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_element_has_one_owner(table: Table) -> None:
    """The owned ranges of all ranks are the fragment, and each rank holds its own."""
    shares = Ownership(table, LAYOUT)
    owners = np.zeros(LAYOUT[0].elements, int)
    for rank in range(len(table)):
        owned, holds = shares.owned(rank, 0), shares.held_ranges(rank, 0)
        owners[owned.cut(0, len(owners)).positions] += 1
        assert owned.inside(holds).elements == owned.elements
        assert shares.part(rank, 0).elements == owned.elements
    assert (owners == 1).all()


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_what_a_rank_holds_and_does_not_own_it_is_given(table: Table) -> None:
    """What others share with a rank, and what it owns, is all that it holds."""
    shares = Ownership(table, LAYOUT)
    for rank in range(len(table)):
        given = [
            shares.shared(other, rank, 0).elements
            for other in range(len(table))
            if other != rank
        ]
        own = shares.owned(rank, 0).elements
        assert own + sum(given) == shares.held_ranges(rank, 0).elements


def test_replicas_own_whole_pieces() -> None:
    """Whoever owns a piece of what all hold can hash it alone."""
    shares = Ownership(TABLES["replicas"], LAYOUT)
    owners = shares.owners(0)
    assert len(owners) == -(-LAYOUT[0].elements // STATE_PIECE)
    assert set(owners) == {0, 1, 2}


def test_buffers_belong_to_the_first_rank() -> None:
    """Buffers may differ from rank to rank: the first one's are the model's."""
    buffer = tensor("seen", (9,), "buffer")
    layout = (FragmentLayout((buffer,), is_buffers=True),)
    shares = Ownership([[held(buffer)], [held(buffer)]], layout)
    assert [shares.owned(rank, 0).elements for rank in (0, 1)] == [9, 0]


def test_stages_in_order_are_the_model() -> None:
    """Parameters of all stages come before the buffers of all stages."""
    seen = tensor("seen", (2,), "buffer")
    table = [[held(BIAS, stage=1)], [held(WEIGHT), held(seen)]]
    assert model_of(table, stages=2) == ModelSpec((WEIGHT, BIAS, seen))


def test_a_part_that_no_rank_holds_is_named() -> None:
    """A tensor of which rows are missing makes no model."""
    with pytest.raises(ModelError, match=r"hold 301 elements of 'w', which has 210700"):
        model_of([[held(WEIGHT, (0, 0), (1, COLUMNS))]], stages=1)


def test_a_copy_that_is_cut_otherwise_is_named() -> None:
    """A tied weight is given to its copies box by box."""
    copy = held(WEIGHT, (0, 0), (1, COLUMNS), is_copy=True, stage=1)
    with pytest.raises(ModelError, match=r"'w' is cut otherwise where it is tied"):
        model_of([[held(WEIGHT)], [copy]], stages=2)
