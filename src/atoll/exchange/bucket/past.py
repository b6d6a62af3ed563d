"""Anchors of rounds that are over, from the states and updates that are still kept."""

from __future__ import annotations

import numpy as np

from atoll.errors import CorruptError, NoSuchObject, Refused
from atoll.exchange.bucket import keys
from atoll.exchange.bucket.documents import RESTORE
from atoll.exchange.bucket.lookout import Lookout
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.state_objects import StateObjects
from atoll.exchange.bucket.states import KEPT_STATES
from atoll.weights import FragmentState
from atoll.wire import Header, verify_body


class Past:
    """Reads a run as it was after a round."""

    def __init__(self, lookout: Lookout, outcomes: Outcomes) -> None:
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
