"""The control channel of a collective: messages between ranks, and failure detection.

Rule 1: rank 0 leads. It exchanges messages with all ranks; the others exchange none
        with each other.
Rule 2: a rank that is gone, or silent for `silence_s`, ends the collective on every
        rank, with an error that names it. The leader reports it to the others.
Rule 3: time in which this rank itself was stopped does not count as silence.

Messages to one rank are queued and sent by a thread: a stopped rank takes none, and the
others must not wait for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from queue import SimpleQueue
from struct import Struct, error

from atoll.errors import CorruptError, Unreachable, UsageError
from atoll.exchange.collective.world import CollectiveWorld, RankUnreachable
from atoll.runtime import Clock

MAX_MESSAGE_BYTES = 2**28
MAX_PARTS = 2**16

_HEAD = Struct("<BIQI")
_SIZE = Struct("<I")


class MessageKind(IntEnum):
    """The kind of a message; the numbers are those on the wire."""

    BEAT = 1
    """The sender is alive."""

    HELLO = 2
    """The sender's name in the run, and the run's id."""

    NAMES = 3
    """All names, by rank."""

    READY = 4
    """The header of the sender's update; none if an earlier incarnation published."""

    GO = 5
    """Reduce a round: the header of its outcome, and those of all updates, by rank."""

    REDUCED = 6
    """The digest of the reduced header and the sender's voucher, or an error."""

    COMMITTED = 7
    """The outcome is durable: the run's position, and its receipts for the state after
    the round and for the outcome."""

    PUBLISH_DIRECTLY = 8
    """Publish the update of this round to the coordinator."""

    ENDED = 9
    """The round will never open."""

    LEAVING = 10
    """The sender leaves: end the collective, all ranks use the coordinator."""

    COLLECTIVE_ENDED = 11
    """The collective has ended: every rank uses the coordinator alone."""

    BYE = 12
    """The last message of the sender."""

    WAITS = 14
    """The sender is blocked on this round; without a part: it no longer is."""

    WANTED = 15
    """All ranks are blocked, and this round needs the receiver's update."""

    FAILED = 13
    """The collective has failed, and the reason."""


