"""Small answers that their reader does not take: they wait without a thread.

Rule 1: a connection has at most one answer, because its next request is not served
        before that answer is gone. All of them together have `max_parked_bytes`.
Rule 2: an answer must go on: within `idle_s` by some bytes, and at `min_bytes_per_s` on
        average. Otherwise its connection is closed.
Rule 3: when there are too many bytes, connections without a verified token are closed
        first, oldest first; then the oldest of the origin with the most bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from atoll.clock import Clock
from atoll.http.channel import Channel
from atoll.http.desk import Exit
from atoll.http.limits import Limits
from atoll.http.lot import WRITE, Lot, Watch
from atoll.http.pace import Gone


class ParkedAnswers:
    """Sends the rest of answers as their readers take them.

    Its state belongs to the lot's thread.
    """

    def __init__(
        self,
        lot: Lot,
        exit: Exit,
        *,
        limits: Limits,
        clock: Clock,
        on_shed: Callable[[Channel], None],
    ) -> None:
        self._lot, self._exit, self._limits, self._clock = lot, exit, limits, clock
        self._on_shed = on_shed
        self._answers: dict[ParkedAnswer, None] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def park(
        self, channel: Channel, rest: memoryview, then: Callable[[], None]
    ) -> None:
        """Send `rest`, then call `then`, on the lot's thread. From any thread."""
        answer = ParkedAnswer(self, channel, rest, then, now_s=self._clock.now_s())
        self._lot.call(partial(self._add, answer))

    # The following methods are called on the lot's thread.

    def until_s(self, answer: ParkedAnswer) -> float:
        """Return when an answer that does not go on is given up."""
        limits, now_s = self._limits, self._clock.now_s()
        slowest_s = limits.idle_s + answer.sent_bytes / limits.min_bytes_per_s
        return min(now_s + limits.idle_s, answer.since_s + slowest_s)

    def finish(self, answer: ParkedAnswer) -> None:
        """Go on with a connection whose answer is sent."""
        if self._remove(answer):
            answer.then()

    def lose(self, answer: ParkedAnswer) -> None:
        """Close a connection whose reader has closed it."""
        if self._remove(answer):
            self._exit.lost(answer.channel)

    def drop(self, answer: ParkedAnswer) -> None:
        """Close a connection whose reader is too slow."""
        if self._remove(answer):
            self._on_shed(answer.channel)
            self._exit.drop(answer.channel)

    def _add(self, answer: ParkedAnswer) -> None:
        answer.until_s = self.until_s(answer)
        self._answers[answer] = None
        self._bytes += answer.size_bytes
        self._lot.add(answer)
        while self._bytes > self._limits.max_parked_bytes:
            self.drop(self._least_deserving())

    def _remove(self, answer: ParkedAnswer) -> bool:
        if not self._lot.take(answer):
            return False
        del self._answers[answer]
        self._bytes -= answer.size_bytes
        return True

    def _least_deserving(self) -> ParkedAnswer:
        for answer in self._answers:
            if not answer.channel.is_verified:
                return answer
        held: Counter[str] = Counter()
        for answer in self._answers:
            held[answer.channel.origin] += answer.size_bytes
        ((most, _),) = held.most_common(1)
        return next(each for each in self._answers if each.channel.origin == most)


class ParkedAnswer(Watch):
    """The unsent rest of one answer."""

    def __init__(
        self,
        answers: ParkedAnswers,
        channel: Channel,
        rest: memoryview,
        then: Callable[[], None],
        *,
        now_s: float,
    ) -> None:
        super().__init__(channel, until_s=now_s, events=WRITE)
        self.then, self.since_s = then, now_s
        self.size_bytes = len(rest)
        self._answers, self._rest = answers, rest

    @property
    def sent_bytes(self) -> int:
        return self.size_bytes - len(self._rest)

    def begin(self) -> None:
        """Wait for the selector: it reports a socket that can be written at once."""

    def ready(self, events: int) -> None:
        try:
            self._rest = self.channel.send_some(self._rest)
        except Gone:
            self._answers.lose(self)
            return
        if len(self._rest):
            self.until_s = self._answers.until_s(self)
        else:
            self._answers.finish(self)

    def due(self) -> None:
        self._answers.drop(self)
