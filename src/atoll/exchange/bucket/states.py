"""Anchor and velocity of fragments in a bucket, for latecomers and for export.

An old anchor is computed from a kept state and the updates of the rounds after it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from atoll.errors import CorruptError, NoSuchObject, Refused, StoreDenied
from atoll.exchange.base import Frame
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import (
    RESTORE,
    CountedProgress,
    RosterHead,
    StateDocument,
    packed,
)
from atoll.exchange.bucket.large_objects import StateObjects, anonymous, put_parts
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.reader import BucketReader
from atoll.protocol import HeldRound
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.observer import UNKNOWN_BASE
from atoll.protocol.rounds import KNOWN_BASES, ListedUpdate
from atoll.weights import FragmentState
from atoll.wire import Header, pack, verify_body

STATE_ROUNDS = 10
"""Rounds between two states: a latecomer applies about this many means."""

KEPT_STATES = 2
"""A reader that has listed the older state may still be reading it."""


class States:
    """Reads and writes the states of a run."""

    def __init__(
        self,
        reader: BucketReader,
        outcomes: Outcomes,
        *,
        every_rounds: int = STATE_ROUNDS,
    ) -> None:
        self._reader, self._outcomes = reader, outcomes
        self._every_rounds = every_rounds
        self._store, self._runtime = reader.store, reader.runtime
        self._objects = StateObjects(reader)
        self._written: dict[int, int] = {}
        """The last round whose state is known to be complete, by fragment."""

    def begin(self, fragment: int) -> None:
        """Bring a new reader to the open round of a fragment."""
        latest = self._latest(fragment)
        if latest is not None:
            head = self._head_after(latest)
            with self._reader.lock:
                self._reader.view.begin_after(
                    fragment,
                    latest.round,
                    latest.counted,
                    latest.bases,
                    self._runtime.now_s(),
                    head=head,
                    listed=_listed_in(latest),
                )
            self._settle_end(fragment, latest.round)
        self._reader.read_rosters(fragment)

    def _settle_end(self, fragment: int, round: int) -> None:
        """Read the roster of a state's round, if that may be the last of a fragment."""
        view = self._reader.view
        if view.is_async and view.state.last_of(fragment) == round:
            roster = self._reader.roster(fragment, round)
            with self._reader.lock:
                view.settle_end(roster, self._runtime.now_s())

    def _head_after(self, document: StateDocument) -> RosterHead:
        """Return the head that the roster after a state follows."""
        first = self._reader.founding_head
        if document.roster:
            return replace(first, round=document.round, digest=document.roster)
        try:  # of 0.1.0, which did not name it
            roster = self._reader.roster(document.fragment, document.round)
        except NoSuchObject:
            return replace(first, round=document.round)
        return RosterHead(
            round=roster.round,
            digest=roster.digest,
            is_chained=bool(roster.before),
        )

    def read(self, fragment: int) -> FragmentState:
        """Return the state after the last closed round.

        Raises:
            CorruptError: a round is gone that no state has.
        """
        begun_at = -1
        while True:
            state = self._stored(fragment)
            if state.round <= begun_at:
                raise self._outcomes.unmade(fragment, begun_at + 1)
            self._reader.read_rosters(fragment)
            if self._bring_up(fragment, state):
                return state
            begun_at = state.round

    def take_base(self, fragment: int) -> None:
        """Learn the base of a round that is due and that no island has closed yet."""
        with self._reader.lock:
            view, now_s = self._reader.view, self._runtime.now_s()
            round = view.state.rounds[fragment]
            can_close = round.can_close(view.state.members, view.settings, now_s)
            if round.base != UNKNOWN_BASE or not can_close:
                return
        state = self.read(fragment)
        with self._reader.lock:
            base = HeldRound(state.round, state.digest)
            self._reader.base_view.note_held(fragment, base, self._runtime.now_s())

    def _bring_up(self, fragment: int, state: FragmentState) -> bool:
        """Apply the rounds after a state; False: some are gone, begin again."""
        while state.round + 1 < self._reader.view.number(fragment):
            agreed = self._outcomes.frame(fragment, state.round + 1)
            if not agreed.header.is_sealed:
                return False
            verify_body(agreed.header, agreed.body)
            state.apply(agreed.header, agreed.body)
        return True

    def _stored(self, fragment: int) -> FragmentState:
        """Return the latest state that can be read, or the first weights."""
        for document in self._objects.complete(fragment):
            name = self._objects.name(fragment, document.round, document.parts)
            try:
                header, body = self._objects.read(document)
                verify_body(header, body)
                self._require_base(header, document)
                return FragmentState.from_frame(header, body)
            except NoSuchObject as exc:  # collected since, or removed by a user
                self._reader.warn_once(f"{name} is ignored: {exc.key} is gone.")
            except (CorruptError, Refused) as exc:
                self._reader.warn_once(f"{name} is ignored: {exc}")
        return self._founded(fragment)

    def _founded(self, fragment: int) -> FragmentState:
        """Return the first weights of a fragment.

        Raises:
            CorruptError: they are gone, or the object is a foreign one.
        """
        try:
            header, body = self._objects.founding(fragment)
            verify_body(header, body)
        except NoSuchObject as exc:
            raise CorruptError(
                f"{exc.key}, the first weights of fragment {fragment}, is gone from "
                f"the bucket, and no state can be read. {RESTORE}"
            ) from exc
        except (CorruptError, Refused) as exc:
            raise CorruptError(
                f"{self._objects.founding_key(fragment)} does not hold the first "
                f"weights of fragment {fragment}, and no state can be read. {RESTORE} "
                f"({exc})"
            ) from exc
        return FragmentState.from_frame(header, body)

    def _require_base(self, header: Header, document: StateDocument) -> None:
        """Return unless the next round was started from another state than this."""
        with suppress(NoSuchObject):
            after = self._reader.roster(header.fragment, header.round + 1)
            if after.base != header.base:
                raise CorruptError(
                    f"it has digest {header.base.hex()}, and round {header.round + 1} "
                    f"started from {after.base.hex()}. The writer's copy was corrupt."
                )
            if after.before and document.roster and after.before != document.roster:
                raise CorruptError(
                    f"it follows the roster with digest {document.roster.hex()}, and "
                    f"round {header.round + 1} follows {after.before.hex()}."
                )

    def _latest(self, fragment: int) -> StateDocument | None:
        latest = next(self._objects.complete(fragment), None)
        if latest is not None:
            written = self._written.get(fragment, 0)
            self._written[fragment] = max(latest.round, written)
        return latest

    def is_due(self, fragment: int, island: str) -> bool:
        """Return whether it is this island's turn to write a state."""
        with self._reader.lock:
            view = self._reader.view
            behind = view.number(fragment) - 1 - self._written.get(fragment, 0)
            live = sorted(view.live(self._runtime.now_s()))
        turn = live.index(island) if island in live else len(live)
        due = self._every_rounds + turn
        if view.is_async:
            # A window of all islands has about as many rounds as there are islands.
            due = self._every_rounds * max(1, len(live)) + turn
        if behind < due:
            return False
        self._latest(fragment)  # another island may have written one since
        behind = view.number(fragment) - 1 - self._written.get(fragment, 0)
        return behind >= due

    def write(self, frame: Frame) -> None:
        """Put a state, part by part, and at last the document that completes it."""
        header = frame.header
        fragment, round = header.fragment, header.round
        with self._reader.lock:
            is_doubtful = self._reader.view.is_doubtful(fragment, round, header.base)
        if is_doubtful:
            self._reader.warn_once(
                f"The state of round {round} of fragment {fragment} is not written: "
                "other islands hold another one."
            )
            return
        parts = put_parts(self._store.put_new, self._runtime, frame)
        document = self._document(header, parts)
        complete = keys.state_complete(fragment, round)
        self._store.put_new(complete, packed(documents.STATE, document, complete))
        self._written[fragment] = max(round, self._written.get(fragment, 0))
        try:
            self.collect(fragment)
        except StoreDenied as exc:
            self._reader.warn_once(
                "Objects that only older rounds needed cannot be removed, and the "
                f"bucket grows: {exc}"
            )

    def _document(self, header: Header, parts: int) -> StateDocument:
        try:
            roster = self._reader.closed_roster(header.fragment, header.round).digest
        except NoSuchObject:  # from before the run was moved here
            roster = self._reader.founding_head.digest
        with self._reader.lock:
            state = self._reader.view.state
            counted = counted_progress(state, header.fragment)
            is_async = self._reader.view.is_async
            num_bases = KNOWN_BASES if is_async else BASES
            bases = state.rounds[header.fragment].bases[-num_bases:]
            listed = _listed_rows(state, header.fragment) if is_async else None
        return StateDocument(
            run=header.run,
            fragment=header.fragment,
            round=header.round,
            parts=parts,
            head=pack(anonymous(header)),
            counted=counted,
            bases=bases,
            roster=roster,
            listed=listed,
        )

    def collect(self, fragment: int) -> None:
        """Remove objects that no reader needs that begins at one of the last states.

        Rosters stay: they are the run's history, and each names the one before it. Any
        island may collect, also several at the same time: removing twice is harmless.
        """
        # Foreign objects may be listed, too: an open round has no state.
        last = self._reader.view.number(fragment) - 1
        rounds = sorted(
            filter(last.__ge__, self._objects.rounds(fragment)), reverse=True
        )
        if len(rounds) < KEPT_STATES:
            return
        # Rounds first: if this is interrupted, the older states show where to resume.
        before = rounds[KEPT_STATES] if len(rounds) > KEPT_STATES else 0
        closed = range(before + 1, rounds[KEPT_STATES - 1] + 1)
        if self._reader.view.is_async:
            self._collect_arrivals(fragment, closed)
        else:
            for round in closed:
                prefix = keys.round_prefix(fragment, round)
                self._remove(prefix, retained=keys.roster(fragment, round))
        begun = self._objects.rounds(fragment, is_complete=False)
        for old in sorted(filter(rounds[KEPT_STATES - 1].__gt__, begun)):
            prefix = f"{keys.states(fragment)}{old}/"
            self._remove(prefix, first=keys.state_complete(fragment, old))

    def _collect_arrivals(self, fragment: int, rounds: range) -> None:
        """Remove the updates that the rosters of rounds list, and the rounds' means.

        And those before them: what no roster lists stands, however old it is.
        """
        reads = [partial(self._reader.closed_roster, fragment, n) for n in rounds]
        over: list[str] = []
        latest: dict[str, tuple[int, int]] = {}
        for document in self._runtime.gather(reads):
            shards = range(max(1, len(document.shards)))
            over += [keys.mean(fragment, document.round, shard) for shard in shards]
            for entry in document.roster.entries:
                label = document.round - entry.age
                latest[keys.slug(entry.island)] = entry.incarnation, label
        for key in self._reader.list_keys(keys.arrivals(fragment)):
            update = keys.arrival_of(key)
            listed = latest.get(update.publisher.slug) if update else None
            if update is None or listed is None:
                continue
            if (update.publisher.incarnation, update.round) <= listed:
                over.append(key)
        self._store.remove(over)

    def _remove(self, prefix: str, *, first: str = "", retained: str = "") -> None:
        listed = [item.key for item in self._store.items(prefix)]
        if first in listed:
            self._store.remove([first])
        self._store.remove([key for key in listed if key not in (first, retained)])


