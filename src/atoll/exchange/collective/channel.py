"""The control channel of a collective: messages between ranks, and failure detection.

Rule 1: rank 0 leads. It hears all ranks, and all hear it; the others do not talk to
        each other.
Rule 2: a rank that is gone, or silent for `silence_s`, ends the collective on every
        rank, with an error that names it. The leader reports it to the others.
Rule 3: time in which this rank stood still itself does not count as silence.

Messages to one rank are queued and sent by a thread: a stopped rank takes none, and no
other may have to wait for that.
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

from atoll.clock import Clock
from atoll.errors import CorruptError, Unreachable, UsageError
from atoll.exchange.collective.world import CollectiveWorld, RankUnreachable

MAX_WORD_BYTES = 2**28
MAX_PARTS = 2**16

_HEAD = Struct("<BIQI")
_SIZE = Struct("<I")


class MessageKind(IntEnum):
    """What a word is about; the numbers are those on the wire."""

    BEAT = 1
    """I live."""

    HELLO = 2
    """My name in the run, and which run it is."""

    NAMES = 3
    """All names, by rank."""

    READY = 4
    """My update is sealed: its header. Without one: an earlier life's stands."""

    GO = 5
    """Reduce a round: the header of its outcome, and those of all updates, by rank."""

    MADE = 6
    """I have reduced it: the digest of its header and my voucher, or what is wrong."""

    COMMITTED = 7
    """The outcome is durable: the run's position, and its receipts for the state after
    the round and for the outcome."""

    ALONE = 8
    """Publish your update of this round yourself."""

    ENDED = 9
    """The round will never open."""

    LEAVING = 10
    """I shall go: let the rest be done by each for itself."""

    APART = 11
    """From now on everybody is for itself."""

    BYE = 12
    """You hear no more of me."""

    WAITS = 14
    """I stand still for this round; without a part: no more."""

    WANTED = 15
    """Everybody stands still, and this round waits for you."""

    FAILED = 13
    """The collective cannot go on, and why."""


