"""The part of every rank in a round: its pending updates, and the reduce-scatter.

When the leader has announced the roster, every rank reduces a share of the round and
receives the other shares.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.errors import AtollError, CorruptError, RunEnded
from atoll.exchange.api.bodies import MAX_LARGE_BYTES, dump, load
from atoll.exchange.api.messages import POSITION
from atoll.exchange.base import Frame, Outcome
from atoll.exchange.bucket import means
from atoll.exchange.bucket.documents import RosterDocument
from atoll.exchange.bucket.means import Mean, Pieces
from atoll.exchange.collective.channel import ControlMessage, MessageKind
from atoll.exchange.collective.world import U8, CollectiveWorld
from atoll.exchange.coordinator import CoordinatorExchange
from atoll.protocol import Position
from atoll.protocol.rounds import another_stands
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

FragmentTerms = Callable[[int], tuple[FragmentLayout, Terms]]
"""Returns the layout and the terms of a fragment."""


class CollectiveFollower:
    """Reduces rounds, and completes pending updates. One thread calls it."""

    def __init__(
        self,
        world: CollectiveWorld,
        inner: CoordinatorExchange,
        pending: PendingUpdates,
        terms_of: FragmentTerms,
    ) -> None:
        self._world, self._inner, self._pending = world, inner, pending
        self._terms_of = terms_of
        self._reduced: dict[Key, Frame] = {}
        self._wanted: set[Key] = set()

    def reduce(self, go: ControlMessage) -> ControlMessage:
        """Reduce a round with the others; return this rank's result message.

        Raises:
            RankUnreachable: a rank is gone.
        """
        expected, *updates = [unpack(part) for part in go.parts]
        frame = self._own_update(go.key, updates)
        layout, terms = self._terms_of(go.fragment)
        reduction = Reduction(self._world, expected, updates, layout, terms)
        try:
            agreed = self._reduced[go.key] = reduction.agreed(frame.body)
        except UpdateDamaged as exc:
            return ControlMessage(
                MessageKind.REDUCED, *go.key, (b"", b"", str(exc).encode())
            )
        digest = blake3_digest(pack(agreed.header))
        voucher = self._inner.vouch(agreed.header)
        return ControlMessage(MessageKind.REDUCED, *go.key, (digest, voucher))

    def _own_update(self, key: Key, updates: list[Header]) -> Frame:
        frame = self._pending.frame(key)
        header = updates[self._world.rank]
        if frame is None or update_digest(header) != update_digest(frame.header):
            raise CorruptError(
                f"The leader of the collective has another update of this rank for "
                f"round {key[1]} of fragment {key[0]} than was announced."
            )
        return frame

    def reduced(self, key: Key) -> Frame:
        """Return the agreed frame of a round that this rank has reduced."""
        return self._reduced[key]

    def handle(self, message: ControlMessage) -> None:
        """Apply a decision of the leader about a round."""
        match message.kind:
            case MessageKind.COMMITTED:
                outcome = self._committed(message)
                self._inner.note_receipts(outcome)
                self._pending.complete(message.key, outcome)
            case MessageKind.PUBLISH_DIRECTLY:
                self._publish(message.key)
            case MessageKind.ENDED:
                self._reduced.pop(message.key, None)
                self._pending.complete(message.key, RunEnded(message.text))
            case MessageKind.WANTED:
                self.want(message.key)

    def _committed(self, message: ControlMessage) -> Outcome:
        """Return the outcome that this rank has reduced, with the run's receipts."""
        position, *receipts = message.parts
        after, receipt = receipts if len(receipts) == 2 else (b"", b"")
        agreed = replace(self._reduced.pop(message.key), receipt=receipt)
        return Outcome(agreed, read_position(position), after)

    def want(self, key: Key) -> None:
        """Remember a round that needs this rank's update while all are blocked."""
        self._wanted = {key, *(other for other in self._wanted if other[0] != key[0])}

    def wanted(self, rounds: Sequence[int]) -> tuple[int, ...]:
        """Return the fragments whose open round waits for this rank's update."""
        return tuple(
            fragment
            for fragment, round in sorted(self._wanted)
            if (fragment, round) in enumerate(rounds)
            and self._pending.frame((fragment, round)) is None
        )

    def publish_all(self) -> None:
        """Publish every pending update to the coordinator."""
        for key in self._pending.all():
            self._publish(key)

    def _publish(self, key: Key) -> None:
        """Publish an update like an island without a collective."""
        self._reduced.pop(key, None)
        frame = self._pending.frame(key)
        if frame is None:
            return
        error = None
        try:
            self._inner.publish(frame)
        except (AtollError, RunEnded) as exc:  # raised where its outcome is awaited
            error = exc
        self._pending.hand_over(key, error)


