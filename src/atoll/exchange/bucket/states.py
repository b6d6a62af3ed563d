"""Anchor and velocity of fragments in a bucket: for who comes late, and for good.

A state is written every few rounds by one of the islands that hold it. Then what only
older rounds needed is removed: updates and means, never a roster, because a new one
could be put in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import numpy as np

from atoll.errors import CorruptError, NoSuchObject, Refused, StoreDenied
from atoll.exchange.base import Frame
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import (
    CountedProgress,
    StateDocument,
    fetch,
    packed,
)
from atoll.exchange.bucket.lookout import Lookout
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.weights import FragmentState, require_state
from atoll.wire import Header, header_length, pack, unpack, verify_body

STATE_ROUNDS = 10
"""How many means a latecomer goes through at most, about."""

PART_BYTES = 64 * 2**20
KEPT_STATES = 2
"""Who has just listed the older one may still read it."""

_BASES = 64


class States:
    """Reads and writes the states of a run."""

    def __init__(
        self,
        lookout: Lookout,
        outcomes: Outcomes,
        *,
        every_rounds: int = STATE_ROUNDS,
    ) -> None:
        self._lookout, self._outcomes = lookout, outcomes
        self._every_rounds = every_rounds
        self._store, self._timing = lookout.store, lookout.timing
        self._written: dict[int, int] = {}
        """The last round whose state is known to be complete, by fragment."""

    def begin(self, fragment: int) -> None:
        """Bring a lookout that knows nothing to the open round of a fragment."""
        latest = self._latest(fragment)
        if latest is not None:
            with self._lookout.lock:
                self._lookout.sight.begin_after(
                    fragment,
                    latest.round,
                    latest.counted,
                    latest.bases,
                    self._timing.now_s(),
                )
        self._lookout.follow(fragment)

    def read(self, fragment: int) -> FragmentState:
        """Return the state after the last closed round.

        Raises:
            CorruptError: a round is gone that no state has.
        """
        begun_at = -1
        while True:
            state = self._stored(fragment)
            if state.round <= begun_at:
                raise CorruptError(
                    f"The updates of round {begun_at + 1} of fragment {fragment} are "
                    "gone from the bucket, and no state has them. Restore the bucket "
                    "from a copy."
                )
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
        for document in self._documents(fragment):
            key = keys.state_complete(fragment, document.round)
            try:
                header, body = self._read_parts(document)
                verify_body(header, body)
                self._require_base(header)
                return FragmentState.from_frame(header, body)
            except NoSuchObject:
                continue  # collected while it was read, or somebody removed a part
            except (CorruptError, Refused) as exc:
                self._lookout.tell(f"The state at {key} is passed over: {exc}")
        try:
            header, body = self._founding(fragment)
        except NoSuchObject as exc:
            raise CorruptError(
                f"{exc.key}, the first weights of fragment {fragment}, is gone from "
                "the bucket, and no state can be read. Restore the bucket from a copy."
            ) from exc
        verify_body(header, body)
        return FragmentState.from_frame(header, body)

    def _require_base(self, header: Header) -> None:
        """Return unless the next round was started from another state than this."""
        with suppress(NoSuchObject):
            base = self._lookout.roster(header.fragment, header.round + 1).base
            if base != header.base:
                raise CorruptError(
                    f"it has digest {header.base.hex()}, and round {header.round + 1} "
                    f"started from {base.hex()}. Who wrote it had lost a bit."
                )

    def _latest(self, fragment: int) -> StateDocument | None:
        found = next(self._documents(fragment), None)
        if found is not None:
            written = self._written.get(fragment, 0)
            self._written[fragment] = max(found.round, written)
        return found

    def _documents(self, fragment: int) -> Iterator[StateDocument]:
        """Yield what says that a state is complete, the latest first.

        What is none is passed over: the run can go on without it.
        """
        for round in sorted(self._rounds(fragment), reverse=True):
            key = keys.state_complete(fragment, round)
            try:
                found = fetch(self._store, documents.STATE, key, run=self._lookout.run)
            except NoSuchObject:
                continue
            except CorruptError as exc:
                self._lookout.tell(f"{key} is passed over: {exc}")
                continue
            if (found.fragment, found.round) == (fragment, round):
                yield found
            else:
                self._lookout.tell(
                    f"{key} is passed over: it says round {found.round} of fragment "
                    f"{found.fragment}."
                )

    def _rounds(self, fragment: int, *, is_complete: bool = True) -> set[int]:
        """Return the rounds whose states are listed as complete, or at all."""
        prefix, rounds = keys.states(fragment), set()
        for item in self._store.items(prefix):
            round, _, what = item.key.removeprefix(prefix).partition("/")
            is_asked = what == "complete" or not is_complete
            if is_asked and round.isascii() and round.isdecimal():
                rounds.add(int(round))
        return rounds

    def _founding(self, fragment: int) -> tuple[Header, np.ndarray]:
        founded = self._lookout.founded
        assert founded is not None
        data = self._store.get(keys.founding(founded.founding, fragment))
        length = header_length(data)
        header = unpack(data[:length])
        return header, np.frombuffer(bytearray(data[length:]), np.uint8)

    def _read_parts(self, document: StateDocument) -> tuple[Header, np.ndarray]:
        header = unpack(document.head)
        whose = (header.run, header.fragment, header.round)
        if whose != (document.run, document.fragment, document.round):
            raise CorruptError(
                f"{keys.state_complete(document.fragment, document.round)} holds the "
                f"{header.name}. Remove that state: there are older ones."
            )
        sight = self._lookout.sight
        layout, terms = sight.layout[header.fragment], sight.terms(header.fragment)
        require_state(header, layout, terms, round=header.round)
        if document.parts != max(1, -(-header.body_bytes // PART_BYTES)):
            raise CorruptError(
                f"{document.parts} parts cannot hold {header.body_bytes} bytes. "
                "Remove that state: there are older ones."
            )
        reads = [
            partial(
                self._store.get,
                keys.state_part(document.fragment, document.round, part),
                0,
                PART_BYTES + 1,
            )
            for part in range(document.parts)
        ]
        body = bytearray().join(self._timing.together(reads))
        return header, np.frombuffer(body, np.uint8)

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
        header, body = frame.header, memoryview(frame.body.data)
        fragment, round = header.fragment, header.round
        with self._lookout.lock:
            is_doubtful = self._lookout.sight.is_doubtful(fragment, round, header.base)
        if is_doubtful:
            self._lookout.tell(
                f"The state of round {round} of fragment {fragment} is not written: "
                "others hold another one."
            )
            return
        parts = [
            body[first : first + PART_BYTES]
            for first in range(0, max(1, len(body)), PART_BYTES)
        ]
        self._timing.together(
            [
                partial(
                    self._store.put_new,
                    keys.state_part(fragment, round, number),
                    [part],
                )
                for number, part in enumerate(parts)
            ]
        )
        document = self._document(header, len(parts))
        complete = keys.state_complete(fragment, round)
        self._store.put_new(complete, packed(documents.STATE, document))
        self._written[fragment] = max(round, self._written.get(fragment, 0))
        try:
            self.collect(fragment)
        except StoreDenied as exc:
            self._lookout.tell(
                "What only older rounds needed cannot be removed, and the bucket "
                f"grows: {exc}"
            )

    def _document(self, header: Header, parts: int) -> StateDocument:
        with self._lookout.lock:
            state = self._lookout.sight.state
            counted = tuple(
                CountedProgress(
                    island=island,
                    round=found.round,
                    inner_steps=found.inner_steps,
                    tokens=found.tokens,
                )
                for island, fragments in sorted(state.counted.by_island.items())
                if (found := fragments[header.fragment])
            )
            bases = state.rounds[header.fragment].bases[-_BASES:]
        return StateDocument(
            run=header.run,
            fragment=header.fragment,
            round=header.round,
            parts=parts,
            head=pack(anonymous(header)),
            counted=counted,
            bases=bases,
        )

    def collect(self, fragment: int) -> None:
        """Remove what nobody needs who begins at one of the last states."""
        # Whatever else is listed there: nobody has a state of a round that is open.
        last = self._lookout.sight.number(fragment) - 1
        rounds = sorted(filter(last.__ge__, self._rounds(fragment)), reverse=True)
        if len(rounds) < KEPT_STATES:
            return
        # Rounds first: if this is interrupted, the older states tell where to go on.
        before = rounds[KEPT_STATES] if len(rounds) > KEPT_STATES else 0
        for round in range(before + 1, rounds[KEPT_STATES - 1] + 1):
            prefix = keys.round_prefix(fragment, round)
            self._remove(prefix, kept=keys.roster(fragment, round))
        begun = self._rounds(fragment, is_complete=False)
        for old in sorted(each for each in begun if each < rounds[KEPT_STATES - 1]):
            prefix = f"{keys.states(fragment)}{old}/"
            self._remove(prefix, first=keys.state_complete(fragment, old))

    def _remove(self, prefix: str, *, first: str = "", kept: str = "") -> None:
        found = [item.key for item in self._store.items(prefix)]
        if first in found:
            self._store.remove([first])
        self._store.remove([key for key in found if key not in (first, kept)])


def anonymous(header: Header) -> Header:
    """Return the header of a state without who has brought it."""
    return Header(
        kind=header.kind,
        run=header.run,
        fragment=header.fragment,
        round=header.round,
        base=header.base,
        codec=header.codec,
        elements=header.elements,
        weight=header.weight,
        outer=header.outer,
    ).sealed(body_bytes=header.body_bytes, pieces=header.pieces)