@dataclass(frozen=True)
class ControlMessage:
    """One word. What it does not need is zero or empty."""

    says: MessageKind
    fragment: int = 0
    round: int = 0
    parts: tuple[bytes, ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        """The fragment and the round that it is about."""
        return self.fragment, self.round

    @property
    def text(self) -> str:
        """What it says to people, if it does."""
        return self.parts[0].decode(errors="replace") if self.parts else ""


def packed(word: ControlMessage) -> bytes:
    """Return a word as it travels."""
    head = _HEAD.pack(word.says, word.fragment, word.round, len(word.parts))
    sizes = b"".join(_SIZE.pack(len(part)) for part in word.parts)
    return head + sizes + b"".join(word.parts)


def parsed(data: bytes) -> ControlMessage:
    """Return the word in some bytes.

    Raises:
        CorruptError: they hold none, or more.
    """
    try:
        says, fragment, round, count = _HEAD.unpack_from(data)
        start = _HEAD.size + min(count, MAX_PARTS) * _SIZE.size
        sizes = [each for (each,) in _SIZE.iter_unpack(data[_HEAD.size : start])]
        if len(sizes) != count or start + sum(sizes) != len(data):
            raise ValueError
        parts = []
        for size in sizes:
            parts.append(data[start : start + size])
            start += size
        return ControlMessage(MessageKind(says), fragment, round, tuple(parts))
    except (ValueError, error) as exc:
        raise CorruptError(
            f"{len(data)} bytes of a rank are no word of a collective. "
            "Run the same version of Atoll on all ranks."
        ) from exc


class SendQueue:
    """Sends to one rank. `gone` is called once, if that is not there any more."""

    def __init__(
        self, world: CollectiveWorld, rank: int, gone: Callable[[RankUnreachable], None]
    ) -> None:
        self._world, self._rank, self._gone = world, rank, gone
        self._changed = threading.Condition()
        self._words: deque[bytes] = deque()
        self._is_over = False
        name = f"atoll-to-rank-{rank}"
        threading.Thread(target=self._send, name=name, daemon=True).start()

    def put(self, word: bytes, *, if_idle: bool = False) -> None:
        """Let a word be sent after those before it, or only if there are none."""
        with self._changed:
            if not (if_idle and self._words):
                self._words.append(word)
                self._changed.notify_all()

    def flush(self, wait_s: float) -> None:
        """Return when everything was taken, or time is up."""
        with self._changed:
            self._changed.wait_for(lambda: not self._words, wait_s)

    def close(self) -> None:
        """Send nothing beyond what is on its way. Safe to repeat."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _send(self) -> None:
        while (word := self._next()) is not None:
            try:
                self._world.send(self._rank, word)
            except RankUnreachable as exc:
                self._drop()
                self._gone(exc)
                return
            with self._changed:
                self._words.popleft()
                self._changed.notify_all()

    def _drop(self) -> None:
        with self._changed:
            self._words.clear()
            self._changed.notify_all()

    def _next(self) -> bytes | None:
        """Return the next word, which stays in the box until it was taken."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._words)
            return self._words[0] if self._words else None


LEADER = 0
SILENCE_S = 15.0
"""How long a rank may say nothing, as a process does that is stopped."""

TELL_S = 1.0
"""How long the news of a failure may take to a rank, before it is raised here."""

SHORTEST_SILENCE_S = 0.5
BEATS = 5
"""So many fit in a silence: several may be late."""

GO_ON = (
    "Rounds that were committed are safe with the coordinator. Start the collective "
    "again, or join without it."
)

Heard = tuple[int, ControlMessage] | None
"""Who said what; None: the collective has failed."""


class ControlChannel:
    """One rank's place among the others, from the moment that it is made."""

    def __init__(
        self, world: CollectiveWorld, *, clock: Clock, silence_s: float = SILENCE_S
    ) -> None:
        if not silence_s >= SHORTEST_SILENCE_S:
            raise UsageError(
                f"silence_s={silence_s:g} is too short to tell a busy rank from a dead "
                f"one. Give at least {SHORTEST_SILENCE_S:g}."
            )
        self._world, self._clock, self._silence_s = world, clock, silence_s
        self.words: SimpleQueue[Heard] = SimpleQueue()
        """What the others have said, apart from that they live."""

        self.names: dict[int, str] = {}
        self.failure: Unreachable | None = None
        """Why the collective cannot go on, if it cannot."""

        self.on_failure: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._has_failed = threading.Event()
        self._is_apart = False
        leads = world.rank == LEADER
        self._linked = range(1, world.size) if leads else range(1)
        self._heard_s: dict[int, float] = {}
        self._gone: set[int] = set()
        self._all_gone = threading.Event()
        if not self._linked:
            self._all_gone.set()
        self._boxes = {
            rank: SendQueue(world, rank, partial(self._lose_line, rank))
            for rank in self._linked
        }
        self._start()

    @property
    def leads(self) -> bool:
        return self._world.rank == LEADER

    def _start(self) -> None:
        self._heard_s = dict.fromkeys(self._linked, self._clock.now_s())
        for rank in self._linked:
            self._in_background(f"atoll-rank-{rank}", partial(self._hear, rank))
        if self._linked:
            self._in_background("atoll-beats", self._beat)

    def say(self, word: ControlMessage, *ranks: int) -> None:
        """Say a word to some ranks; to all that hear this one, if none is named."""
        data = packed(word)
        for rank in ranks or self._linked:
            self._boxes[rank].put(data)

    def part(self) -> None:
        """Let everybody go its own way: from now on nobody is missed."""
        with self._lock:
            self._is_apart = True
        self.say(ControlMessage(MessageKind.APART))

    def end(self) -> None:
        """Say and hear no more, but for what is said already. Safe to repeat."""
        self._over.set()
        for box in self._boxes.values():
            box.close()

    def flush(self, seconds: float) -> None:
        """Return when the others have taken what was said to them, or time is up."""
        for box in self._boxes.values():
            box.flush(seconds)

    def wait_failure(self, seconds: float) -> bool:
        """Return whether the collective has failed, within some seconds from now."""
        return self._has_failed.wait(seconds)

    def wait_farewells(self, seconds: float) -> None:
        """Return when all have said that they say no more, or time is up."""
        self._all_gone.wait(seconds)

    def fail(self, why: str, *, but: int | None = None) -> None:
        """End the collective on every rank, unless it has ended."""
        with self._lock:
            if self._over.is_set() or self._is_apart:
                return
            self._over.set()
        # The others first: who raises here may end its process, and be blamed for it.
        told = [rank for rank in self._linked if rank != but]
        if told:
            self.say(ControlMessage(MessageKind.FAILED, parts=(why.encode(),)), *told)
        for rank in told:
            self._boxes[rank].flush(TELL_S)
        self.failure = Unreachable(f"{why} {GO_ON}")
        self._has_failed.set()
        self.words.put(None)
        self.on_failure()

    def name_of(self, rank: int) -> str:
        """Return what people know a rank by."""
        name = self.names.get(rank)
        return f"Island {name!r} (rank {rank})" if name else f"Rank {rank}"

    def _lose_line(self, rank: int, exc: RankUnreachable) -> None:
        self._lose(rank, f"is gone: {exc}")

    def _lose(self, rank: int, why: str) -> None:
        self.fail(f"{self.name_of(rank)} of the collective {why}.", but=rank)

    def _hear(self, rank: int) -> None:
        while not self._over.is_set():
            try:
                word = parsed(self._world.receive(rank))
            except (CorruptError, RankUnreachable) as exc:
                self._see_off(rank)
                self._lose(rank, f"is gone: {str(exc).rstrip('.')}")
                return
            self._heard_s[rank] = self._clock.now_s()
            match word.says:
                case MessageKind.BEAT:
                    continue
                case MessageKind.BYE:
                    self._see_off(rank)
                    return
                case MessageKind.FAILED:
                    self.fail(word.text, but=rank)
                    return
            self.words.put((rank, word))
            if word.says is MessageKind.APART:
                return

    def _see_off(self, rank: int) -> None:
        with self._lock:
            self._gone.add(rank)
        if self._gone >= set(self._linked):
            self._all_gone.set()

    def _beat(self) -> None:
        pause_s = self._silence_s / BEATS
        beat, before_s = packed(ControlMessage(MessageKind.BEAT)), self._clock.now_s()
        while not self._over.wait(pause_s):
            now_s = self._clock.now_s()
            slept_s, before_s = now_s - before_s - pause_s, now_s
            for rank in self._linked:
                if slept_s > pause_s:
                    self._heard_s[rank] += slept_s
            for rank in self._linked:
                if rank not in self._gone:
                    self._boxes[rank].put(beat, if_idle=True)
                silent_s = self._clock.now_s() - self._heard_s[rank]
                if silent_s > self._silence_s and rank not in self._gone:
                    self._lose(rank, f"has said nothing for {silent_s:.0f} s")

    def _in_background(self, name: str, act: Callable[[], None]) -> None:
        threading.Thread(target=act, name=name, daemon=True).start()