def position_bytes(position: Position) -> bytes:
    """Return a position as JSON, for a message."""
    return dump(POSITION.write(position), name="position", max_bytes=MAX_LARGE_BYTES)


def read_position(data: bytes) -> Position:
    """Return the position of a message."""
    value = load(data, name="position", max_bytes=MAX_LARGE_BYTES)
    return POSITION.read(value, "position")


Key = tuple[int, int]
"""Fragment and round."""

Result = Outcome | Exception


class PendingUpdates:
    """One rank's updates whose rounds are not decided. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frames: dict[Key, Frame] = {}
        self._results: dict[Key, Result] = {}
        self._handed_over: dict[int, int] = {}
        """By fragment, the last round whose update the coordinator got."""

    def add(self, frame: Frame) -> bool:
        """Keep an update until its round is decided; False: it is kept already.

        Raises:
            Refused: another update is kept for the round.
        """
        header = frame.header
        key = (header.fragment, header.round)
        with self._changed:
            pending = self._frames.get(key)
            if pending is None:
                self._results.pop(key, None)
                self._frames[key] = frame
                return True
        if update_digest(pending.header) != update_digest(header):
            raise another_stands(header)
        return False

    def frame(self, key: Key) -> Frame | None:
        """Return the update of a round that is not decided."""
        with self._changed:
            return self._frames.get(key)

    def all(self) -> list[Key]:
        """Return the rounds that are not decided, in their order."""
        with self._changed:
            return sorted(self._frames, key=lambda key: key[::-1])

    def complete(self, key: Key, result: Result) -> None:
        """Set the result of a round, and wake the thread that waits for it."""
        with self._changed:
            self._frames.pop(key, None)
            self._results[key] = result
            self._changed.notify_all()

    def hand_over(self, key: Key, error: Exception | None = None) -> None:
        """Drop an update: the coordinator has it, or has refused it with `error`."""
        with self._changed:
            self._frames.pop(key, None)
            self._handed_over[key[0]] = key[1]
            if error is not None:
                self._results[key] = error
            self._changed.notify_all()

    def is_handed_over(self, key: Key) -> bool:
        """Return whether the coordinator got the update of a fragment's round."""
        with self._changed:
            return self._handed_over.get(key[0], 0) >= key[1]

    def wake(self) -> None:
        """Wake waiting threads to check again."""
        with self._changed:
            self._changed.notify_all()

    def wait(
        self, key: Key, wait_s: float, *, is_over: Callable[[], bool]
    ) -> Result | None:
        """Return the result of a round, once; None if there is none here yet."""
        with self._changed:
            self._changed.wait_for(lambda: is_over() or key not in self._frames, wait_s)
            return self._results.pop(key, None)


GOOD, OVERFLOWS, DAMAGED = 0, 1, 2
"""State of a reduced share; the numbers are those on the wire."""


class UpdateDamaged(Exception):
    """The received bytes of an update do not match its digests."""


@dataclass(frozen=True)
class Share:
    """A part of a fragment, and the rank that reduces it."""

    number: int
    pieces: Pieces
    owner: int


