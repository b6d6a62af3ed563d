"""What every rank does when the leader of its collective has spoken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from atoll.errors import AtollError, CorruptError, RunEnded
from atoll.exchange.base import Frame, Outcome
from atoll.exchange.collective.flights import Flights, Key
from atoll.exchange.collective.shares import Reduction, Spoilt
from atoll.exchange.collective.words import Says, Word
from atoll.exchange.collective.world import World
from atoll.exchange.coordinator import CoordinatorExchange
from atoll.exchange.forms.messages import POSITION
from atoll.exchange.forms.text import MAX_LARGE_BYTES, dump, load
from atoll.protocol import Position
from atoll.weights import FragmentLayout, Terms
from atoll.wire import Header, blake3_digest, pack, unpack, update_digest

Terming = Callable[[int], tuple[FragmentLayout, Terms]]
"""Returns how a fragment is laid out, and its terms."""


class Attending:
    """Reduces rounds, and lets them land. One thread calls it."""

    def __init__(
        self,
        world: World,
        inner: CoordinatorExchange,
        flights: Flights,
        terms_of: Terming,
    ) -> None:
        self._world, self._inner, self._flights = world, inner, flights
        self._terms_of = terms_of
        self._made: dict[Key, Frame] = {}
        self._wanted: set[Key] = set()

    def make(self, go: Word) -> Word:
        """Reduce a round with the others; return this rank's word for it.

        Raises:
            Gone: a rank is gone.
        """
        expected, *updates = [unpack(part) for part in go.parts]
        frame = self._own(go.key, updates)
        layout, terms = self._terms_of(go.fragment)
        reduction = Reduction(self._world, expected, updates, layout, terms)
        try:
            made = self._made[go.key] = reduction.agreed(frame.body)
        except Spoilt as exc:
            return Word(Says.MADE, *go.key, (b"", b"", str(exc).encode()))
        digest = blake3_digest(pack(made.header))
        voucher = self._inner.vouch(made.header)
        return Word(Says.MADE, *go.key, (digest, voucher))

    def _own(self, key: Key, updates: list[Header]) -> Frame:
        frame = self._flights.frame(key)
        theirs = updates[self._world.rank]
        if frame is None or update_digest(theirs) != update_digest(frame.header):
            raise CorruptError(
                f"The leader of the collective has another update of this rank for "
                f"round {key[1]} of fragment {key[0]} than was announced."
            )
        return frame

    def made(self, key: Key) -> Frame:
        """Return the agreed frame that this rank has made."""
        return self._made[key]

    def heed(self, word: Word) -> None:
        """Do what the leader says of a round."""
        match word.says:
            case Says.COMMITTED:
                outcome = self._committed(word)
                self._inner.note_receipts(outcome)
                self._flights.land(word.key, outcome)
            case Says.ALONE:
                self._alone(word.key)
            case Says.ENDED:
                self._made.pop(word.key, None)
                self._flights.land(word.key, RunEnded(word.text))
            case Says.WANTED:
                self.want(word.key)

    def _committed(self, word: Word) -> Outcome:
        """Return the outcome that this rank has made, with the run's receipts."""
        position, *receipts = word.parts
        after, receipt = receipts if len(receipts) == 2 else (b"", b"")
        agreed = replace(self._made.pop(word.key), receipt=receipt)
        return Outcome(agreed, read_position(position), after)

    def want(self, key: Key) -> None:
        """Remember a round that waits for this rank while everybody stands still."""
        self._wanted = {key, *(each for each in self._wanted if each[0] != key[0])}

    def wanted(self, rounds: Sequence[int]) -> tuple[int, ...]:
        """Return the fragments whose open round waits for this rank's update."""
        return tuple(
            fragment
            for fragment, round in sorted(self._wanted)
            if (fragment, round) in enumerate(rounds)
            and self._flights.frame((fragment, round)) is None
        )

    def part(self) -> None:
        """Let the coordinator have every update that is not decided."""
        for key in self._flights.all():
            self._alone(key)

    def _alone(self, key: Key) -> None:
        """Publish an update as an island without a collective does."""
        self._made.pop(key, None)
        frame = self._flights.frame(key)
        if frame is None:
            return
        refused = None
        try:
            self._inner.publish(frame)
        except (AtollError, RunEnded) as exc:  # who waits for its outcome is told
            refused = exc
        self._flights.let_go(key, refused)


def position_bytes(position: Position) -> bytes:
    """Return a position as ranks tell it."""
    return dump(POSITION.write(position), what="position", most=MAX_LARGE_BYTES)


def read_position(data: bytes) -> Position:
    """Return the position that was told."""
    said = load(data, what="position", most=MAX_LARGE_BYTES)
    return POSITION.read(said, "position")
