"""Looks at a run in a store on behalf of a person, and joins nothing.

Rule 1: nothing is put: who may only read can look.
Rule 2: an observer that has just come cannot know who is live. A member is live when
        its document has changed under the observer's eyes, and silent when it has not
        for a lease; before that it was only seen.

A store that is read whole where it cannot read parts, found out by reading only.

Where a run in a store is, in the same document as a coordinator's.

No clock is kept in a store, so what is told of times is counted from when the observer
came: `watched_s` ago.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from atoll import __version__
from atoll.clock import Clock
from atoll.coordinator.status import run_state, status_of
from atoll.errors import Unreachable
from atoll.exchange.bucket import BucketReader, ThreadTiming, keys
from atoll.exchange.bucket.create import require_there
from atoll.exchange.bucket.documents import RosterDocument
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.states import States
from atoll.exchange.bucket.view import BEAT_S, RunView
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.membership import Members
from atoll.protocol.tables import changed
from atoll.store import (
    Data,
    Item,
    RetryingStore,
    Store,
    StoreTraits,
    open_store,
)
from atoll.wire import Verdict

LOOK_S = 1.0
"""Between two looks at documents that may change."""

LEFT, LIVE, SILENT, SEEN = "left", "live", "silent", "seen"


class Observing:
    """A look at the run at a URL. Close it, or use it in a `with` block.

    Raises:
        UsageError: there is no run, and the command that makes one is named.
        CorruptError: its settings are not those that it was made with.
        StoreDenied: a permission is missing.
        Unreachable: the store does not answer.
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        require_there(url)
        self.url = url
        self._timing = ThreadTiming(clock)
        try:
            self.store = RetryingStore(
                WholeReads(open_store(url)), pause=self._timing.pause
            )
            self.reader = BucketReader.open(self.store, self._timing, url=url)
            self.outcomes = Outcomes(self.reader, None)
            self.states = States(self.reader, self.outcomes)
            self._begun_s = self._timing.now_s()
            self._changed_s: dict[str, float] = {}
            self._has_looked = self._has_begun = False
            self.look()
        except BaseException:
            self._timing.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timing.close()

    @property
    def watched_s(self) -> float:
        """How long this observer has been here."""
        return self._timing.now_s() - self._begun_s

    @property
    def now_s(self) -> float:
        return self._timing.now_s()

    def look(self) -> None:
        """Read what is new: operators' words, members, rosters and open rounds."""
        self.reader.read_controls()
        self._look_members()
        if not self.reader.read_founding():
            return
        fragments = range(len(self.reader.view.layout))
        if not self._has_begun:
            for fragment in fragments:
                self.states.begin(fragment)
            self._has_begun = True
        for fragment in fragments:
            self.reader.read_round(fragment)

    def watch(self, seconds: float) -> None:
        """Look at members until all are known to live or to be silent, or time is up.

        Then look at the rest once more.
        """
        until_s = self._timing.now_s() + seconds
        while self._unknown() and self._timing.now_s() < until_s:
            self._timing.pause(min(LOOK_S, max(0.0, until_s - self._timing.now_s())))
            self._look_members()
        self.look()

    def read_rosters(self, wanted: Sequence[tuple[int, int]]) -> list[RosterDocument]:
        """Return the rosters of closed rounds, by fragment and round."""
        reads = [partial(self.reader.roster, *at) for at in wanted]
        return self._timing.together(reads) if reads else []

    def pause(self, seconds: float) -> None:
        """Let time pass."""
        self._timing.pause(seconds)

    def standing(self, island: str) -> str:
        """Return what is known of an island: left, live, silent, or only seen."""
        member = self.reader.view.state.members.known[island]
        if member.has_left:
            return LEFT
        if self.unchanged_s(island) > self.reader.view.lease_s:
            return SILENT
        return LIVE if island in self._changed_s else SEEN

    def unchanged_s(self, island: str) -> float:
        """Return how long an island's document has not changed, as far as was seen."""
        return self._timing.now_s() - self._changed_s.get(island, self._begun_s)

    def _look_members(self) -> None:
        before = dict(self.reader.view.documents)
        self.reader.members.read()
        now_s = self._timing.now_s()
        for island, document in self.reader.view.documents.items():
            # Who has come after the first look is live as well.
            is_news = before.get(island) != document
            if is_news and (island in before or self._has_looked):
                self._changed_s[island] = now_s
        self._has_looked = True

    def _unknown(self) -> list[str]:
        known = self.reader.view.state.members.known
        return [name for name in known if self.standing(name) == SEEN]


