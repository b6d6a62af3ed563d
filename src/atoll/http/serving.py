"""The path of a request: from a connection, through a handler, to its answer.

    admit     make TLS's handshake, if there is one, and await a head
    serve     parse the head, judge it, and find out how the body is to be read
    handle    ask the handler; a Later is parked
    answer    see `answering`, which comes back here for the next request

Methods without an underscore return at once, and run what takes time on the crew's
threads; those with one are on such a thread already.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from atoll.clock import Clock
from atoll.http.answering import Answering, OnError, fault
from atoll.http.answers import Waiting
from atoll.http.channel import Channel
from atoll.http.crew import Crew
from atoll.http.handshakes import Handshakes, OnUnfit
from atoll.http.later import Later
from atoll.http.leaving import Leaving, OnClosed
from atoll.http.limits import Limits
from atoll.http.lot import Lot
from atoll.http.parked_answers import ParkedAnswers
from atoll.http.problem import Problem, busy
from atoll.http.register import Register
from atoll.http.request import Request, read_request
from atoll.http.response import Response, as_problem
from atoll.http.watches import Collecting, Heading

Handle = Callable[[Request], Response | Later]

Judge = Callable[[Request], Response | None]
"""Says by its head alone what a request with a bulk body is refused with."""

Answer = TypeVar("Answer")

__all__ = ["Handle", "Judge", "OnClosed", "OnError", "OnUnfit", "Serving"]

SHORT_BYTES: Final = 1024
"""A request of which no more has come goes before those of which more has."""


class Serving:
    """Serves connections. The desk of every watch."""

    def __init__(
        self,
        handle: Handle,
        *,
        lot: Lot,
        crew: Crew,
        register: Register,
        limits: Limits,
        clock: Clock,
        on_error: OnError,
        on_closed: OnClosed,
        on_unfit: OnUnfit,
        judge: Judge,
        on_slow_reader: Callable[[Channel], None],
        owner: Callable[[Request], str],
    ) -> None:
        self._handle, self._lot, self._crew = handle, lot, crew
        self._judge = judge
        self._register, self._limits, self._clock = register, limits, clock
        self._on_error = on_error
        self._leaving = Leaving(
            lot=lot,
            crew=crew,
            register=register,
            limits=limits,
            clock=clock,
            on_closed=on_closed,
        )
        self._answering = Answering(
            self._leaving,
            lot=lot,
            crew=crew,
            register=register,
            limits=limits,
            clock=clock,
            on_error=on_error,
            on_slow_reader=on_slow_reader,
            owner=owner,
            follow=self._follow,
        )
        self._handshakes = Handshakes(self, lot=lot, crew=crew, on_unfit=on_unfit)

    # Arriving.

    def admit(self, channel: Channel, *, is_encrypted: bool) -> None:
        """Serve a new connection."""
        if is_encrypted:
            self._handshakes.greet(channel, self._after_s(self._limits.handshake_s))
        else:
            self.welcome(channel)

    def welcome(self, channel: Channel) -> None:
        self._await_head(channel, self._limits.head_s)

    def _follow(self, channel: Channel) -> None:
        limits = self._limits
        wait_s = limits.keep_alive_s if channel.is_verified else limits.head_s
        self._await_head(channel, wait_s)

    def _await_head(self, channel: Channel, wait_s: float) -> None:
        if self._register.is_closing:
            self.drop(channel)
            return
        channel.silent_since_s = self._clock.now_s()
        watch = Heading(
            self._lot,
            self,
            channel,
            until_s=self._after_s(wait_s),
            head_until_s=partial(self._after_s, self._limits.head_s),
            max_head_bytes=self._limits.max_head_bytes,
        )
        self._lot.park(watch)

    # Serving.

    def serve(self, channel: Channel) -> None:
        channel.silent_since_s = math.inf
        # Heartbeats and questions are short, and must not wait for a crowd's bodies.
        is_short = len(channel.ahead) <= SHORT_BYTES
        self._crew.small.submit(partial(self._serve, channel), is_urgent=is_short)

    def _serve(self, channel: Channel) -> None:
        try:
            request = read_request(channel, self._limits)
        except Problem as problem:
            self._answering.refuse_now(channel, problem)
            return
        is_whole = len(channel.ahead) >= request.body.length_bytes
        if request.is_bulk or not is_whole:
            # Lanes and memory are for those who may send something.
            refused = self._asked(request, partial(self._judge, request))
            if refused is not None:
                self._answering.answer_now(request, refused)
                return
        if request.is_bulk:
            run = partial(self._ask_and_answer, request, in_lane=True)
            refuse = partial(self.refuse, channel, busy())
            self._answering.enter(self._crew.lanes_in, request, run, refuse)
        elif not is_whole:
            until_s = self._after_s(self._limits.idle_s)
            self._lot.park(Collecting(self._lot, self, request, until_s=until_s))
        else:
            self._ask_and_answer(request)

    def handle(self, request: Request) -> None:
        self._crew.small.submit(partial(self._ask_and_answer, request))

    def _ask_and_answer(self, request: Request, *, in_lane: bool = False) -> None:
        answer = self._asked(request, partial(self._handle, request))
        if isinstance(answer, Later):
            until_s = self._after_s(answer.wait_s)
            self._lot.park(Waiting(self._lot, self, request, answer, until_s=until_s))
        else:
            self._answering.answer_now(request, answer, in_lane=in_lane)

    def expire(self, request: Request, later: Later) -> None:
        self._crew.small.submit(partial(self._expire, request, later))

    def _expire(self, request: Request, later: Later) -> None:
        answer = self._asked(request, later.default)
        assert isinstance(answer, Response)
        self._answering.answer_now(request, answer)

    def _asked(self, request: Request, ask: Callable[[], Answer]) -> Answer | Response:
        was_verified = request.connection.is_verified
        try:
            return ask()
        except Problem as problem:
            return as_problem(problem)
        except Exception as exc:  # a fault in one handler is no reason to stop serving
            self._on_error(request, exc)
            return as_problem(fault())
        finally:
            if request.connection.is_verified and not was_verified:
                self._register.verified(request.connection)

    @property
    def parked(self) -> ParkedAnswers:
        return self._answering.parked

    # What the other two do.

    def answer(self, request: Request, response: Response) -> None:
        self._answering.answer(request, response)

    def refuse(self, channel: Channel, problem: Problem) -> None:
        self._answering.refuse(channel, problem)

    def linger(self, channel: Channel) -> None:
        self._leaving.linger(channel)

    def lost(self, channel: Channel) -> None:
        self._leaving.lost(channel)

    def drop(self, channel: Channel) -> None:
        self._leaving.drop(channel)

    def tell(self, callback: Callable[[], None]) -> None:
        self._leaving.tell(callback)

    def _after_s(self, wait_s: float) -> float:
        return self._clock.now_s() + wait_s
