"""Long polls: calls for an outcome that does not exist yet stay open for a while.

Rule 1: a long poll ends with its connection: `forget` leaves nothing behind.
Rule 2: an island has one long poll per fragment, and a newer one answers the older; it
        has at most `MAX_PER_ISLAND`. An origin has at most `MAX_PER_ORIGIN`, and all
        together have `MAX_OPEN`. Beyond a limit, the oldest is answered as if its time
        were up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from atoll.coordinator.service import Service
from atoll.errors import AtollError, RunEnded
from atoll.exchange.calls import LONG_POLL_S, Call, OutcomeCall, Reply
from atoll.protocol import Position

MAX_PER_ISLAND = 64
"""Fragments whose outcomes one island awaits; usually one or two."""

MAX_PER_ORIGIN = 2048
"""An address rarely has more islands than this behind it."""

MAX_OPEN = 4096
"""The largest number of connections, each of which has at most one poll."""

_NEVER = float("inf")

Answer = Callable[[Reply | Exception], None]


@dataclass(frozen=True)
class LongPoll:
    """An open call; its heartbeat has been processed, and is not processed again."""

    call: OutcomeCall
    answer: Answer
    until_s: float
    origin: str
    """The network of the caller, if known."""

    @property
    def island(self) -> tuple[str, int] | None:
        beat = self.call.beat
        return (beat.island, beat.incarnation) if beat else None


class LongPolls:
    """Passes calls to a service, and answers each when its outcome is ready."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._open: dict[Hashable, LongPoll] = {}
        """Open polls by ticket, oldest first."""

        self._by_fragment: dict[tuple[str, int, int], Hashable] = {}
        self._per_origin: Counter[str] = Counter()
        self._per_island: Counter[tuple[str, int]] = Counter()
        self._rounds: tuple[int, ...] = ()
        """The open rounds at the last check of all polls."""

        self._due_s = _NEVER
        """Time at which the first poll times out."""

    def __len__(self) -> int:
        return len(self._open)

    def put(
        self,
        call: Call,
        answer: Answer,
        now_s: float,
        *,
        ticket: Hashable = None,
        origin: str = "",
    ) -> bool:
        """Answer a call, now or before its timeout.

        `ticket` names the poll for `forget`. Returns False if the call was refused.
        """
        try:
            reply = self._service.handle(call, now_s)
        except (AtollError, RunEnded) as exc:
            answer(exc)
            return False
        if isinstance(call, OutcomeCall) and call.wait_s and _may_wait(reply):
            until_s = now_s + min(call.wait_s, LONG_POLL_S)
            poll = LongPoll(call, answer, until_s, origin)
            self._add(object() if ticket is None else ticket, poll, now_s)
            self._due_s = min(self._due_s, until_s)
        else:
            answer(reply)
        return True

    def settle(self, now_s: float) -> None:
        """Answer the polls whose outcome is ready or whose time is up."""
        if not self._open:
            return
        state = self._service.state
        is_stuck = state.is_stuck(now_s)
        rounds = tuple([round.number for round in state.rounds])
        if state.move is not None and state.move.is_over:
            self._due_s = now_s
        if not is_stuck and rounds == self._rounds and now_s < self._due_s:
            return  # most messages change nothing for open polls
        due = [
            ticket
            for ticket, poll in self._open.items()
            if self._is_due(poll, now_s, is_stuck)
        ]
        answered = [self._remove(ticket) for ticket in due]
        self._rounds = rounds
        self._due_s = min(
            [poll.until_s for poll in self._open.values()], default=_NEVER
        )
        for poll in answered:
            self._answer(poll, now_s)

    def forget(self, ticket: Hashable) -> None:
        """Drop a poll whose connection is closed. Safe to repeat."""
        if ticket in self._open:
            self._remove(ticket)

    def _add(self, ticket: Hashable, poll: LongPoll, now_s: float) -> None:
        for other in self._exceeding(poll):
            self._answer(self._remove(other), now_s)
        self._open[ticket] = poll
        self._per_origin[poll.origin] += 1
        if poll.island is not None:
            self._per_island[poll.island] += 1
            self._by_fragment[(*poll.island, poll.call.fragment)] = ticket

    def _exceeding(self, poll: LongPoll) -> list[Hashable]:
        """Return the tickets of the polls that a new one replaces."""
        island, origin = poll.island, poll.origin
        if island is not None:
            older = self._by_fragment.get((*island, poll.call.fragment))
            if older is not None:
                return [older]
            if self._per_island[island] >= MAX_PER_ISLAND:
                return [self._oldest(lambda other: other.island == island)]
        if origin and self._per_origin[origin] >= MAX_PER_ORIGIN:
            return [self._oldest(lambda other: other.origin == origin)]
        if len(self._open) >= MAX_OPEN:
            ((busiest, _),) = self._per_origin.most_common(1)
            return [self._oldest(lambda other: other.origin == busiest)]
        return []

    def _oldest(self, matches: Callable[[LongPoll], bool]) -> Hashable:
        return next(ticket for ticket, poll in self._open.items() if matches(poll))

    def _remove(self, ticket: Hashable) -> LongPoll:
        poll = self._open.pop(ticket)
        self._per_origin[poll.origin] -= 1
        if not self._per_origin[poll.origin]:
            del self._per_origin[poll.origin]
        if poll.island is not None:
            self._per_island[poll.island] -= 1
            if not self._per_island[poll.island]:
                del self._per_island[poll.island]
            key = (*poll.island, poll.call.fragment)
            if self._by_fragment.get(key) is ticket:
                del self._by_fragment[key]
        return poll

    def _is_due(self, poll: LongPoll, now_s: float, is_stuck: bool) -> bool:
        call, state = poll.call, self._service.state
        if call.round < state.rounds[call.fragment].number:
            return True
        if state.move is not None and state.move.is_over:
            return True
        if is_stuck and call.beat and state.wanted(call.beat.island, now_s):
            return True
        return now_s >= poll.until_s

    def _answer(self, poll: LongPoll, now_s: float) -> None:
        """Answer with the present state; an open poll renews no lease."""
        beat, state = poll.call.beat, self._service.state
        call = replace(poll.call, wait_s=0.0, beat=None)
        try:
            reply = self._service.handle(call, now_s)
        except (AtollError, RunEnded) as exc:
            poll.answer(exc)
            return
        if reply is None and beat is not None:
            reply = state.position(now_s, island=beat.island)
        poll.answer(reply)


def _may_wait(reply: Reply) -> bool:
    """Return whether a poll may stay open: no outcome, and no state is wanted."""
    if isinstance(reply, Position):
        return not reply.wanted and not reply.lost
    return reply is None
