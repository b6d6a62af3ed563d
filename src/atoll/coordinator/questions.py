"""Questions for an outcome that is not there yet: they stay open for a while.

Rule 1: a question ends when its connection does: `forget` leaves nothing behind.
Rule 2: an island has one question per fragment, and a newer one answers the older; it
        has `MAX_PER_ISLAND` in all. An origin has `MAX_PER_ORIGIN`, and all together
        have `MAX_OPEN`. Beyond each, the oldest is answered as if its time were up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from atoll.coordinator.service import Service
from atoll.errors import AtollError, RunEnded
from atoll.exchange import LONG_POLL_S, Call, OutcomeCall, Reply
from atoll.protocol import Position

MAX_PER_ISLAND = 64
"""Fragments whose outcomes one island awaits at once; usually one or two are."""

MAX_PER_ORIGIN = 2048
"""More islands than this are not behind one address."""

MAX_OPEN = 4096
"""As many as there may be connections, each of which can ask one question."""

_NEVER = float("inf")

Answer = Callable[[Reply | Exception], None]


@dataclass(frozen=True)
class Question:
    """One that stays open; whoever asks has been heard, and is not heard again."""

    call: OutcomeCall
    answer: Answer
    until_s: float
    origin: str
    """The network that it came from, where that is known."""

    @property
    def island(self) -> tuple[str, int] | None:
        beat = self.call.beat
        return (beat.island, beat.incarnation) if beat else None


class Questions:
    """Puts calls to a service, and answers each when there is something to say."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._open: dict[Hashable, Question] = {}
        """By ticket, oldest first."""

        self._by_fragment: dict[tuple[str, int, int], Hashable] = {}
        self._per_origin: Counter[str] = Counter()
        self._per_island: Counter[tuple[str, int]] = Counter()
        self._rounds: tuple[int, ...] = ()
        """The open rounds when all were last looked at."""

        self._due_s = _NEVER
        """When the first of them has waited long enough."""

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
        """Answer a call, now or within the time that it may wait.

        `ticket` names the question for `forget`. False: it was refused.
        """
        try:
            reply = self._service.handle(call, now_s)
        except (AtollError, RunEnded) as exc:
            answer(exc)
            return False
        if isinstance(call, OutcomeCall) and call.wait_s and _may_wait(reply):
            until_s = now_s + min(call.wait_s, LONG_POLL_S)
            question = Question(call, answer, until_s, origin)
            self._add(object() if ticket is None else ticket, question, now_s)
            self._due_s = min(self._due_s, until_s)
        else:
            answer(reply)
        return True

    def settle(self, now_s: float) -> None:
        """Answer who asked for an outcome that is there, or has waited long enough."""
        if not self._open:
            return
        state = self._service.state
        is_stuck = state.is_stuck(now_s)
        rounds = tuple([round.number for round in state.rounds])
        if state.move is not None and state.move.is_over:
            self._due_s = now_s
        if not is_stuck and rounds == self._rounds and now_s < self._due_s:
            return  # most messages change nothing for those who wait
        due = [
            ticket
            for ticket, each in self._open.items()
            if self._is_due(each, now_s, is_stuck)
        ]
        answered = [self._remove(ticket) for ticket in due]
        self._rounds = rounds
        self._due_s = min(
            [each.until_s for each in self._open.values()], default=_NEVER
        )
        for question in answered:
            self._answer(question, now_s)

    def forget(self, ticket: Hashable) -> None:
        """Drop a question whose asker has gone. Safe to repeat."""
        if ticket in self._open:
            self._remove(ticket)

    def _add(self, ticket: Hashable, question: Question, now_s: float) -> None:
        for other in self._exceeding(question):
            self._answer(self._remove(other), now_s)
        self._open[ticket] = question
        self._per_origin[question.origin] += 1
        if question.island is not None:
            self._per_island[question.island] += 1
            self._by_fragment[(*question.island, question.call.fragment)] = ticket

    def _exceeding(self, question: Question) -> list[Hashable]:
        """Return which questions a new one replaces."""
        island, origin = question.island, question.origin
        if island is not None:
            older = self._by_fragment.get((*island, question.call.fragment))
            if older is not None:
                return [older]
            if self._per_island[island] >= MAX_PER_ISLAND:
                return [self._oldest(lambda each: each.island == island)]
        if origin and self._per_origin[origin] >= MAX_PER_ORIGIN:
            return [self._oldest(lambda each: each.origin == origin)]
        if len(self._open) >= MAX_OPEN:
            ((most, _),) = self._per_origin.most_common(1)
            return [self._oldest(lambda each: each.origin == most)]
        return []

    def _oldest(self, is_meant: Callable[[Question], bool]) -> Hashable:
        return next(ticket for ticket, each in self._open.items() if is_meant(each))

    def _remove(self, ticket: Hashable) -> Question:
        question = self._open.pop(ticket)
        self._per_origin[question.origin] -= 1
        if not self._per_origin[question.origin]:
            del self._per_origin[question.origin]
        if question.island is not None:
            self._per_island[question.island] -= 1
            if not self._per_island[question.island]:
                del self._per_island[question.island]
            key = (*question.island, question.call.fragment)
            if self._by_fragment.get(key) is ticket:
                del self._by_fragment[key]
        return question

    def _is_due(self, question: Question, now_s: float, is_stuck: bool) -> bool:
        call, state = question.call, self._service.state
        if call.round < state.rounds[call.fragment].number:
            return True
        if state.move is not None and state.move.is_over:
            return True
        if is_stuck and call.beat and state.wanted(call.beat.island, now_s):
            return True
        return now_s >= question.until_s

    def _answer(self, question: Question, now_s: float) -> None:
        """Say what is known now; that a question stayed open renews no lease."""
        beat, state = question.call.beat, self._service.state
        call = replace(question.call, wait_s=0.0, beat=None)
        try:
            reply = self._service.handle(call, now_s)
        except (AtollError, RunEnded) as exc:
            question.answer(exc)
            return
        if reply is None and beat is not None:
            reply = state.position(now_s, island=beat.island)
        question.answer(reply)


def _may_wait(reply: Reply) -> bool:
    """Return whether a question may stay open: no outcome yet, nothing asked for."""
    if isinstance(reply, Position):
        return not reply.wanted and not reply.lost
    return reply is None
