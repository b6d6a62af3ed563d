"""Who of a collective lives, and how a word gets from one rank to another.

Rule 1: rank 0 leads. It hears everybody, and everybody hears it; the others do not talk
        to each other.
Rule 2: a rank that is gone, or has said nothing for `silence_s`, ends the collective on
        every rank, with an error that names it. The leader tells the others.
Rule 3: the time in which this rank stood still itself is nobody's silence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from atoll.clock import Clock
from atoll.errors import CorruptError, Unreachable, UsageError
from atoll.exchange.collective.outbox import Outbox
from atoll.exchange.collective.words import Says, Word, packed, parsed
from atoll.exchange.collective.world import Gone, World

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

Heard = tuple[int, Word] | None
"""Who said what; None: the collective has failed."""


class Circle:
    """One rank's place among the others, from the moment that it is made."""

    def __init__(
        self, world: World, *, clock: Clock, silence_s: float = SILENCE_S
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
            rank: Outbox(world, rank, partial(self._lose_line, rank))
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

    def say(self, word: Word, *ranks: int) -> None:
        """Say a word to some ranks; to all that hear this one, if none is named."""
        data = packed(word)
        for rank in ranks or self._linked:
            self._boxes[rank].put(data)

    def part(self) -> None:
        """Let everybody go its own way: from now on nobody is missed."""
        with self._lock:
            self._is_apart = True
        self.say(Word(Says.APART))

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
            self.say(Word(Says.FAILED, parts=(why.encode(),)), *told)
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

    def _lose_line(self, rank: int, exc: Gone) -> None:
        self._lose(rank, f"is gone: {exc}")

    def _lose(self, rank: int, why: str) -> None:
        self.fail(f"{self.name_of(rank)} of the collective {why}.", but=rank)

    def _hear(self, rank: int) -> None:
        while not self._over.is_set():
            try:
                word = parsed(self._world.receive(rank))
            except (CorruptError, Gone) as exc:
                self._see_off(rank)
                self._lose(rank, f"is gone: {str(exc).rstrip('.')}")
                return
            self._heard_s[rank] = self._clock.now_s()
            match word.says:
                case Says.BEAT:
                    continue
                case Says.BYE:
                    self._see_off(rank)
                    return
                case Says.FAILED:
                    self.fail(word.text, but=rank)
                    return
            self.words.put((rank, word))
            if word.says is Says.APART:
                return

    def _see_off(self, rank: int) -> None:
        with self._lock:
            self._gone.add(rank)
        if self._gone >= set(self._linked):
            self._all_gone.set()

    def _beat(self) -> None:
        pause_s = self._silence_s / BEATS
        beat, before_s = packed(Word(Says.BEAT)), self._clock.now_s()
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
