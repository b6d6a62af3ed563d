"""A run in a store: an observer, the status document, commands and weights.

Rule 1: an observer puts nothing into the store: permission to read is enough. Only
        a command and the checks write.
Rule 2: an observer cannot know at its start which islands are live. A member is live
        once the observer has seen its document change, and silent if the document has
        not changed for a lease; until then it is only seen.
Rule 3: a store has no clock, so times in the status count from the observer's start,
        `watched_s` ago.
Rule 4: a command is a control document at the next free number. If two operators write
        at the same time, one of them gets the number; the other reads that document,
        checks its command again, and tries the next number.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, TypeVar

from atoll import __version__
from atoll import store as stores
from atoll.coordinator.anchor_file import FilePlan, listed_rounds
from atoll.coordinator.live_status import agreement_of
from atoll.coordinator.rows import (
    LedgerTable,
    ListedRoster,
    require_ledger,
)
from atoll.coordinator.status import run_state, status_of
from atoll.errors import NoSuchObject, Refused, Unreachable, UsageError
from atoll.exchange.base import verified
from atoll.exchange.bucket import BucketReader, documents, keys
from atoll.exchange.bucket.create import require_there
from atoll.exchange.bucket.documents import (
    ControlDocument,
    RosterDocument,
    Want,
    packed,
)
from atoll.exchange.bucket.keys import UpdateKey
from atoll.exchange.bucket.large_objects import ConstantObjects
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.states import BucketHistory, States
from atoll.exchange.bucket.view import BEAT_S, RunView
from atoll.protocol.coordinator import advance
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.events import MemberSeen, SettingsChanged
from atoll.protocol.membership import Member
from atoll.protocol.operators import (
    END_TOKENS,
    is_to_end,
    last_by_tokens,
    set_values,
)
from atoll.run_client import base
from atoll.run_client.store_past import StorePast, verdicts_of, with_store_past
from atoll.runtime import Clock, SystemRuntime
from atoll.settings import RunSettings
from atoll.telemetry import Event, EventPage, findings
from atoll.telemetry.event_files import MAX_PAGE, EventFilter
from atoll.weights import FragmentState
from atoll.wire import Verdict

T = TypeVar("T")

LOOK_S = 1.0
"""Between two reads of documents that may change."""

HAS_LEFT, LIVE, SILENT, SEEN = "left", "live", "silent", "seen"


class StoreObserver:
    """Reads the run at a URL. Close it, or use it in a `with` block.

    Raises:
        UsageError: there is no run, and the command that makes one is named.
        CorruptError: its settings are not those that it was made with.
        StoreDenied: a permission is missing.
        Unreachable: the store does not answer.
    """

    def __init__(
        self, url: str, *, clock: Clock | None = None, store: stores.Store | None = None
    ) -> None:
        require_there(url)
        self.url = url
        self._runtime = SystemRuntime(clock)
        try:
            self.store = stores.RetryingStore(
                WholeReadStore(store or stores.open_store(url)),
                sleep=self._runtime.sleep,
            )
            self.reader = BucketReader.open(self.store, self._runtime, url=url)
            self.outcomes = Outcomes(self.reader, None)
            self.states = States(self.reader, self.outcomes)
            self._begun_s = self._runtime.now_s()
            self._changed_s: dict[str, float] = {}
            self._has_looked = self._has_begun = False
            self.look()
        except BaseException:
            self._runtime.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop its threads. Safe to repeat."""
        self._runtime.close()

    @property
    def watched_s(self) -> float:
        """Seconds since this observer started."""
        return self._runtime.now_s() - self._begun_s

    @property
    def now_s(self) -> float:
        return self._runtime.now_s()

    def look(self) -> None:
        """Read the new control documents, members, rosters and open rounds."""
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
        if self.reader.rows is not None:
            self.reader.rows.read()

    def watch(self, seconds: float) -> None:
        """Read members until each is known to be live or silent, or time is up.

        Then read everything once more.
        """
        until_s = self._runtime.now_s() + seconds
        while self._unconfirmed() and self._runtime.now_s() < until_s:
            self._runtime.sleep(min(LOOK_S, max(0.0, until_s - self._runtime.now_s())))
            self._look_members()
        self.look()

    def read_rosters(self, wanted: Sequence[tuple[int, int]]) -> list[RosterDocument]:
        """Return the rosters of closed rounds, without those from before a move."""
        reads = [partial(self._find_roster, *key) for key in wanted]
        rosters = self.gather(reads)
        return [roster for roster in rosters if roster is not None]

    def gather(self, reads: Sequence[Callable[[], T]]) -> list[T]:
        """Return the results of some reads, several at the same time."""
        return self._runtime.gather(reads) if reads else []

    def _find_roster(self, fragment: int, round: int) -> RosterDocument | None:
        with suppress(NoSuchObject):
            return self.reader.roster(fragment, round)
        return None

    def pause(self, seconds: float) -> None:
        """Sleep by the observer's clock."""
        self._runtime.sleep(seconds)

    def presence(self, island: str) -> str:
        """Return whether an island has left, is live, is silent, or was only seen."""
        member = self.reader.view.state.members.known[island]
        if member.has_left:
            return HAS_LEFT
        if self.unchanged_s(island) > self.reader.view.lease_s:
            return SILENT
        return LIVE if island in self._changed_s else SEEN

    def unchanged_s(self, island: str) -> float:
        """Return how long this observer has seen no change of an island's document."""
        return self._runtime.now_s() - self._changed_s.get(island, self._begun_s)

    def _look_members(self) -> None:
        before = dict(self.reader.view.documents)
        self.reader.members.read()
        now_s = self._runtime.now_s()
        for island, document in self.reader.view.documents.items():
            # An island that joins after the first read is live as well.
            is_news = before.get(island) != document
            if is_news and (island in before or self._has_looked):
                self._changed_s[island] = now_s
        self._has_looked = True

    def _unconfirmed(self) -> list[str]:
        members = self.reader.view.state.members.known
        return [name for name in members if self.presence(name) == SEEN]


