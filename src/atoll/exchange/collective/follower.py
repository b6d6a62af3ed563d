"""The part of every rank in a round: its pending updates, and the reduce-scatter.

Every rank reduces a share of the round and receives the whole, when the leader has
announced the roster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.errors import AtollError, CorruptError, Refused, RunEnded
from atoll.exchange.api.fields import MAX_LARGE_BYTES, dump, load
from atoll.exchange.api.messages import POSITION
from atoll.exchange.base import Frame, Outcome
from atoll.exchange.bucket import means
from atoll.exchange.bucket.documents import RosterDocument
from atoll.exchange.bucket.means import Mean, Pieces
from atoll.exchange.collective.channel import ControlMessage, MessageKind
from atoll.exchange.collective.world import U8, CollectiveWorld
from atoll.exchange.coordinator import CoordinatorExchange
from atoll.protocol import Position
from atoll.weights import FragmentLayout, Terms
from atoll.wire import (
    Codec,
    Header,
    blake3_digest,
    pack,
    piece_digests,
    unpack,
    update_digest,
)

Terming = Callable[[int], tuple[FragmentLayout, Terms]]
"""Returns how a fragment is laid out, and its terms."""


class CollectiveFollower:
    """Reduces rounds, and lets them land. One thread calls it."""

    def __init__(
        self,
        world: CollectiveWorld,
        inner: CoordinatorExchange,
        flights: PendingUpdates,
        terms_of: Terming,
    ) -> None:
        self._world, self._inner, self._flights = world, inner, flights
        self._terms_of = terms_of
        self._made: dict[Key, Frame] = {}
        self._wanted: set[Key] = set()

    def make(self, go: ControlMessage) -> ControlMessage:
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
        except UpdateSpoilt as exc:
            return ControlMessage(
                MessageKind.MADE, *go.key, (b"", b"", str(exc).encode())
            )
        digest = blake3_digest(pack(made.header))
        voucher = self._inner.vouch(made.header)
        return ControlMessage(MessageKind.MADE, *go.key, (digest, voucher))

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

    def heed(self, word: ControlMessage) -> None:
        """Do what the leader says of a round."""
        match word.says:
            case MessageKind.COMMITTED:
                outcome = self._committed(word)
                self._inner.note_receipts(outcome)
                self._flights.land(word.key, outcome)
            case MessageKind.ALONE:
                self._alone(word.key)
            case MessageKind.ENDED:
                self._made.pop(word.key, None)
                self._flights.land(word.key, RunEnded(word.text))
            case MessageKind.WANTED:
                self.want(word.key)

    def _committed(self, word: ControlMessage) -> Outcome:
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
    return dump(POSITION.write(position), name="position", max_bytes=MAX_LARGE_BYTES)


def read_position(data: bytes) -> Position:
    """Return the position that was told."""
    said = load(data, name="position", max_bytes=MAX_LARGE_BYTES)
    return POSITION.read(said, "position")


Key = tuple[int, int]
"""Fragment and round."""

Found = Outcome | Exception


class PendingUpdates:
    """One rank's updates on their way. Any thread may call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._flying: dict[Key, Frame] = {}
        self._landed: dict[Key, Found] = {}
        self._alone: dict[int, int] = {}

    def add(self, frame: Frame) -> bool:
        """Keep an update until its round is decided; False: it is kept already.

        Raises:
            Refused: another one is.
        """
        header = frame.header
        key = (header.fragment, header.round)
        with self._changed:
            flying = self._flying.get(key)
            if flying is None:
                self._landed.pop(key, None)
                self._flying[key] = frame
                return True
        if update_digest(flying.header) != update_digest(header):
            raise Refused(
                f"Another update of island {header.island!r} stands for round "
                f"{header.round} of fragment {header.fragment}. Wait for its outcome."
            )
        return False

    def frame(self, key: Key) -> Frame | None:
        """Return the update of a round that is not decided."""
        with self._changed:
            return self._flying.get(key)

    def all(self) -> list[Key]:
        """Return the rounds that are not decided, in their order."""
        with self._changed:
            return sorted(self._flying, key=lambda key: key[::-1])

    def land(self, key: Key, found: Found) -> None:
        """Let it be known what became of an update."""
        with self._changed:
            self._flying.pop(key, None)
            self._landed[key] = found
            self._changed.notify_all()

    def let_go(self, key: Key, refused: Exception | None = None) -> None:
        """Keep an update no longer: the coordinator has it, or has refused it."""
        with self._changed:
            self._flying.pop(key, None)
            self._alone[key[0]] = key[1]
            if refused is not None:
                self._landed[key] = refused
            self._changed.notify_all()

    def is_let_go(self, key: Key) -> bool:
        """Return whether the coordinator has had the update of a fragment's round."""
        with self._changed:
            return self._alone.get(key[0], 0) >= key[1]

    def wake(self) -> None:
        """Let who waits look again."""
        with self._changed:
            self._changed.notify_all()

    def wait(
        self, key: Key, wait_s: float, *, is_over: Callable[[], bool]
    ) -> Found | None:
        """Return what a round came to, once; None: nothing yet, or others know it."""
        with self._changed:
            self._changed.wait_for(lambda: is_over() or key not in self._flying, wait_s)
            return self._landed.pop(key, None)


GOOD, OVERFLOWS, SPOILT = 0, 1, 2
"""What a share has come to; the numbers are those on the wire."""


class UpdateSpoilt(Exception):
    """Bytes of an update did not arrive as they were sealed."""


@dataclass(frozen=True)
class Share:
    """A part of a fragment, and the rank that reduces it."""

    number: int
    pieces: Pieces
    owner: int


