"""Bulk bodies travel in lanes: few at once, so that small requests are never starved.

Who finds no lane, or too many bytes in flight, waits in the lot: nothing of it is read,
and that is the back-pressure.

Rule 1: an owner, which is an island at its origin, has at most `lanes_per_owner`.
Rule 2: the next lane goes to the origin, then to the owner, that has the fewest; then
        to the oldest request.
Rule 3: while a body waits that could not be let in, transfers that are slower than a
        rate which rises with the number of waiting bodies are ended. So are those of
        an origin or an owner beyond its fair share, up to a higher rate. The call is
        safe to repeat, and its owner repeats it.
Rule 4: only time spent waiting for the other side counts, measured over `lane_grace_s`
        of it at least, from when the first body had to wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from atoll.clock import Clock
from atoll.http.channel import Channel
from atoll.http.limits import Limits
from atoll.http.lot import Lot, Watch
from atoll.http.threads import Threads

Owner = tuple[str, str]
"""An origin, and the island there; an empty name for callers without one."""


@dataclass
class _Mark:
    """What a transfer had moved when its present measurement began."""

    moved_bytes: int
    waited_s: float


class Lanes:
    """Runs bulk transfers, each on its own thread.

    Its state belongs to the lot's thread.
    """

    def __init__(
        self,
        *,
        lot: Lot,
        threads: Threads,
        limits: Limits,
        clock: Clock,
        max_bytes: int | None,
        is_sending: bool,
        on_cut: Callable[[Channel], None],
    ) -> None:
        self._lot, self._threads = lot, threads
        self._limits, self._clock = limits, clock
        self._max_bytes, self._is_sending = max_bytes, is_sending
        self._on_cut = on_cut
        self._waiting: list[Queued] = []
        self._active: dict[Queued, _Mark | None] = {}
        self._bytes = 0
        lot.every_tick(self._tick)

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def enter(self, queued: Queued) -> None:
        """Run it when there is a lane. From any thread."""
        self._lot.call(partial(self._arrive, queued))

    def leave_queue(self, queued: Queued) -> None:
        """Forget one that waited too long. On the lot's thread."""
        self._waiting.remove(queued)
        self._admit()

    def _arrive(self, queued: Queued) -> None:
        self._lot.add(queued)
        self._waiting.append(queued)
        self._admit()

    def _admit(self) -> None:
        while (queued := self._next()) is not None and self._has_room(queued):
            self._waiting.remove(queued)
            self._lot.take(queued)
            self._active[queued] = None
            self._bytes += queued.size_bytes
            self._threads.submit(partial(self._run, queued))

    def _next(self) -> Queued | None:
        """Return the waiting body that gets the next lane."""
        of_origin, of_owner = self._held()
        allowed = [
            each
            for each in self._waiting
            if not each.owner[1] or of_owner[each.owner] < self._limits.lanes_per_owner
        ]
        return min(
            allowed,
            key=lambda each: (of_origin[each.owner[0]], of_owner[each.owner]),
            default=None,
        )

    def _held(self) -> tuple[Counter[str], Counter[Owner]]:
        """Return how many lanes each origin has, and each owner."""
        of_owner = Counter(each.owner for each in self._active)
        of_origin: Counter[str] = Counter()
        for (origin, _), count in of_owner.items():
            of_origin[origin] += count
        return of_origin, of_owner

    def _has_room(self, queued: Queued) -> bool:
        # One that is larger than the bound alone would otherwise wait for ever.
        if len(self._active) >= self._limits.bulk_lanes:
            return False
        if self._max_bytes is None or self._bytes == 0:
            return True
        return self._bytes + queued.size_bytes <= self._max_bytes

    def _run(self, queued: Queued) -> None:
        try:
            queued.run()
        finally:
            self._lot.call(partial(self._leave, queued))

    def _leave(self, queued: Queued) -> None:
        del self._active[queued]
        self._bytes -= queued.size_bytes
        self._admit()

    # Slow transfers.

    def _tick(self) -> None:
        blocked = self._next()
        if blocked is None:
            if not self._waiting and any(self._active.values()):
                self._active = dict.fromkeys(self._active)
            return
        rates = {each: self._rate(each) for each in self._active}
        for each in self._too_slow(blocked, rates):
            self._active[each] = None
            self._on_cut(each.channel)
            each.channel.cut(is_sending=self._is_sending)

    def _rate(self, queued: Queued) -> float | None:
        """Return the bytes per second of waiting; None if that is not known yet."""
        channel, mark = queued.channel, self._active[queued]
        now = _Mark(
            channel.bytes_in + channel.bytes_out,
            channel.waited_s(self._clock.now_s()),
        )
        if mark is None:
            self._active[queued] = now
            return None
        waited_s = now.waited_s - mark.waited_s
        if waited_s < self._limits.lane_grace_s:
            return None
        if waited_s > 2 * self._limits.lane_grace_s:
            self._active[queued] = now  # what was fast long ago may stand still now
        return (now.moved_bytes - mark.moved_bytes) / waited_s

    def _too_slow(
        self, blocked: Queued, rates: dict[Queued, float | None]
    ) -> list[Queued]:
        """Return the transfers to end.

        Of those below the rate, the slowest, as many as there are bodies waiting. If
        none is below it, the slowest one beyond its fair share.
        """
        limits = self._limits
        wanted = limits.waiting_bytes_per_s * min(len(self._waiting), limits.max_rises)
        known = {each: rate for each, rate in rates.items() if rate is not None}
        crawling = [each for each, rate in known.items() if rate < wanted]
        if crawling:
            return sorted(crawling, key=lambda each: known[each])[: len(self._waiting)]
        greedy = [
            each
            for each, rate in known.items()
            if rate < limits.fair_bytes_per_s and self._is_beyond_share(each, blocked)
        ]
        return sorted(greedy, key=lambda each: known[each])[:1]

    def _is_beyond_share(self, queued: Queued, blocked: Queued) -> bool:
        """Return whether a transfer's origin or owner has two more than the blocked.

        With two more the lane that is taken away leaves it no worse off than the other.
        """
        of_origin, of_owner = self._held()
        mine, other = queued.owner, blocked.owner
        if mine[0] != other[0]:
            return of_origin[mine[0]] >= of_origin[other[0]] + 2
        return of_owner[mine] >= of_owner[other] + 2


class Queued(Watch):
    """A connection that waits for its lane, unread."""

    def __init__(
        self,
        channel: Channel,
        *,
        owner: str,
        until_s: float,
        size_bytes: int,
        run: Callable[[], None],
        refuse: Callable[[], None],
        lanes: Lanes,
        lot: Lot,
    ) -> None:
        super().__init__(channel, until_s=until_s, events=0)
        self.owner: Owner = channel.origin, owner
        self.size_bytes = size_bytes
        self.run = run
        self._refuse = refuse
        self._lanes = lanes
        self._lot = lot

    def begin(self) -> None:
        """Look at nothing: the body stays where it is."""

    def ready(self, events: int) -> None:
        """React to nothing: no event was asked for."""

    def due(self) -> None:
        if self._lot.take(self):
            self._lanes.leave_queue(self)
            self._refuse()