class BucketHistory:
    """Reads the anchors of a run after earlier rounds."""

    def __init__(self, reader: BucketReader, outcomes: Outcomes) -> None:
        self._reader, self._outcomes = reader, outcomes
        self._store, self._objects = reader.store, StateObjects(reader)

    def rounds(self) -> list[int]:
        """Return the rounds whose anchor is available for every fragment."""
        fragments = range(len(self._reader.view.layout))
        rounds = [set(self._rounds(fragment)) for fragment in fragments]
        return sorted(set[int].intersection(*rounds)) if rounds else []

    def state(self, fragment: int, round: int) -> FragmentState:
        """Return a fragment's state after a round.

        A state that does not verify is ignored: an older one may lead to the round.

        Raises:
            Refused: the states or means before the round were removed.
            CorruptError: none that remains leads to the round, and some are damaged.
        """
        begins = {0, *filter(round.__ge__, self._objects.rounds(fragment))}
        damage: CorruptError | None = None
        refusal: Refused | None = None
        for begin in sorted(begins, reverse=True):
            try:
                return self._brought_up(self._stored(fragment, begin), fragment, round)
            except CorruptError as exc:
                self._reader.warn_once(
                    f"The anchor of round {round} of fragment {fragment} is not made "
                    f"from round {begin}: {exc}"
                )
                damage = damage or exc
            except Refused as exc:
                refusal = refusal or exc
        error = damage or refusal
        assert error is not None
        raise error

    def _brought_up(
        self, state: FragmentState, fragment: int, round: int
    ) -> FragmentState:
        """Return a state after the rounds up to another one."""
        while state.round < round:
            agreed = self._outcomes.frame(fragment, state.round + 1)
            if not agreed.header.is_sealed:
                if self._outcomes.is_damaged(fragment, state.round + 1):
                    raise self._outcomes.unmade(fragment, state.round + 1)
                raise Refused(
                    f"Round {state.round + 1} of fragment {fragment} has been removed "
                    f"meanwhile, and round {round} is no longer available. Take a "
                    "later one."
                )
            verify_body(agreed.header, agreed.body)
            state.apply(agreed.header, agreed.body)
        return state

    def _rounds(self, fragment: int) -> list[int]:
        """Return rounds from the older kept state on; the first weights stay, too.

        A run that was moved here after its first round has not brought them.
        """
        states, number = (
            sorted(self._objects.rounds(fragment)),
            self._reader.view.number(fragment),
        )
        begin = states[-KEPT_STATES] if len(states) >= KEPT_STATES else 0
        if states and not self._has_founding(fragment):
            return list(range(max(begin, states[0]), number))
        return [0, *range(max(begin, 1), number)]

    def _has_founding(self, fragment: int) -> bool:
        founded = self._reader.founded
        assert founded is not None
        try:
            self._store.get(keys.founding(founded.founding, fragment), 0, 1)
        except NoSuchObject:
            return False
        return True

    def _stored(self, fragment: int, round: int) -> FragmentState:
        try:
            header, body = self._read(fragment, round)
            verify_body(header, body)
        except NoSuchObject as exc:
            raise Refused(
                f"The state of round {round} of fragment {fragment} has been removed "
                "meanwhile. Ask again: there is a later one."
            ) from exc
        except CorruptError as exc:
            raise CorruptError(
                f"{self._objects.name(fragment, round)} cannot be read: {exc} {RESTORE}"
            ) from exc
        return FragmentState.from_frame(header, body)

    def _read(self, fragment: int, round: int) -> tuple[Header, np.ndarray]:
        if not round:
            return self._objects.founding(fragment)
        return self._objects.read(self._objects.document(fragment, round))


ROSTERS = 2
"""Rosters of each fragment that move along: no island carries older work."""

BASES = 64
"""Earlier states of each fragment that a departing update may name."""


def counted_progress(
    state: CoordinatorState, fragment: int
) -> tuple[CountedProgress, ...]:
    """Return the counted progress of each island in a fragment, by name."""
    return tuple(
        CountedProgress(
            island=island,
            round=work.round,
            inner_steps=work.inner_steps,
            tokens=work.tokens,
            window=state.windows.of(island),
        )
        for island, fragments in sorted(state.counted.by_island.items())
        if (work := fragments[fragment])
    )


def _listed_rows(
    state: CoordinatorState, fragment: int
) -> tuple[documents.ListedRow, ...]:
    """Return the last update of each island that rosters of a fragment list."""
    return tuple(
        documents.ListedRow(
            island=island,
            round=last.round,
            label=last.label,
            incarnation=last.incarnation,
        )
        for (index, island), last in sorted(state.counted.listed.items())
        if index == fragment
    )


def _listed_in(document: StateDocument) -> dict[str, ListedUpdate]:
    return {
        row.island: ListedUpdate(
            round=row.round, label=row.label, incarnation=row.incarnation
        )
        for row in document.listed or ()
    }