class WholeReads:
    """Reads an object whole if its store fails to read a part. Implements `Store`.

    `Probed` finds that out by putting an object; an observer may not be allowed to.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._has_ranges = store.traits.has_ranges

    @property
    def traits(self) -> StoreTraits:
        return StoreTraits(
            has_put_new=self._store.traits.has_put_new, has_ranges=self._has_ranges
        )

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        if self._has_ranges and not (first == 0 and size is None):
            try:
                return self._store.get(key, first, size)
            except Unreachable:
                whole = self._store.get(key)  # if that fails, too, it is not the range
                self._has_ranges = False
        else:
            whole = self._store.get(key)
        return whole[first : None if size is None else first + size]

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        return self._store.put_new(key, parts)

    def put(self, key: str, parts: Sequence[Data]) -> None:
        self._store.put(key, parts)

    def items(self, prefix: str) -> list[Item]:
        return self._store.items(prefix)

    def remove(self, keys: Iterable[str]) -> None:
        self._store.remove(keys)


WATCH_S = 1.5 * BEAT_S
"""So long one look may take: every island that beats as usual is seen to live."""

VERDICT_ROUNDS = 8
"""Of so many rounds, at least, it is told whose updates counted."""

MAX_READS = 256
RECENT = 50
NEVER_S = float("-inf")

Rosters = dict[tuple[int, int], RosterDocument]
"""By fragment and round."""


class StatusView:
    """Makes the status document of a run that is observed."""

    def __init__(self, observing: Observing) -> None:
        self._observing = observing
        self._known = self._rosters()
        self._older = _older_rosters(observing)
        self._closed: list[dict[str, Any]] = []

    def document(self) -> dict[str, Any]:
        """Return where the run is now, by what was looked at last."""
        observing, view = self._observing, self._observing.reader.view
        self._note_closed()
        state = _as_known(observing)
        said = status_of(
            state,
            observing.now_s,
            stats={
                name: each.beat.stats
                for name, each in view.documents.items()
                if each.beat.stats is not None
            },
            verdicts=_verdicts(self._older | self._known),
        )
        said |= {
            "version": __version__,
            "listening": observing.url,
            "started_unix_s": None,
            "now_unix_s": time.time(),
            "watched_s": observing.watched_s,
            "recent": self._closed[-RECENT:],
            "damage": _damage(view),
            "bytes_in": None,
            "bytes_out": None,
        }
        said["islands"] = [self._row(each) for each in said["islands"]]
        said["waits_for"] = [each | {"late_in_s": None} for each in said["waits_for"]]
        said |= _reasons(observing, state, said)
        return _with_url(said, observing.url)

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        island = row["island"]
        unchanged_s = self._observing.unchanged_s(island)
        left_s = self._observing.reader.view.lease_s - unchanged_s
        steps, sync = row["inner_steps"], self._observing.reader.view.settings.sync
        stats = self._observing.reader.view.documents[island].beat.stats
        seconds = stats.seconds if stats else 0.0
        return row | {
            "state": self._observing.standing(island),
            "pace_s": seconds / steps * sync.sync_every if steps else None,
            "seen_s": unchanged_s,
            "lease_s": max(0.0, left_s),
        }

    def _rosters(self) -> Rosters:
        return dict(self._observing.reader.view.rosters)

    def _note_closed(self) -> None:
        """Take note of rounds that were closed while this observer was here."""
        found = self._rosters()
        for at in sorted(found.keys() - self._known.keys()):
            self._closed.append(_closing(found[at]))
        self._known = found


def _closing(document: RosterDocument) -> dict[str, Any]:
    count = Counter(entry.verdict for entry in document.roster.entries)
    return {
        "fragment": document.fragment,
        "round": document.round,
        "counted": count[Verdict.COUNTED],
        "late": count[Verdict.LATE],
        "refused": count[Verdict.REFUSED],
        "seconds": None,
        "bytes": None,
        "committed_unix_s": time.time(),
    }


def _as_known(observing: Observing) -> CoordinatorState:
    """Return what is known of the run with leases as this observer has seen them."""
    state = observing.reader.view.state
    members = {
        name: changed(
            member,
            lease_until_s=observing.now_s + 1.0
            if observing.standing(name) == LIVE
            else NEVER_S,
        )
        for name, member in state.members.known.items()
    }
    return changed(state, members=Members(members))


def _older_rosters(observing: Observing) -> Rosters:
    """Return some rosters from before the last states: they are kept for good."""
    view = observing.reader.view
    rounds = view.state.rounds
    each = min(VERDICT_ROUNDS, MAX_READS // max(1, len(rounds)))
    wanted = [
        (round.fragment, number)
        for round in rounds
        for number in range(max(1, round.number - each), round.number)
        if (round.fragment, number) not in view.rosters
    ]
    return dict(zip(wanted, observing.read_rosters(wanted), strict=True))


def _verdicts(rosters: Rosters) -> Mapping[str, Mapping[str, Any]]:
    """Return what became of each island's updates in the rounds that were read."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for _, document in sorted(rosters.items(), key=lambda each: each[0][1]):
        for entry in document.roster.entries:
            noted, word = found[entry.island], entry.verdict.name.lower()
            noted[word] = noted.get(word, 0) + 1
            noted["last"] = word
            if entry.verdict is Verdict.REFUSED:
                noted["because"] = entry.reason
    return found