class WholeReadStore:
    """Reads whole objects if its store cannot read ranges. Implements `Store`.

    `ProbedStore` detects that by putting an object, which an observer may not.
    """

    def __init__(self, store: stores.Store) -> None:
        self._store = store
        self._has_ranges = store.traits.has_ranges

    @property
    def traits(self) -> stores.StoreTraits:
        return stores.StoreTraits(
            has_put_new=self._store.traits.has_put_new, has_ranges=self._has_ranges
        )

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        if self._has_ranges and not (first == 0 and size is None):
            try:
                return self._store.get(key, first, size)
            except Unreachable:
                data = self._store.get(
                    key
                )  # if this fails too, ranges are not at fault
                self._has_ranges = False
        else:
            data = self._store.get(key)
        return data[first : None if size is None else first + size]

    def put_new(self, key: str, parts: Sequence[stores.Data]) -> bool:
        return self._store.put_new(key, parts)

    def put(self, key: str, parts: Sequence[stores.Data]) -> None:
        self._store.put(key, parts)

    def items(self, prefix: str) -> list[stores.Item]:
        return self._store.items(prefix)

    def remove(self, keys: Iterable[str]) -> None:
        self._store.remove(keys)


WATCH_S = 1.5 * BEAT_S
"""How long one status may take: long enough to see a heartbeat of every live island."""

VERDICT_ROUNDS = 8
"""Rounds whose verdicts are counted, if the store has as many."""

MAX_READS = 256
MAX_RECENT = 50
NEVER_S = float("-inf")

Rosters = dict[tuple[int, int], RosterDocument]
"""By fragment and round."""


class StatusView:
    """Makes the status document of an observed run."""

    def __init__(self, observer: StoreObserver) -> None:
        self._observer = observer
        self._seen_rosters = self._rosters()
        self._older = _older_rosters(observer)
        self._closed: list[dict[str, Any]] = []
        self.past = StorePast(observer)

    def document(self) -> dict[str, Any]:
        """Return the status as of the observer's last read."""
        observer, view = self._observer, self._observer.reader.view
        self._note_closed()
        state = _observed_state(observer)
        status = status_of(
            state,
            observer.now_s,
            stats={
                name: document.beat.stats
                for name, document in view.documents.items()
                if document.beat.stats is not None
            },
            verdicts=verdicts_of(self._older | self._seen_rosters),
        )
        status |= {
            "version": __version__,
            "listening": observer.url,
            "started_unix_s": None,
            "now_unix_s": time.time(),
            "watched_s": observer.watched_s,
            "recent": self._closed[-MAX_RECENT:],
            "damage": _damage(view),
            "bytes_in": None,
            "bytes_out": None,
        }
        status["islands"] = [self._row(row) for row in status["islands"]]
        status["waits_for"] = [row | {"late_in_s": None} for row in status["waits_for"]]
        status |= _reasons(observer, state, status)
        now_unix_s = status["now_unix_s"]
        status["agreement"] = agreement_of(state, observer.now_s)
        past = self.past.past
        status = with_store_past(status, past, now_unix_s=now_unix_s)
        present = findings(status, past, now_unix_s=now_unix_s)
        status["findings"] = [finding.as_dict() for finding in present]
        return _with_url(status, observer.url)

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        island = row["island"]
        unchanged_s = self._observer.unchanged_s(island)
        left_s = self._observer.reader.view.lease_s - unchanged_s
        steps = row["inner_steps"]
        stats = self._observer.reader.view.documents[island].beat.stats
        seconds = stats.seconds if stats else 0.0
        return row | {
            "state": self._observer.presence(island),
            "pace_s": seconds / steps * row["window"] if steps else None,
            "seen_s": unchanged_s,
            "lease_s": max(0.0, left_s),
        }

    def _rosters(self) -> Rosters:
        return dict(self._observer.reader.view.rosters)

    def _note_closed(self) -> None:
        """Note the rounds that closed since the observer started."""
        rosters = self._rosters()
        for key in sorted(rosters.keys() - self._seen_rosters.keys()):
            self._closed.append(_closed_round(rosters[key]))
        self._seen_rosters = rosters


