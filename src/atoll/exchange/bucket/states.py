"""Anchor and velocity of fragments in a bucket, for latecomers and for export.

An old anchor is computed from a kept state and the updates of the rounds after it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

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
from atoll.protocol.membership import CountedUpdates
from atoll.weights import FragmentState
from atoll.wire import Header, pack, verify_body

STATE_ROUNDS = 10
"""How many means a latecomer goes through at most, about."""

KEPT_STATES = 2
"""Who has just listed the older one may still read it."""


class States:
    """Reads and writes the states of a run."""

    def __init__(
        self,
        lookout: BucketReader,
        outcomes: Outcomes,
        *,
        every_rounds: int = STATE_ROUNDS,
    ) -> None:
        self._lookout, self._outcomes = lookout, outcomes
        self._every_rounds = every_rounds
        self._store, self._timing = lookout.store, lookout.timing
        self._objects = StateObjects(lookout)
        self._written: dict[int, int] = {}
        """The last round whose state is known to be complete, by fragment."""

    def begin(self, fragment: int) -> None:
        """Bring a lookout that knows nothing to the open round of a fragment."""
        latest = self._latest(fragment)
        if latest is not None:
            head = self._head_after(latest)
            with self._lookout.lock:
                self._lookout.sight.begin_after(
                    fragment,
                    latest.round,
                    latest.counted,
                    latest.bases,
                    self._timing.now_s(),
                    head=head,
                )
        self._lookout.follow(fragment)

    def _head_after(self, document: StateDocument) -> RosterHead:
        """Return what the roster after a state names as the one before it."""
        first = self._lookout.founding_head
        if document.roster:
            return replace(first, round=document.round, digest=document.roster)
        try:  # of 0.1.0, which did not say
            roster = self._lookout.roster(document.fragment, document.round)
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
            self._lookout.follow(fragment)
            if self._bring_up(fragment, state):
                return state
            begun_at = state.round

    def _bring_up(self, fragment: int, state: FragmentState) -> bool:
        """Apply the rounds after a state; False: some are gone, begin again."""
        while state.round + 1 < self._lookout.sight.number(fragment):
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
            except NoSuchObject as exc:  # collected since, or somebody removed it
                self._lookout.tell(f"{name} is passed over: {exc.key} is gone.")
            except (CorruptError, Refused) as exc:
                self._lookout.tell(f"{name} is passed over: {exc}")
        return self._founded(fragment)

    def _founded(self, fragment: int) -> FragmentState:
        """Return the first weights of a fragment.

        Raises:
            CorruptError: they are gone, or something else is there.
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
            after = self._lookout.roster(header.fragment, header.round + 1)
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
        found = next(self._objects.complete(fragment), None)
        if found is not None:
            written = self._written.get(fragment, 0)
            self._written[fragment] = max(found.round, written)
        return found

    def is_due(self, fragment: int, island: str) -> bool:
        """Return whether it is this island's turn to write a state."""
        with self._lookout.lock:
            sight = self._lookout.sight
            behind = sight.number(fragment) - 1 - self._written.get(fragment, 0)
            live = sorted(sight.live(self._timing.now_s()))
        turn = live.index(island) if island in live else len(live)
        if behind < self._every_rounds + turn:
            return False
        self._latest(fragment)  # somebody else may have written one since
        behind = sight.number(fragment) - 1 - self._written.get(fragment, 0)
        return behind >= self._every_rounds + turn

    def write(self, frame: Frame) -> None:
        """Put a state, part by part, and say at last that it is complete."""
        header = frame.header
        fragment, round = header.fragment, header.round
        with self._lookout.lock:
            is_doubtful = self._lookout.sight.is_doubtful(fragment, round, header.base)
        if is_doubtful:
            self._lookout.tell(
                f"The state of round {round} of fragment {fragment} is not written: "
                "others hold another one."
            )
            return
        parts = put_parts(self._store.put_new, self._timing, frame)
        document = self._document(header, parts)
        complete = keys.state_complete(fragment, round)
        self._store.put_new(complete, packed(documents.STATE, document, complete))
        self._written[fragment] = max(round, self._written.get(fragment, 0))
        try:
            self.collect(fragment)
        except StoreDenied as exc:
            self._lookout.tell(
                "What only older rounds needed cannot be removed, and the bucket "
                f"grows: {exc}"
            )

    def _document(self, header: Header, parts: int) -> StateDocument:
        try:
            roster = self._lookout.known_roster(header.fragment, header.round).digest
        except NoSuchObject:  # from before the run came here
            roster = self._lookout.founding_head.digest
        with self._lookout.lock:
            state = self._lookout.sight.state
            counted = counted_progress(state.counted, header.fragment)
            bases = state.rounds[header.fragment].bases[-BASES:]
        return StateDocument(
            run=header.run,
            fragment=header.fragment,
            round=header.round,
            parts=parts,
            head=pack(anonymous(header)),
            counted=counted,
            bases=bases,
            roster=roster,
        )

    def collect(self, fragment: int) -> None:
        """Remove what nobody needs who begins at one of the last states."""
        # Whatever else is listed there: nobody has a state of a round that is open.
        last = self._lookout.sight.number(fragment) - 1
        rounds = sorted(
            filter(last.__ge__, self._objects.rounds(fragment)), reverse=True
        )
        if len(rounds) < KEPT_STATES:
            return
        # Rounds first: if this is interrupted, the older states tell where to go on.
        before = rounds[KEPT_STATES] if len(rounds) > KEPT_STATES else 0
        for round in range(before + 1, rounds[KEPT_STATES - 1] + 1):
            prefix = keys.round_prefix(fragment, round)
            self._remove(prefix, kept=keys.roster(fragment, round))
        begun = self._objects.rounds(fragment, is_complete=False)
        for old in sorted(each for each in begun if each < rounds[KEPT_STATES - 1]):
            prefix = f"{keys.states(fragment)}{old}/"
            self._remove(prefix, first=keys.state_complete(fragment, old))

    def _remove(self, prefix: str, *, first: str = "", kept: str = "") -> None:
        found = [item.key for item in self._store.items(prefix)]
        if first in found:
            self._store.remove([first])
        self._store.remove([key for key in found if key not in (first, kept)])