class Reduction:
    """One rank's side of a round that all ranks reduce together."""

    def __init__(
        self,
        world: CollectiveWorld,
        expected: Header,
        updates: Sequence[Header],
        layout: FragmentLayout,
        terms: Terms,
    ) -> None:
        """`expected` is the header of the outcome, `updates` are in order of ranks."""
        assert expected.outer is not None
        assert expected.roster is not None
        self._world, self._updates = world, updates
        self._layout, self._terms = layout, terms
        # A radial mean needs complete tensors: one rank reduces all of them.
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
        self._counted = [header.island in counted for header in updates]
        self._shares = [
            Share(number, pieces, (number + expected.fragment) % world.size)
            for number, pieces in enumerate(
                means.shards(self._document, layout.elements)
            )
        ]

    def agreed(self, own_body: U8) -> Frame:
        """Return the agreed frame of the round; `own_body` is of this rank's update.

        Raises:
            UpdateDamaged: an update does not match its header. All ranks raise it.
            RankUnreachable: a rank is gone.
        """
        if not any(self._counted):
            return Frame(*means.agreed(self._document, [], *self._down()))
        parts = self._scatter(own_body)
        return self._gather([self._mean(share, parts) for share in self._own_shares()])

    def _own_shares(self) -> list[Share]:
        return [share for share in self._shares if share.owner == self._world.rank]

    def _down(self) -> tuple[FragmentLayout, Codec]:
        return self._layout, self._terms.down

    def _scatter(self, own_body: U8) -> list[U8]:
        """Return this rank's share of every update, by rank."""
        world, up = self._world, self._terms.up
        outgoing = []
        for share in self._shares:
            begin, end = share.pieces.span(up)
            if share.owner != world.rank and self._counted[world.rank]:
                outgoing.append((share.owner, own_body[begin:end]))
        parts = [np.empty(0, np.uint8) for _ in range(world.size)]
        for share in self._own_shares():
            begin, end = share.pieces.span(up)
            parts = [
                own_body[begin:end]
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
        except means.Unverified as exc:  # the share's flag reports it to every rank
            return self._damaged(share, exc.islands)

    def _damaged(self, share: Share, islands: tuple[str, ...]) -> Mean:
        return Mean(
            run=self._document.run,
            of=b"",
            shard=share.number,
            overflows=False,
            spoilt=islands,
            digests=(),
            body=np.empty(0, np.uint8),
        )

    def _gather(self, own_means: Sequence[Mean]) -> Frame:
        """Send this rank's means to all ranks, and return the frame of all means."""
        world, down = self._world, self._terms.down
        body = np.empty(down.body_bytes(self._layout.elements), np.uint8)
        flags = np.zeros((len(self._shares), 1), np.uint8)
        outgoing, incoming = [], []
        for share in self._shares:
            begin, end = share.pieces.span(down)
            parts = [flags[share.number], body[begin:end]]
            if share.owner != world.rank:
                incoming += [(share.owner, part) for part in parts]
        for mean in own_means:
            begin, end = self._shares[mean.shard].pieces.span(down)
            flags[mean.shard] = _flag(mean)
            body[begin:end] = mean.body if len(mean.body) else 0
            parts = [flags[mean.shard], body[begin:end]]
            others = [rank for rank in range(world.size) if rank != world.rank]
            outgoing += [(rank, part) for rank in others for part in parts]
        world.swap(outgoing, incoming)
        if (flags == DAMAGED).any():
            raise UpdateDamaged(_damage_report(own_means))
        digests = {mean.shard: mean.digests for mean in own_means}
        return self._sealed(body, digests, overflows=bool((flags == OVERFLOWS).any()))

    def _sealed(
        self, body: U8, by_shard: Mapping[int, tuple[bytes, ...]], *, overflows: bool
    ) -> Frame:
        """Return the frame; its digests are those of this rank's bytes."""
        layout, down = self._down()
        digests: list[bytes] = []
        for share in self._shares if not overflows else ():
            begin, end = share.pieces.span(down)
            digests += by_shard.get(share.number) or piece_digests(
                down, share.pieces.size, body[begin:end]
            )
        mean = Mean(
            run=self._document.run,
            of=b"",
            shard=0,
            overflows=overflows,
            spoilt=(),
            digests=tuple(digests),
            body=body,
        )
        return Frame(*means.agreed(self._document, [mean], layout, down))


def _flag(mean: Mean) -> int:
    if mean.spoilt:
        return DAMAGED
    return OVERFLOWS if mean.overflows else GOOD


def _damage_report(own_means: Sequence[Mean]) -> str:
    names = [name for mean in own_means for name in mean.spoilt]
    if not names:
        return "a rank received an update that does not match its header"
    return f"the update of {', '.join(names)} was damaged in transit"
