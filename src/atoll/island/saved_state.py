"""The state of an island in a checkpoint: the tree of its `island` component.

Also the value that a round brings back, which a checkpoint may hold too, and the rule
for the part of saved work that has not counted once the rosters are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from atoll.algorithm.schedule import Stride
from atoll.errors import CorruptError, UsageError
from atoll.exchange import Frame
from atoll.island.deal import SavedDeal
from atoll.protocol import Position, WorkDecision
from atoll.protocol.island import FragmentSync, RemainingWork, RoundInFlight
from atoll.weights.layout import F32
from atoll.wire import Verdict, pack, unpack


@dataclass(frozen=True, kw_only=True)
class AppliedOutcome:
    """An outcome that is in the anchor, and not yet in the local weights."""

    decision: WorkDecision
    verdict: Verdict
    reason: str
    """Why the run refused the update, if it did."""

    through: int
    position: Position | None
    """The run's position after the round; None if the outcome itself is lost."""

    window: int | None = None
    """Inner steps per window from now on, 0 for the schedule's; None: as before, since
    no roster lists the island."""


@dataclass(frozen=True)
class FragmentsWanted:
    """No outcome yet: the run requests the fragments in `position.wanted` first."""

    position: Position


VERSION, STRIDE_VERSION, DEAL_VERSION = 1, 2, 3
"""The versions of the tree. The second has a stride, the third rows of the run. An
island that makes all inner steps of the schedule, and reads its own data, is saved in
the first, which earlier versions of Atoll read."""

COUNTERS = (
    "counted",
    "carried",
    "refused",
    "dropped",
    "not_counted_steps",
    "earlier_steps",
    "earlier_tokens",
)
"""The fields of `IslandCounters` that an exact resume continues."""

Tree = dict[str, Any]


@dataclass(kw_only=True)
class SavedUpdate:
    """A sealed update without an outcome, or with one that was not taken yet."""

    round: int
    inner_steps: int
    tokens: int
    weight: int
    base: F32
    """In an exact state as in `UpdateInFlight`; in saved work, the local weights at
    the seal minus the loaded ones."""

    is_awaited: bool = False
    frame: Frame | None = None
    residual_after: F32 | None = None
    arrival: AppliedOutcome | None = None


@dataclass(kw_only=True)
class SavedFragment:
    """One fragment of an island."""

    index: int
    round: int
    digest: bytes
    """Digest of the anchor and velocity that the other fields are relative to."""

    settled_steps: int
    settled_tokens: int
    residual: F32 | None
    update: SavedUpdate | None = None
    difference: F32 | None = None
    """Saved work: local weights minus the anchor as loaded."""

    vectors: tuple[F32, ...] = ()
    """Exact state: the anchor and its moments."""

    count: int = 0
    sync_state: FragmentSync | None = None
    """Exact state: the machine's state of the fragment."""


@dataclass(kw_only=True)
class SavedIsland:
    """An island at the end of an inner step."""

    run: str
    island: str
    incarnation: int
    origin: int
    """The first incarnation whose updates may hold this island's work."""

    step: int
    """The schedule step."""

    inner_steps: int
    tokens: int
    before_steps: int
    before_tokens: int
    """Counts of the earlier incarnations when this one joined."""

    is_exact: bool
    fragments: list[SavedFragment]
    counters: dict[str, int] = field(default_factory=dict)
    stride: Stride | None = None
    """None: the island makes all inner steps of the schedule."""

    deal: SavedDeal | None = None
    """The rows that the run has dealt to the island; None: it reads its own data."""

    @classmethod
    def of_rank(cls, fragments: list[SavedFragment]) -> SavedIsland:
        """Return one rank's vectors, for a checkpoint; the leader's has the rest."""
        return cls(
            run="",
            island="",
            incarnation=0,
            origin=0,
            step=0,
            inner_steps=0,
            tokens=0,
            before_steps=0,
            before_tokens=0,
            is_exact=False,
            fragments=fragments,
        )

    @property
    def progress(self) -> tuple[int, int]:
        """Inner steps and tokens of all incarnations."""
        return self.before_steps + self.inner_steps, self.before_tokens + self.tokens

    @property
    def earlier(self) -> tuple[int, int]:
        """The part of `progress` that was made before the run began."""
        counters = self.counters
        return counters.get("earlier_steps", 0), counters.get("earlier_tokens", 0)

    @property
    def has_stride(self) -> bool:
        """Whether the island's window is not the schedule's, now or with an outcome."""
        updates = [fragment.update for fragment in self.fragments]
        arrivals = [update.arrival for update in updates if update is not None]
        windows = [arrival.window for arrival in arrivals if arrival is not None]
        return self.stride is not None or any(windows)


def to_tree(saved: SavedIsland) -> Tree:
    """Return an island as plain values and arrays; the arrays are not copied."""
    values = {name: getattr(saved, name) for name in _ISLAND_FIELDS}
    fragments = [_fragment_tree(fragment) for fragment in saved.fragments]
    tree = {"version": VERSION, **values, "fragments": fragments}
    if saved.has_stride or saved.deal:
        stride = asdict(saved.stride) if saved.stride else None
        tree |= {"version": STRIDE_VERSION, "stride": stride}
    if saved.deal:
        tree |= {"version": DEAL_VERSION, "deal": saved.deal.to_tree()}
    return tree