@dataclass(frozen=True)
class ControlMessage:
    """One message. Fields that its kind does not need are zero or empty."""

    kind: MessageKind
    fragment: int = 0
    round: int = 0
    parts: tuple[bytes, ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        """Its fragment and round."""
        return self.fragment, self.round

    @property
    def text(self) -> str:
        """Its text for users, if it has one."""
        return self.parts[0].decode(errors="replace") if self.parts else ""


def packed(message: ControlMessage) -> bytes:
    """Return the bytes of a message on the wire."""
    head = _HEAD.pack(message.kind, message.fragment, message.round, len(message.parts))
    sizes = b"".join(_SIZE.pack(len(part)) for part in message.parts)
    return head + sizes + b"".join(message.parts)


def parsed(data: bytes) -> ControlMessage:
    """Return the message in some bytes.

    Raises:
        CorruptError: they are not exactly one message.
    """
    try:
        kind, fragment, round, count = _HEAD.unpack_from(data)
        start = _HEAD.size + min(count, MAX_PARTS) * _SIZE.size
        sizes = [size for (size,) in _SIZE.iter_unpack(data[_HEAD.size : start])]
        if len(sizes) != count or start + sum(sizes) != len(data):
            raise ValueError
        parts = []
        for size in sizes:
            parts.append(data[start : start + size])
            start += size
        return ControlMessage(MessageKind(kind), fragment, round, tuple(parts))
    except (ValueError, error) as exc:
        raise CorruptError(
            f"{len(data)} bytes of a rank are no message of a collective. "
            "Run the same version of Atoll on all ranks."
        ) from exc


class SendQueue:
    """Sends messages to one rank. `on_lost` is called once, if it is unreachable."""

    def __init__(
        self,
        world: CollectiveWorld,
        rank: int,
        on_lost: Callable[[RankUnreachable], None],
    ) -> None:
        self._world, self._rank, self._on_lost = world, rank, on_lost
        self._changed = threading.Condition()
        self._messages: deque[bytes] = deque()
        self._is_over = False
        name = f"atoll-to-rank-{rank}"
        threading.Thread(target=self._send, name=name, daemon=True).start()

    def put(self, message: bytes, *, if_idle: bool = False) -> None:
        """Queue a message; with `if_idle` only if the queue is empty."""
        with self._changed:
            if not (if_idle and self._messages):
                self._messages.append(message)
                self._changed.notify_all()

    def flush(self, wait_s: float) -> None:
        """Return when the queue is empty, or after `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._messages, wait_s)

    def close(self) -> None:
        """Stop after the queued messages. Safe to repeat."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _send(self) -> None:
        while (message := self._next()) is not None:
            try:
                self._world.send(self._rank, message)
            except RankUnreachable as exc:
                self._drop()
                self._on_lost(exc)
                return
            with self._changed:
                self._messages.popleft()
                self._changed.notify_all()

    def _drop(self) -> None:
        with self._changed:
            self._messages.clear()
            self._changed.notify_all()

    def _next(self) -> bytes | None:
        """Return the next message, which stays in the queue until it is sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._messages)
            return self._messages[0] if self._messages else None


LEADER = 0
SILENCE_S = 15.0
"""How long a rank may send nothing, e.g. because its process is stopped."""

REPORT_S = 1.0
"""How long a failure may take to reach a rank, before it is raised here."""

SHORTEST_SILENCE_S = 0.5
BEATS = 5
"""Heartbeats per `silence_s`: several may be late."""

REMEDY = (
    "Rounds that were committed are safe with the coordinator. Start the collective "
    "again, or join without it."
)

Received = tuple[int, ControlMessage] | None
"""A sender's rank and its message; None: the collective has failed."""


class ControlChannel:
    """Sends and receives the control messages of one rank. Starts its threads."""

    def __init__(
        self, world: CollectiveWorld, *, clock: Clock, silence_s: float = SILENCE_S
    ) -> None:
        if not silence_s >= SHORTEST_SILENCE_S:
            raise UsageError(
                f"silence_s={silence_s:g} is too short to tell a busy rank from a dead "
                f"one. Give at least {SHORTEST_SILENCE_S:g}."
            )
        self._world, self._clock, self._silence_s = world, clock, silence_s
        self.messages: SimpleQueue[Received] = SimpleQueue()
        """Received messages, without heartbeats."""

        self.names: dict[int, str] = {}
        self.failure: Unreachable | None = None
        """The error that ended the collective, if one did."""

        self.on_failure: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._has_failed = threading.Event()
        self._is_apart = False
        self._linked = range(1, world.size) if self.leads else range(1)
        self._received_s: dict[int, float] = {}
        self._closed: set[int] = set()
        self._all_closed = threading.Event()
        if not self._linked:
            self._all_closed.set()
        self._queues = {
            rank: SendQueue(world, rank, partial(self._lose_line, rank))
            for rank in self._linked
        }
        self._start()

    @property
    def leads(self) -> bool:
        return self._world.rank == LEADER

    def _start(self) -> None:
        self._received_s = dict.fromkeys(self._linked, self._clock.now_s())
        for rank in self._linked:
            self._in_background(f"atoll-rank-{rank}", partial(self._receive, rank))
        if self._linked:
            self._in_background("atoll-beats", self._beat)

    def send(self, message: ControlMessage, *ranks: int) -> None:
        """Send a message to some ranks; by default to all that this one reaches."""
        data = packed(message)
        for rank in ranks or self._linked:
            self._queues[rank].put(data)

    def dissolve(self) -> None:
        """End the collective in order: from now on no missing rank is a failure."""
        with self._lock:
            self._is_apart = True
        self.send(ControlMessage(MessageKind.COLLECTIVE_ENDED))

    def end(self) -> None:
        """Stop sending and receiving, except queued messages. Safe to repeat."""
        self._over.set()
        for queue in self._queues.values():
            queue.close()

    def flush(self, seconds: float) -> None:
        """Return when all queued messages are sent, or after `seconds`."""
        for queue in self._queues.values():
            queue.flush(seconds)

    def wait_failure(self, seconds: float) -> bool:
        """Return whether the collective has failed, waiting at most `seconds`."""
        return self._has_failed.wait(seconds)

    def wait_farewells(self, seconds: float) -> None:
        """Return when all ranks have sent their last message, or after `seconds`."""
        self._all_closed.wait(seconds)

    def fail(self, reason: str, *, but: int | None = None) -> None:
        """End the collective on every rank except `but`, unless it has ended."""
        with self._lock:
            if self._over.is_set() or self._is_apart:
                return
            self._over.set()
        # The others first: the error may end this process, and the others would then
        # report this rank as the one that failed.
        others = [rank for rank in self._linked if rank != but]
        if others:
            message = ControlMessage(MessageKind.FAILED, parts=(reason.encode(),))
            self.send(message, *others)
        for rank in others:
            self._queues[rank].flush(REPORT_S)
        self.failure = Unreachable(f"{reason} {REMEDY}")
        self._has_failed.set()
        self.messages.put(None)
        self.on_failure()

    def name_of(self, rank: int) -> str:
        """Return a rank with its island's name, for messages to users."""
        name = self.names.get(rank)
        return f"Island {name!r} (rank {rank})" if name else f"Rank {rank}"

    def _lose_line(self, rank: int, exc: RankUnreachable) -> None:
        self._lose(rank, f"is gone: {exc}")

    def _lose(self, rank: int, reason: str) -> None:
        self.fail(f"{self.name_of(rank)} of the collective {reason}.", but=rank)

    def _receive(self, rank: int) -> None:
        while not self._over.is_set():
            try:
                message = parsed(self._world.receive(rank))
            except (CorruptError, RankUnreachable) as exc:
                self._close(rank)
                self._lose(rank, f"is gone: {str(exc).rstrip('.')}")
                return
            self._received_s[rank] = self._clock.now_s()
            match message.kind:
                case MessageKind.BEAT:
                    continue
                case MessageKind.BYE:
                    self._close(rank)
                    return
                case MessageKind.FAILED:
                    self.fail(message.text, but=rank)
                    return
            self.messages.put((rank, message))
            if message.kind is MessageKind.COLLECTIVE_ENDED:
                return

    def _close(self, rank: int) -> None:
        with self._lock:
            self._closed.add(rank)
        if self._closed >= set(self._linked):
            self._all_closed.set()

    def _beat(self) -> None:
        pause_s = self._silence_s / BEATS
        beat, before_s = packed(ControlMessage(MessageKind.BEAT)), self._clock.now_s()
        while not self._over.wait(pause_s):
            now_s = self._clock.now_s()
            slept_s, before_s = now_s - before_s - pause_s, now_s
            for rank in self._linked:
                if slept_s > pause_s:
                    self._received_s[rank] += slept_s
            for rank in self._linked:
                if rank not in self._closed:
                    self._queues[rank].put(beat, if_idle=True)
                silent_s = self._clock.now_s() - self._received_s[rank]
                if silent_s > self._silence_s and rank not in self._closed:
                    self._lose(rank, f"has sent nothing for {silent_s:.0f} s")

    def _in_background(self, name: str, act: Callable[[], None]) -> None:
        threading.Thread(target=act, name=name, daemon=True).start()