def _damage(view: RunView) -> list[str]:
    """Return the objects that islands cannot verify, by their own documents."""
    return sorted(
        {
            f"{keys.update(want.fragment, want.round, want.island, want.incarnation)} "
            f"is gone or damaged: {name} waits for another copy"
            for name, document in view.documents.items()
            if not document.has_left
            for want in document.wants
        }
    )


def _reasons(
    observing: Observing, state: CoordinatorState, said: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the word for where the run is, and why, where a bucket has more to say."""
    view = observing.reader.view
    if view.moved_to is not None:
        return {"state": "moved", "why": f"The run goes on at {view.moved_to}."}
    seen = sorted(each["island"] for each in said["islands"] if each["state"] == SEEN)
    if said["state"] in ("training", "waiting") and _could_train(observing, state):
        return {"state": "unknown", "why": _unsure(observing, seen)}
    decider = view.settings.store.decider
    is_away = decider is not None and not any(
        each["island"] == decider and each["state"] in (LIVE, SEEN)
        for each in said["islands"]
    )
    if said["state"] in ("founding", "training", "waiting") and is_away:
        return {"why": f"Waits for {decider}, which alone decides in this run."}
    return {}


def _could_train(observing: Observing, state: CoordinatorState) -> bool:
    """Return whether the run goes on if those who were only seen are live."""
    if run_state(state, observing.now_s) == "training":
        return False
    present = {
        name: changed(member, lease_until_s=observing.now_s + 1.0)
        if observing.standing(name) in (LIVE, SEEN)
        else member
        for name, member in state.members.known.items()
    }
    hopeful = changed(state, members=Members(present))
    return run_state(hopeful, observing.now_s) == "training"


def _unsure(observing: Observing, seen: list[str]) -> str:
    few = ", ".join(seen[:8]) + (", ..." if len(seen) > 8 else "")
    lease_s = observing.reader.view.lease_s
    return (
        f"Nothing has come from {few} for {observing.watched_s:.0f} s. Whether they "
        f"are live is known after {lease_s:.0f} s: look with --watch."
    )


def _with_url(said: dict[str, Any], url: str) -> dict[str, Any]:
    """Return the document with commands that work wherever the store can be reached."""
    named = f"atoll control {shlex.quote(said['name'])}"
    for key in ("why", "cure"):
        if said[key]:
            said[key] = said[key].replace(named, f"atoll control {shlex.quote(url)}")
    return said
