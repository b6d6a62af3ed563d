"""How rank 0 leads a collective from round to round.

Rule 1: rounds are reduced one after the other. Which is next the leader says, once
        every rank has announced its update: so all do the same in the same order.
Rule 2: the run's coordinator says who counts, before; and has the outcome, durable,
        before any rank is told that it may be taken.
Rule 3: whatever the coordinator does not want of them together, each rank publishes for
        itself: others take part, the run has moved, or bytes were spoilt. Nothing is
        lost by that but the short way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from queue import Empty

from atoll.clock import Clock
from atoll.errors import AtollError, RunEnded
from atoll.exchange.base import Outcome
from atoll.exchange.collective.attending import Attending, position_bytes
from atoll.exchange.collective.circle import LEADER, Circle
from atoll.exchange.collective.flights import Key
from atoll.exchange.collective.words import Says, Word
from atoll.exchange.coordinator import CoordinatorExchange
from atoll.protocol import Position
from atoll.wire import Header, pack, unpack

TICK_S = 0.5
"""How late a deadline, or the end of the run, may be noticed."""

log = logging.getLogger("atoll")


class Leading:
    """Rank 0's thread."""

    def __init__(
        self,
        circle: Circle,
        attending: Attending,
        inner: CoordinatorExchange,
        *,
        size: int,
        clock: Clock,
        where: Callable[[], Position | None],
        deadline_s: Callable[[], float],
    ) -> None:
        self._circle, self._attending, self._inner = circle, attending, inner
        self._size, self._clock = size, clock
        self._where, self._deadline_s = where, deadline_s
        self._ready: dict[Key, dict[int, Header | None]] = {}
        self._waits: dict[int, Key | None] = {}
        self._asked: dict[int, Key | None] = {}
        self._since_s: dict[Key, float] = {}
        self._made: dict[int, Word] = {}
        self._runs: dict[int, str] = {}
        self._parts = False

    def lead(self) -> None:
        """Lead until somebody leaves, or the collective fails."""
        while not self._parts:
            if not self._listen():
                return
            self._look_at_time()
            due = self._due()
            for key in due:
                self._round(key)
                if self._circle.failure is not None:
                    return
            if not due:
                self._unstick()
        self._circle.part()

    def _listen(self) -> bool:
        """Take in a word, or let a little time pass; False: it is all over."""
        try:
            heard = self._circle.words.get(timeout=TICK_S)
        except Empty:
            return True
        if heard is None:
            return False
        rank, word = heard
        match word.says:
            case Says.HELLO:
                self._welcome(rank, word)
            case Says.READY:
                header = unpack(word.parts[0]) if word.parts else None
                self._ready.setdefault(word.key, {})[rank] = header
                self._since_s.setdefault(word.key, self._clock.now_s())
            case Says.WAITS:
                self._waits[rank] = word.key if word.parts else None
            case Says.MADE:
                self._made[rank] = word
            case Says.LEAVING:
                self._parts = True
        return True

    def _welcome(self, rank: int, word: Word) -> None:
        """Learn a rank's name, and let all know it."""
        name, run = (part.decode() for part in word.parts)
        names = self._circle.names
        names[rank], self._runs[rank] = name, run
        for other, there in self._runs.items():
            if there != run:
                self._circle.fail(
                    f"{self._circle.name_of(rank)} of the collective has joined run "
                    f"{run!r}, and {self._circle.name_of(other)} run {there!r}. "
                    "Give all ranks the same run."
                )
                return
        known = [names.get(each, "").encode() for each in range(self._size)]
        self._circle.say(Word(Says.NAMES, parts=tuple(known)))

    def _unstick(self) -> None:
        """If every rank stands still for another's update, have them announced.

        Ranks that are out of phase can wait for each other's fragments; none of them
        would come to its next send point.
        """
        blocked = [
            rank
            for rank, key in self._waits.items()
            if key is not None and rank in self._ready.get(key, {})
        ]
        if len(blocked) < self._size or self._asked == self._waits:
            return
        self._asked = dict(self._waits)
        for key, ready in self._ready.items():
            missing = set(range(self._size)) - ready.keys()
            if LEADER in missing:
                self._attending.want(key)
            if others := missing - {LEADER}:
                self._circle.say(Word(Says.WANTED, *key), *sorted(others))

    def _due(self) -> list[Key]:
        """Return the rounds that everybody has announced, in their order."""
        due = [key for key, ready in self._ready.items() if len(ready) == self._size]
        return sorted(due, key=lambda key: key[::-1])

    def _round(self, key: Key) -> None:
        """Have one round reduced and committed, or published by each for itself."""
        ready = self._ready.pop(key)
        del self._since_s[key]
        updates = tuple(each for _, each in sorted(ready.items()) if each is not None)
        try:
            word = self._decided(key, updates)
        except RunEnded as exc:
            word = Word(Says.ENDED, *key, (str(exc).encode(),))
        except AtollError as exc:
            log.warning(
                "round %d of fragment %d goes by the coordinator: %s", *key[::-1], exc
            )
            word = Word(Says.ALONE, *key)
        if self._circle.failure is None:
            self._circle.say(word)
            self._attending.heed(word)

    def _decided(self, key: Key, updates: tuple[Header, ...]) -> Word:
        """Return the last word on a round."""
        if len(updates) < self._size:
            return Word(Says.ALONE, *key)
        asked = self._inner.agree(updates)
        if not isinstance(asked, Outcome):
            return Word(Says.ALONE, *key)
        heads = tuple(pack(each) for each in (asked.agreed.header, *updates))
        go = Word(Says.GO, *key, heads)
        self._made.clear()
        self._circle.say(go)
        self._made[LEADER] = self._attending.make(go)
        vouchers = self._vouchers(key)
        if vouchers is None:
            return Word(Says.ALONE, *key)
        brought = self._inner.agree(updates, self._attending.made(key), vouchers)
        if not isinstance(brought, Outcome):
            return Word(Says.ALONE, *key)
        receipts = brought.receipt, brought.agreed.receipt
        parts = (position_bytes(brought.position), *receipts)
        return Word(Says.COMMITTED, *key, parts)

    def _vouchers(self, key: Key) -> tuple[bytes, ...] | None:
        """Return every rank's word for what was made; None: they do not agree."""
        while len(self._made) < self._size:
            if not self._listen():
                return None
        made = [self._made[rank] for rank in range(self._size)]
        said = [word.parts for word in made]
        if any(len(parts) != 2 or parts[0] != said[0][0] for parts in said):
            why = [parts[2].decode() for parts in said if len(parts) > 2]
            log.warning(
                "round %d of fragment %d goes by the coordinator: %s",
                *key[::-1],
                "; ".join(why) or "the ranks have made different outcomes of it",
            )
            return None
        return tuple(parts[1] for parts in said)

    def _look_at_time(self) -> None:
        """End what will never be: rounds beyond the last, and ranks that hang."""
        position, now_s = self._where(), self._clock.now_s()
        last = position.last_round if position else None
        for key, since_s in list(self._since_s.items()):
            if last is not None and key[1] > last:
                self._end(key, last)
            elif now_s - since_s > self._deadline_s():
                self._circle.fail(self._late(key, now_s - since_s))

    def _end(self, key: Key, last: int) -> None:
        del self._ready[key], self._since_s[key]
        text = f"Round {key[1]} will not open: the run ended with round {last}."
        word = Word(Says.ENDED, *key, (text.encode(),))
        self._circle.say(word)
        self._attending.heed(word)

    def _late(self, key: Key, waited_s: float) -> str:
        ready = self._ready[key]
        names = _listed(
            [
                self._circle.name_of(each)
                for each in range(self._size)
                if each not in ready
            ]
        )
        return (
            f"{names} of the collective did not publish round {key[1]} of fragment "
            f"{key[0]} in {waited_s:.0f} s, which is limits.deadline_max_s."
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