class Reduction:
    """A round that is reduced by all ranks together, seen from one of them."""

    def __init__(
        self,
        world: CollectiveWorld,
        expected: Header,
        updates: Sequence[Header],
        layout: FragmentLayout,
        terms: Terms,
    ) -> None:
        """`expected` is the header of the outcome, `updates` are all by rank."""
        assert expected.outer is not None
        assert expected.roster is not None
        self._world, self._updates = world, updates
        self._layout, self._terms = layout, terms
        # A radial mean needs whole tensors: one rank reduces everything.
        owners = 1 if terms.merge == "radial" else world.size
        self._document = RosterDocument(
            run=expected.run,
            fragment=expected.fragment,
            round=expected.round,
            epoch=expected.epoch,
            base=expected.base,
            outer=expected.outer,
            shards=tuple(str(rank) for rank in range(owners)),
            roster=expected.roster,
        )
        counted = {entry.island for entry in expected.roster.counted}
        self._counted = [each.island in counted for each in updates]
        self._shares = [
            Share(number, pieces, (number + expected.fragment) % world.size)
            for number, pieces in enumerate(
                means.shards(self._document, layout.elements)
            )
        ]

    def agreed(self, own: U8) -> Frame:
        """Return the agreed frame of the round; `own` is this rank's update's body.

        Raises:
            Spoilt: an update is not what its header says. All ranks raise it.
            Gone: a rank is gone.
        """
        if not any(self._counted):
            return Frame(*means.agreed(self._document, [], *self._down()))
        parts = self._scatter(own)
        return self._gather([self._mean(share, parts) for share in self._mine()])

    def _mine(self) -> list[Share]:
        return [each for each in self._shares if each.owner == self._world.rank]

    def _down(self) -> tuple[FragmentLayout, Codec]:
        return self._layout, self._terms.down

    def _scatter(self, own: U8) -> list[U8]:
        """Return this rank's share of every update, by rank."""
        world, up = self._world, self._terms.up
        outgoing = []
        for share in self._shares:
            begin, end = share.pieces.span(up)
            if share.owner != world.rank and self._counted[world.rank]:
                outgoing.append((share.owner, own[begin:end]))
        parts = [np.empty(0, np.uint8) for _ in range(world.size)]
        for share in self._mine():
            begin, end = share.pieces.span(up)
            parts = [
                own[begin:end]
                if rank == world.rank
                else np.empty(end - begin, np.uint8)
                for rank in range(world.size)
            ]
        incoming = [
            (rank, part)
            for rank, part in enumerate(parts)
            if rank != world.rank and self._counted[rank] and len(part)
        ]
        world.swap(outgoing, incoming)
        return parts

    def _mean(self, share: Share, parts: Sequence[U8]) -> Mean:
        updates = {
            header.island: (header, part)
            for header, part in zip(self._updates, parts, strict=True)
        }
        try:
            return means.mean_of(
                self._document,
                share.number,
                share.pieces,
                updates,
                self._layout,
                self._terms,
            )
        except means.Unverified as exc:  # every rank is told with the share's flag
            return self._spoilt(share, exc.islands)

    def _spoilt(self, share: Share, islands: tuple[str, ...]) -> Mean:
        return Mean(
            run=self._document.run,
            of=b"",
            shard=share.number,
            overflows=False,
            spoilt=islands,
            digests=(),
            body=np.empty(0, np.uint8),
        )

    def _gather(self, mine: Sequence[Mean]) -> Frame:
        """Send the mean of this rank's share to all, and put those of all together."""
        world, down = self._world, self._terms.down
        body = np.empty(down.body_bytes(self._layout.elements), np.uint8)
        flags = np.zeros((len(self._shares), 1), np.uint8)
        outgoing, incoming = [], []
        for share in self._shares:
            begin, end = share.pieces.span(down)
            whole = [flags[share.number], body[begin:end]]
            if share.owner != world.rank:
                incoming += [(share.owner, part) for part in whole]
        for mean in mine:
            begin, end = self._shares[mean.shard].pieces.span(down)
            flags[mean.shard] = _flag(mean)
            body[begin:end] = mean.body if len(mean.body) else 0
            whole = [flags[mean.shard], body[begin:end]]
            others = [rank for rank in range(world.size) if rank != world.rank]
            outgoing += [(rank, part) for rank in others for part in whole]
        world.swap(outgoing, incoming)
        if (flags == SPOILT).any():
            raise UpdateSpoilt(_blame(mine))
        known = {mean.shard: mean.digests for mean in mine}
        return self._sealed(body, known, overflows=bool((flags == OVERFLOWS).any()))

    def _sealed(
        self, body: U8, known: Mapping[int, tuple[bytes, ...]], *, overflows: bool
    ) -> Frame:
        """Return the frame; its digests are of the bytes that this rank holds."""
        layout, down = self._down()
        digests: list[bytes] = []
        for share in self._shares if not overflows else ():
            begin, end = share.pieces.span(down)
            digests += known.get(share.number) or piece_digests(
                down, share.pieces.size, body[begin:end]
            )
        whole = Mean(
            run=self._document.run,
            of=b"",
            shard=0,
            overflows=overflows,
            spoilt=(),
            digests=tuple(digests),
            body=body,
        )
        return Frame(*means.agreed(self._document, [whole], layout, down))


def _flag(mean: Mean) -> int:
    if mean.spoilt:
        return SPOILT
    return OVERFLOWS if mean.overflows else GOOD


def _blame(mine: Sequence[Mean]) -> str:
    names = [name for mean in mine for name in mean.spoilt]
    if not names:
        return "a rank was sent an update that is not what its header says"
    return f"the update of {', '.join(names)} did not arrive as it was sealed"