def _closed_round(document: RosterDocument) -> dict[str, Any]:
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


def _observed_state(observer: StoreObserver) -> CoordinatorState:
    """Return the run's state, with leases by this observer's own clock."""
    state = observer.reader.view.state
    for name, member in state.members.known.items():
        is_live = observer.presence(name) == LIVE
        until_s = observer.now_s + 1.0 if is_live else NEVER_S
        state = _with_lease(state, member, until_s, now_s=observer.now_s)
    return state


def _with_lease(
    state: CoordinatorState, member: Member, until_s: float, *, now_s: float
) -> CoordinatorState:
    seen = MemberSeen(replace(member, lease_until_s=until_s))
    return advance(state, seen, now_s)[0]


def _older_rosters(observer: StoreObserver) -> Rosters:
    """Return some rosters of earlier rounds, which a store keeps permanently."""
    view = observer.reader.view
    rounds = view.state.rounds
    num_rounds = min(VERDICT_ROUNDS, MAX_READS // max(1, len(rounds)))
    wanted = [
        (round.fragment, number)
        for round in rounds
        for number in range(max(1, round.number - num_rounds), round.number)
        if (round.fragment, number) not in view.rosters
    ]
    return {
        (roster.fragment, roster.round): roster
        for roster in observer.read_rosters(wanted)
    }


def _damage(view: RunView) -> list[str]:
    """Return the objects that islands cannot verify, as their documents report."""
    return sorted(
        {
            f"{_key_of_want(view, want)} is gone or damaged: {name} waits for another "
            "copy"
            for name, document in view.documents.items()
            if not document.has_left
            for want in document.wants
        }
    )


def _key_of_want(view: RunView, want: Want) -> str:
    update = UpdateKey.of(want.label, want.island, want.incarnation)
    return view.key_of(want.fragment, update)


def _reasons(
    observer: StoreObserver, state: CoordinatorState, status: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the `state` and `why` that only a run in a store has, if any."""
    view = observer.reader.view
    if view.moved_to is not None:
        return {"state": "moved", "why": f"The run continues at {view.moved_to}."}
    seen = sorted(row["island"] for row in status["islands"] if row["state"] == SEEN)
    if status["state"] in ("training", "waiting") and _could_train(observer, state):
        return {"state": "unknown", "why": _uncertainty(observer, seen)}
    decider = view.settings.store.decider
    is_away = decider is not None and not any(
        row["island"] == decider and row["state"] in (LIVE, SEEN)
        for row in status["islands"]
    )
    if status["state"] in ("founding", "training", "waiting") and is_away:
        return {"why": f"Waits for {decider}, which alone decides in this run."}
    return {}


def _could_train(observer: StoreObserver, state: CoordinatorState) -> bool:
    """Return whether the run would train if the islands that were seen are live."""
    if run_state(state, observer.now_s) == "training":
        return False
    hopeful, now_s = state, observer.now_s
    for name, member in state.members.known.items():
        if observer.presence(name) in (LIVE, SEEN):
            hopeful = _with_lease(hopeful, member, now_s + 1.0, now_s=now_s)
    return run_state(hopeful, now_s) == "training"


def _uncertainty(observer: StoreObserver, seen: list[str]) -> str:
    few = ", ".join(seen[:8]) + (", ..." if len(seen) > 8 else "")
    lease_s = observer.reader.view.lease_s
    return (
        f"Nothing has come from {few} for {observer.watched_s:.0f} s. Whether they "
        f"are live is known after {lease_s:.0f} s: look with --watch."
    )


def _with_url(status: dict[str, Any], url: str) -> dict[str, Any]:
    """Return the status with commands that name the store's URL."""
    named = f"atoll control {shlex.quote(status['name'])}"
    for key in ("why", "cure"):
        if status[key]:
            status[key] = status[key].replace(
                named, f"atoll control {shlex.quote(url)}"
            )
    return status


TRIES = 64
"""Attempts to get a number that no other operator takes."""


def write_control(
    observer: StoreObserver, command: base.Command
) -> tuple[int, ControlDocument]:
    """Write an operator's command as a control document; return it with its number.

    A limit of tokens that have already counted ends the run immediately, by a second
    document.

    Raises:
        UsageError: no island has that name, or a value cannot be set.
        Refused: the run has moved, or other operators took every number tried.
        StoreDenied: writing is not allowed.
    """
    for _ in range(TRIES):
        observer.look()
        _require_here(observer)
        document = _control_document(observer, command)
        number = len(observer.reader.view.controls) + 1
        key = keys.control(number)
        if observer.store.put_new(key, packed(documents.CONTROL, document, key)):
            observer.look()
            if document not in observer.reader.view.in_force:
                _require_here(observer)  # a move began right before it
            if END_TOKENS in document.values and _has_counted_enough(observer):
                write_control(observer, base.Command(base.Action.STOP))
            return number, document
    raise Refused(f"{TRIES} other commands were written meanwhile. Try again.")


def _has_counted_enough(observer: StoreObserver) -> bool:
    """Return whether the run is to end with its open rounds, by its tokens."""
    state = observer.reader.view.state
    if state.settings.sync.is_async:
        return is_to_end(state)
    return last_by_tokens(state) is not None


def _require_here(observer: StoreObserver) -> None:
    move = observer.reader.view.state.move
    if move is not None:
        raise Refused(
            f"The run {'has moved' if move.is_over else 'is moving'} to "
            f"{move.target}. Control it there."
        )


def _control_document(
    observer: StoreObserver, command: base.Command
) -> ControlDocument:
    document = ControlDocument(
        run=observer.reader.run, action=command.action.value, values={}
    )
    state = observer.reader.view.state
    match command.action:
        case base.Action.SET:
            # Raises if a value cannot be set.
            set_values(state, SettingsChanged(command.values), 0.0)
            return replace(document, values=command.values)
        case base.Action.STOP | base.Action.DRAIN:
            if state.settings.sync.is_async and state.has_started:
                last_rounds = state.last_rounds or observer.reader.last_rounds()
                return replace(document, action="stop", last_rounds=last_rounds)
            # Live islands can close rounds up to this one, so no update is left over.
            last = observer.reader.furthest_round()
            return replace(document, action="stop", last_round=last)
        case base.Action.EVICT:
            members, island = state.members.known, str(command.island)
            if island not in members:
                names = ", ".join(sorted(members)) or "none"
                raise UsageError(f"No island is called {island!r}. Known are: {names}.")
            incarnation = members[island].incarnation
            return replace(document, island=island, incarnation=incarnation)
    return document


def write_anchor(
    observer: StoreObserver,
    file: Path,
    *,
    round: int | None,
    progress: base.Progress | None,
) -> int:
    """Write the newest anchor, or that of a round, into a file; return its size.

    Holds one fragment in memory at a time.

    Raises:
        Refused: the run has no weights yet, or the round is not kept.
        CorruptError: an object does not verify.
    """
    founded, layout = observer.reader.founded, observer.reader.view.layout
    if founded is None:
        raise Refused(
            "The run has no weights yet: its first island brings them. Repeat when "
            "one has joined."
        )
    read = _fragment_reader(observer, round)
    plan = FilePlan.of(
        founded.run,
        founded.model,
        fragments=len(layout),
        kept_constants=founded.constants,
    )
    objects = ConstantObjects(observer.reader.store, founded)
    with file.open("wb") as opened:
        handle, rounds = opened.fileno(), []
        for index, fragment in enumerate(layout):
            state = read(index)
            plan.write(handle, fragment, state.anchor, 0)
            rounds.append(state.round)
            if progress is not None:
                progress(index + 1, len(layout))
        for constant in plan.constants:
            offset = plan.head_bytes + plan.offsets[constant.name][0]
            for part in verified(constant, objects.parts(constant)):
                offset += os.pwrite(handle, part, offset)
        os.truncate(handle, plan.size_bytes)
        os.pwrite(handle, plan.head(rounds), 0)
    return plan.size_bytes


def _fragment_reader(
    observer: StoreObserver, round: int | None
) -> Callable[[int], FragmentState]:
    if round is None:
        return observer.states.read
    past = BucketHistory(observer.reader, observer.outcomes)
    rounds = past.rounds()
    if round not in rounds:
        raise Refused(
            f"The anchor of round {round} is not kept: {listed_rounds(rounds)} are "
            "available. Leave the round out to export the newest of each fragment."
        )
    return lambda fragment: past.state(fragment, round)


APPLIED = "Islands read it with their next heartbeat."


class StoreRunClient:
    """A run in a store. Implements `RunClient`.

    Users with write access are operators.
    """

    poll_s = 6.0

    def __init__(self, url: str) -> None:
        self.url = url

    def close(self) -> None:
        """Close the connection. Safe to repeat."""
        if "_observer" in self.__dict__:
            self._observer.close()

    @cached_property
    def _observer(self) -> StoreObserver:
        return StoreObserver(self.url)

    @cached_property
    def _view(self) -> StatusView:
        return StatusView(self._observer)

    def status(self, *, watch: bool = False) -> base.RunStatus:
        """Return the status; which islands are live is known by watching them."""
        view = self._view  # it counts the rounds that close after it was made
        self._observer.watch(WATCH_S if watch else 0.0)
        return base.RunStatus.of(view.document())

    def settings(self) -> RunSettings:
        """Return the settings in force."""
        self._observer.look()
        return self._observer.reader.view.settings

    def events(
        self, *, after: Event | None = None, is_waiting: bool = False
    ) -> list[Event]:
        """Return the events that the islands' pasts and the rosters tell.

        They come every ten rounds, and not in order: none can be waited for.
        """
        if is_waiting or after is not None:
            raise base.needs_coordinator(self.url)
        return self._look().events[-MAX_PAGE:]

    def older_events(
        self, before: str = "", *, limit: int = 200, kind: str = "", island: str = ""
    ) -> EventPage:
        """Return a page of those events."""
        only = EventFilter(kind=kind, island=island)
        return self._look().page(before, limit=limit, only=only)

    def history(self, **query: str | int) -> dict[str, Any]:
        """Return the past that the islands' pasts and the rosters tell."""
        return self._look().history(query)

    def _look(self) -> StorePast:
        past = self._view.past
        self._observer.look()
        return past

    def control(self, command: base.Command) -> base.ControlReply:
        """Write a control document."""
        number, document = write_control(self._observer, command)
        message = f"{document.action} is control/{number}. {APPLIED}"
        if document.last_round is not None:
            message = f"{message} Round {document.last_round} is the last."
        if document.last_rounds is not None:
            message = f"{message} The open round of each fragment is its last."
        status = self._view.document() | {"said": message}
        return base.ControlReply(message, base.RunStatus.of(status))

    def export(
        self,
        file: Path,
        *,
        round: int | None = None,
        progress: base.Progress | None = None,
    ) -> base.ExportedWeights:
        """Write the weights from the objects of the store."""
        self._observer.reader.read_controls()
        moved_to = self._observer.reader.view.moved_to
        size = write_anchor(self._observer, file, round=round, progress=progress)
        return replace(base.ExportedWeights.of_file(file, size), moved_to=moved_to)

    def export_ledger(self, file: Path) -> int:
        """Write the ledger from the claims and rosters of the store."""
        self._observer.look()
        state = self._observer.reader.view.state
        table = LedgerTable(require_ledger(state.ledger))
        with file.open("wb") as opened:
            return sum(map(opened.write, table.lines(self._listed_rosters())))

    def _listed_rosters(self) -> Iterator[ListedRoster]:
        for round in self._observer.reader.view.state.rounds:
            for first in range(1, round.number, MAX_READS):
                numbers = range(first, min(first + MAX_READS, round.number))
                keys = [(round.fragment, number) for number in numbers]
                for document in self._observer.read_rosters(keys):
                    yield document.fragment, document.round, document.roster

    def checks(self) -> Iterator[base.Check]:
        """Check every permission separately, to name the one that is missing."""
        from atoll.run_client.checks import StoreCheck  # it needs this module

        return StoreCheck(self.url).checks()
