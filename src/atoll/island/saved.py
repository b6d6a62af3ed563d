"""What a checkpoint holds of an island: the tree of its `island` component.

Two shapes. *Standing* is an island as it stands, to the bit: with the weights beside it
the same steps lead to the same bits. *Work* is what it has learnt and no round has
counted, as differences: it can be put on whatever anchor the run has come to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from atoll.errors import CorruptError
from atoll.exchange import Frame
from atoll.island.arrivals import Arrival
from atoll.protocol import How, Position
from atoll.protocol.island_state import Book, Flight
from atoll.weights.layout import F32
from atoll.wire import Verdict, pack, unpack

VERSION = 1
COUNTERS = ("counted", "carried", "refused", "dropped", "not_counted_steps")
"""Of a tally: what an exact resume goes on counting."""

Tree = dict[str, Any]


@dataclass(kw_only=True)
class SavedUpdate:
    """A sealed update without an outcome, or with one that was not taken yet."""

    round: int
    inner_steps: int
    tokens: int
    weight: int
    base: F32
    """Of a standing as in `Sealed`; of work, local weights at the seal minus what was
    loaded."""

    is_awaited: bool = False
    frame: Frame | None = None
    residual_after: F32 | None = None
    arrival: Arrival | None = None


@dataclass(kw_only=True)
class SavedFragment:
    """One fragment of an island."""

    round: int
    digest: bytes
    """Of the anchor and velocity that everything else is relative to."""

    settled_steps: int
    settled_tokens: int
    residual: F32 | None
    update: SavedUpdate | None = None
    difference: F32 | None = None
    """Work: local weights minus what was loaded of the anchor."""

    vectors: tuple[F32, ...] = ()
    """A standing: the anchor and its moments."""

    count: int = 0
    book: Book | None = None
    """A standing: what the machine knew of the fragment."""


@dataclass(kw_only=True)
class SavedIsland:
    """An island at the end of an inner step."""

    run: str
    island: str
    incarnation: int
    origin: int
    """The first life whose updates may hold this island's work."""

    step: int
    inner_steps: int
    tokens: int
    before_steps: int
    before_tokens: int
    """What earlier lives had counted when this one joined: progress is the sum."""

    is_exact: bool
    fragments: list[SavedFragment]
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def progress(self) -> tuple[int, int]:
        """Inner steps and tokens of all lives."""
        return self.before_steps + self.inner_steps, self.before_tokens + self.tokens


def to_tree(saved: SavedIsland) -> Tree:
    """Return an island as plain values and arrays, whose memory is shared."""
    whole = {name: getattr(saved, name) for name in _WHOLE}
    fragments = [_fragment_tree(each) for each in saved.fragments]
    return {"version": VERSION, **whole, "fragments": fragments}


def from_tree(tree: Mapping[str, Any]) -> SavedIsland:
    """Return the island that a tree holds.

    Raises:
        CorruptError: it is not one that `to_tree` made.
    """
    if tree.get("version") != VERSION:
        raise CorruptError(
            f"The island's part of the checkpoint has version {tree.get('version')!r}, "
            f"and this Atoll reads {VERSION}. Use the one that wrote it."
        )
    try:
        fragments = [_fragment(each) for each in tree["fragments"]]
        whole = {name: tree[name] for name in _WHOLE}
        return SavedIsland(fragments=fragments, **whole)
    except (KeyError, TypeError, ValueError) as exc:
        raise CorruptError(
            f"The island's part of the checkpoint is not whole: {exc!r}. "
            "Remove the checkpoint: an earlier one is taken then."
        ) from exc


_WHOLE = (
    "run",
    "island",
    "incarnation",
    "origin",
    "step",
    "inner_steps",
    "tokens",
    "before_steps",
    "before_tokens",
    "is_exact",
    "counters",
)
_FRAGMENT = (
    "round",
    "digest",
    "settled_steps",
    "settled_tokens",
    "residual",
    "difference",
    "vectors",
    "count",
)
_UPDATE = (
    "round",
    "inner_steps",
    "tokens",
    "weight",
    "base",
    "is_awaited",
    "residual_after",
)


def _fragment_tree(saved: SavedFragment) -> Tree:
    return {
        **{name: getattr(saved, name) for name in _FRAGMENT},
        "update": _update_tree(saved.update) if saved.update else None,
        "book": asdict(saved.book) if saved.book else None,
    }


def _fragment(tree: Mapping[str, Any]) -> SavedFragment:
    update, book = tree["update"], tree["book"]
    return SavedFragment(
        **{name: tree[name] for name in _FRAGMENT},
        update=_update(update) if update else None,
        book=_book(book) if book else None,
    )


def _book(tree: Mapping[str, Any]) -> Book:
    flight = tree["flight"]
    return Book(**{**tree, "flight": Flight(**flight) if flight else None})


def _update_tree(saved: SavedUpdate) -> Tree:
    frame, arrival = saved.frame, saved.arrival
    return {
        **{name: getattr(saved, name) for name in _UPDATE},
        "frame": {"head": pack(frame.header), "body": frame.body} if frame else None,
        "arrival": _arrival_tree(arrival) if arrival else None,
    }


def _update(tree: Mapping[str, Any]) -> SavedUpdate:
    frame, arrival = tree["frame"], tree["arrival"]
    return SavedUpdate(
        **{name: tree[name] for name in _UPDATE},
        frame=_frame(frame) if frame else None,
        arrival=_arrival(arrival) if arrival else None,
    )


def _frame(tree: Mapping[str, Any]) -> Frame:
    return Frame(unpack(tree["head"]), np.ascontiguousarray(tree["body"], np.uint8))


def _arrival_tree(arrival: Arrival) -> Tree:
    position = arrival.position
    return {
        "how": arrival.how.value,
        "verdict": arrival.verdict.name,
        "reason": arrival.reason,
        "through": arrival.through,
        "position": asdict(position) if position else None,
    }


def _arrival(tree: Mapping[str, Any]) -> Arrival:
    position = tree["position"]
    return Arrival(
        how=How(tree["how"]),
        verdict=Verdict[tree["verdict"]],
        reason=tree["reason"],
        through=tree["through"],
        position=Position(**position) if position else None,
    )
