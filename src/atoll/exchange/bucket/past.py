"""Anchors of rounds that are over, from the states and updates that are still kept."""

from __future__ import annotations

from functools import partial

import numpy as np

from atoll.errors import CorruptError, NoSuchObject, Refused
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import StateDocument, fetch
from atoll.exchange.bucket.lookout import Lookout
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.states import KEPT_STATES
from atoll.weights import FragmentState
from atoll.wire import Header, header_length, unpack, verify_body


class Past:
    """Reads a run as it was after a round."""

    def __init__(self, lookout: Lookout, outcomes: Outcomes) -> None:
        self._lookout, self._outcomes = lookout, outcomes
        self._store, self._timing = lookout.store, lookout.timing

    def rounds(self) -> list[int]:
        """Return the rounds whose anchor can be had of every fragment."""
        fragments = range(len(self._lookout.sight.layout))
        found = [self._rounds(fragment) for fragment in fragments]
        return sorted(set[int].intersection(*map(set, found))) if found else []

    def state(self, fragment: int, round: int) -> FragmentState:
        """Return a fragment's state after a round.

        Raises:
            Refused: what leads there is not kept any more.
            CorruptError: what is kept does not verify.
        """
        begins = [at for at in self._states(fragment) if at <= round]
        state = self._stored(fragment, max(begins, default=0))
        while state.round < round:
            agreed = self._outcomes.frame(fragment, state.round + 1)
            if not agreed.header.is_sealed:
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
        states, number = self._states(fragment), self._lookout.sight.number(fragment)
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

    def _states(self, fragment: int) -> list[int]:
        """Return the rounds whose states are complete, the latest last."""
        prefix, rounds = keys.states(fragment), []
        for item in self._store.items(prefix):
            round, _, what = item.key.removeprefix(prefix).partition("/")
            if what == "complete" and round.isascii() and round.isdecimal():
                rounds.append(int(round))
        return sorted(rounds)

    def _stored(self, fragment: int, round: int) -> FragmentState:
        try:
            header, body = (
                self._read(fragment, round) if round else self._founding(fragment)
            )
        except NoSuchObject as exc:
            raise Refused(
                f"The state of round {round} of fragment {fragment} has been removed "
                "meanwhile. Ask again: there is a later one."
            ) from exc
        verify_body(header, body)
        return FragmentState.from_frame(header, body)

    def _founding(self, fragment: int) -> tuple[Header, np.ndarray]:
        founded = self._lookout.founded
        assert founded is not None
        data = self._store.get(keys.founding(founded.founding, fragment))
        length = header_length(data)
        header = unpack(data[:length])
        return header, np.frombuffer(bytearray(data[length:]), np.uint8)

    def _read(self, fragment: int, round: int) -> tuple[Header, np.ndarray]:
        key = keys.state_complete(fragment, round)
        document = fetch(self._store, documents.STATE, key, run=self._lookout.run)
        header = unpack(document.head)
        if (header.run, header.fragment, header.round) != _whose(document):
            raise CorruptError(
                f"{key} holds the {header.name}. Remove that state: there are others."
            )
        reads = [
            partial(self._store.get, keys.state_part(fragment, round, part))
            for part in range(document.parts)
        ]
        body = bytearray().join(self._timing.together(reads))
        return header, np.frombuffer(body, np.uint8)


def _whose(document: StateDocument) -> tuple[str, int, int]:
    return document.run, document.fragment, document.round