def from_tree(tree: Mapping[str, Any]) -> SavedIsland:
    """Return the island that a tree holds.

    Raises:
        CorruptError: `to_tree` did not make the tree.
    """
    if tree.get("version") not in (VERSION, STRIDE_VERSION, DEAL_VERSION):
        raise CorruptError(
            f"The island's part of the checkpoint has version {tree.get('version')!r}, "
            f"and this Atoll reads {VERSION} to {DEAL_VERSION}. Use the Atoll that "
            "wrote it."
        )
    try:
        fragments = [_fragment(*entry) for entry in enumerate(tree["fragments"])]
        values = {name: tree[name] for name in _ISLAND_FIELDS}
        stride = Stride(**tree["stride"]) if tree.get("stride") else None
        deal = SavedDeal.from_tree(tree["deal"]) if tree.get("deal") else None
        return SavedIsland(fragments=fragments, stride=stride, deal=deal, **values)
    except (KeyError, TypeError, ValueError, UsageError) as exc:
        raise CorruptError(
            f"The island's part of the checkpoint is not complete: {exc!r}. "
            "Remove the checkpoint; an earlier one is used then."
        ) from exc


def _names(kind: type, *without: str) -> list[str]:
    """Return the fields of a dataclass, except those of other values."""
    return [field.name for field in fields(kind) if field.name not in without]


_ISLAND_FIELDS = _names(SavedIsland, "fragments", "stride", "deal")
_FRAGMENT_FIELDS = _names(SavedFragment, "index", "update", "sync_state")
_UPDATE_FIELDS = _names(SavedUpdate, "frame", "arrival")


def _fragment_tree(saved: SavedFragment) -> Tree:
    return {
        **{name: getattr(saved, name) for name in _FRAGMENT_FIELDS},
        "update": _update_tree(saved.update) if saved.update else None,
        "book": asdict(saved.sync_state) if saved.sync_state else None,
    }


def _fragment(index: int, tree: Mapping[str, Any]) -> SavedFragment:
    update, sync_state = tree["update"], tree["book"]
    return SavedFragment(
        index=index,
        **{name: tree[name] for name in _FRAGMENT_FIELDS},
        update=_update(update) if update else None,
        sync_state=_book(sync_state) if sync_state else None,
    )


def _book(tree: Mapping[str, Any]) -> FragmentSync:
    flight = tree["flight"]
    return FragmentSync(
        **{**tree, "flight": RoundInFlight(**flight) if flight else None}
    )


def _update_tree(saved: SavedUpdate) -> Tree:
    frame, arrival = saved.frame, saved.arrival
    return {
        **{name: getattr(saved, name) for name in _UPDATE_FIELDS},
        "frame": {"head": pack(frame.header), "body": frame.body} if frame else None,
        "arrival": _arrival_tree(arrival) if arrival else None,
    }


def _update(tree: Mapping[str, Any]) -> SavedUpdate:
    frame, arrival = tree["frame"], tree["arrival"]
    return SavedUpdate(
        **{name: tree[name] for name in _UPDATE_FIELDS},
        frame=_frame(frame) if frame else None,
        arrival=_arrival(arrival) if arrival else None,
    )


def _frame(tree: Mapping[str, Any]) -> Frame:
    return Frame(unpack(tree["head"]), np.ascontiguousarray(tree["body"], np.uint8))


def _arrival_tree(arrival: AppliedOutcome) -> Tree:
    position = arrival.position
    return {
        "how": arrival.decision.value,
        "verdict": arrival.verdict.name,
        "reason": arrival.reason,
        "through": arrival.through,
        "position": _position_tree(position) if position else None,
        **({} if arrival.window is None else {"window": arrival.window}),
    }


def _position_tree(position: Position) -> Tree:
    """Return a position; one without last rounds as earlier versions read it."""
    tree = asdict(position)
    if position.last_rounds is None:
        del tree["last_rounds"]
    return tree


def _arrival(tree: Mapping[str, Any]) -> AppliedOutcome:
    position = tree["position"]
    return AppliedOutcome(
        decision=WorkDecision(tree["how"]),
        verdict=Verdict[tree["verdict"]],
        reason=tree["reason"],
        through=tree["through"],
        position=Position(**position) if position else None,
        window=tree.get("window"),
    )


REMAINS = (RemainingWork.ALL, RemainingWork.SINCE)
"""The cases in which some saved work has not counted."""


def difference_left(saved: SavedFragment, remaining: RemainingWork) -> F32 | None:
    """Return the difference to be added to the live weights."""
    if remaining is RemainingWork.ALL:
        return saved.difference
    if remaining is not RemainingWork.SINCE:
        return None
    assert saved.update is not None
    assert saved.difference is not None
    return saved.difference - saved.update.base


def residual_left(saved: SavedFragment, remaining: RemainingWork) -> F32 | None:
    """Return the codec's error that no round has."""
    if remaining is RemainingWork.ALL:
        return saved.residual
    if remaining is not RemainingWork.SINCE:
        return None
    assert saved.update is not None
    return saved.update.residual_after


def settled_left(
    saved: SavedFragment, remaining: RemainingWork, progress: tuple[int, int]
) -> tuple[int, int]:
    """Return the inner steps and tokens that no further update has to hold.

    `progress` are those of all incarnations.
    """
    if remaining is RemainingWork.ALL:
        return saved.settled_steps, saved.settled_tokens
    if remaining is RemainingWork.SINCE:
        assert saved.update is not None
        return saved.update.inner_steps, saved.update.tokens
    return progress
