"""What an observer of a bucket knows of the states that open rounds start from."""

from __future__ import annotations

from atoll.exchange.bucket.sight import UNKNOWN, Sight
from atoll.protocol import Holding
from atoll.protocol.values import changed
from atoll.wire import Kind


class KnownBases:
    """Which state each open round starts from, and whether islands agree about it."""

    def __init__(self, sight: Sight) -> None:
        self._sight = sight
        self._proven: dict[int, int] = {}
        """The round of each fragment whose base was made from what is in the bucket."""

    def see_held(self, fragment: int, held: Holding) -> None:
        """Take note of the state that the open round of a fragment starts from."""
        round = self._sight.state.rounds[fragment]
        if held.round + 1 == round.number and round.base == UNKNOWN:
            self._sight.put(changed(round, base=held.digest))

    def is_disputed(self, fragment: int) -> bool:
        """Return whether somebody started the open round from another state.

        A bit of one island's memory may have changed. If that island closed the round
        with its base, nobody else could ever take the outcome.
        """
        round = self._sight.state.rounds[fragment]
        if round.base == UNKNOWN or self._proven.get(fragment) == round.number:
            return False
        named = [
            header.base
            for header in round.staged.values()
            if header.kind is not Kind.DEPARTING and not header.refused
        ]
        named += [
            document.beat.holds[fragment].digest
            for document in self._sight.documents.values()
            if fragment < len(document.beat.holds)
            and document.beat.holds[fragment].round + 1 == round.number
        ]
        return any(base != round.base for base in named)

    def see_proven(self, fragment: int, held: Holding) -> None:
        """Take note of the state that the bucket gives, whatever islands hold."""
        round = self._sight.state.rounds[fragment]
        if held.round + 1 == round.number:
            self._proven[fragment] = round.number
            self._sight.put(changed(round, base=held.digest))