class PastAnchors:
    """Reads a run as it was after a round."""

    def __init__(self, lookout: BucketReader, outcomes: Outcomes) -> None:
        self._lookout, self._outcomes = lookout, outcomes
        self._store, self._objects = lookout.store, StateObjects(lookout)

    def rounds(self) -> list[int]:
        """Return the rounds whose anchor can be had of every fragment."""
        fragments = range(len(self._lookout.sight.layout))
        found = [self._rounds(fragment) for fragment in fragments]
        return sorted(set[int].intersection(*map(set, found))) if found else []

    def state(self, fragment: int, round: int) -> FragmentState:
        """Return a fragment's state after a round.

        What does not verify is passed over: an older state may lead there, too.

        Raises:
            Refused: what leads there is not kept any more.
            CorruptError: nothing that is kept leads there, and some of it is damaged.
        """
        begins = {0, *(at for at in self._objects.rounds(fragment) if at <= round)}
        damage: CorruptError | None = None
        refusal: Refused | None = None
        for begin in sorted(begins, reverse=True):
            try:
                return self._brought_up(self._stored(fragment, begin), fragment, round)
            except CorruptError as exc:
                self._lookout.tell(
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
        """Return a state after the rounds that lead to another one."""
        while state.round < round:
            agreed = self._outcomes.frame(fragment, state.round + 1)
            if not agreed.header.is_sealed:
                if self._outcomes.is_damaged(fragment, state.round + 1):
                    raise self._outcomes.unmade(fragment, state.round + 1)
                raise Refused(
                    f"Round {state.round + 1} of fragment {fragment} has been removed "
                    f"meanwhile, and round {round} cannot be had any more. Take a "
                    "later one."
                )
            verify_body(agreed.header, agreed.body)
            state.apply(agreed.header, agreed.body)
        return state

    def _rounds(self, fragment: int) -> list[int]:
        """Return rounds from the older kept state on; the first weights stay, too.

        A run that came here after its first round has not brought them.
        """
        states, number = (
            sorted(self._objects.rounds(fragment)),
            self._lookout.sight.number(fragment),
        )
        begin = states[-KEPT_STATES] if len(states) >= KEPT_STATES else 0
        if states and not self._has_founding(fragment):
            return list(range(max(begin, states[0]), number))
        return [0, *range(max(begin, 1), number)]

    def _has_founding(self, fragment: int) -> bool:
        founded = self._lookout.founded
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
"""Of each fragment: an island keeps no work that was sealed before them."""

BASES = 64
"""Earlier states of each fragment that a departing update may name."""


def counted_progress(
    counted: CountedUpdates, fragment: int
) -> tuple[CountedProgress, ...]:
    """Return what each island has counted in a fragment, by name."""
    return tuple(
        CountedProgress(
            island=island,
            round=found.round,
            inner_steps=found.inner_steps,
            tokens=found.tokens,
        )
        for island, fragments in sorted(counted.by_island.items())
        if (found := fragments[fragment])
    )
