"""Questions for an outcome that is not there yet: they stay open for a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from atoll.coordinator.service import Service
from atoll.errors import AtollError, RunEnded
from atoll.exchange import LONG_POLL_S, Call, OutcomeCall, Reply
from atoll.protocol import Position

_NEVER = float("inf")

Answer = Callable[[Reply | Exception], None]


@dataclass(frozen=True)
class Question:
    """One that stays open; whoever asks has been heard, and is not heard again."""

    call: OutcomeCall
    answer: Answer
    until_s: float


class Questions:
    """Puts calls to a service, and answers each when there is something to say."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._open: list[Question] = []
        self._rounds: tuple[int, ...] = ()
        """The open rounds when all were last looked at."""

        self._due_s = _NEVER
        """When the first of them has waited long enough."""

    def put(self, call: Call, answer: Answer, now_s: float) -> bool:
        """Answer a call, now or within the time that it may wait.

        False: it was refused.
        """
        try:
            reply = self._service.handle(call, now_s)
        except (AtollError, RunEnded) as exc:
            answer(exc)
            return False
        if isinstance(call, OutcomeCall) and call.wait_s and _may_wait(reply):
            until_s = now_s + min(call.wait_s, LONG_POLL_S)
            self._open.append(Question(call, answer, until_s))
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
        due: list[Question] = []
        still: list[Question] = []
        for each in self._open:
            (due if self._is_due(each, now_s, is_stuck) else still).append(each)
        self._open, self._rounds = still, rounds
        self._due_s = min([each.until_s for each in still], default=_NEVER)
        for question in due:
            self._answer(question, now_s)

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
