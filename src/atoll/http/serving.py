"""The path of a request: from a complete head, through a handler, to what follows.

    serve     parse the head, judge it, and find out how the body is to be read
    handle    ask the handler; a Later is parked
    answer    send here if it is small, in a lane if it is not
    follow    park for the next request, or linger and close

Methods without an underscore return at once, and run what takes time on the crew's
threads; those with one are on such a thread already.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from atoll.clock import Clock
from atoll.http.channel import Channel, Cut, Gone, Stalled
from atoll.http.crew import Crew
from atoll.http.lanes import Lanes, Queued
from atoll.http.later import Later
from atoll.http.limits import Limits
from atoll.http.lot import Lot
from atoll.http.problem import Problem
from atoll.http.register import Register
from atoll.http.request import Request, read_request
from atoll.http.response import Response, as_problem
from atoll.http.sending import send, send_last
from atoll.http.stream import Stream
from atoll.http.watches import (
    Collecting,
    Greeting,
    Heading,
    Lingering,
    Skipping,
    Streaming,
    Waiting,
)

Handle = Callable[[Request], Response | Later]
OnError = Callable[[Request | None, Exception], None]
OnClosed = Callable[[object], None]

RETRY_AFTER_S: Final = 5


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
    ) -> None:
        self._handle, self._lot, self._crew = handle, lot, crew
        self._register, self._limits, self._clock = register, limits, clock
        self._on_error, self._on_closed = on_error, on_closed

    # Arriving.

    def admit(self, channel: Channel, *, is_encrypted: bool) -> None:
        """Serve a new connection."""
        if is_encrypted:
            self.greet(channel, self._after_s(self._limits.handshake_s))
        else:
            self._await_head(channel, self._limits.head_s)

    def greet(self, channel: Channel, until_s: float) -> None:
        self._crew.small.submit(partial(self._greet, channel, until_s))

    def _greet(self, channel: Channel, until_s: float) -> None:
        try:
            events = channel.handshake()
        except Gone:
            self.drop(channel)
            return
        if not events:
            self._await_head(channel, self._limits.head_s)
            return
        self._lot.park(
            Greeting(self._lot, self, channel, until_s=until_s, events=events)
        )

    def _await_head(self, channel: Channel, wait_s: float) -> None:
        if self._register.is_closing:
            self.drop(channel)
            return
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
        self._crew.small.submit(partial(self._serve, channel))

    def _serve(self, channel: Channel) -> None:
        try:
            request = read_request(channel, self._limits)
        except Problem as problem:
            self._refuse(channel, problem)
            return
        if request.is_bulk:
            run = partial(self._ask_and_answer, request, in_lane=True)
            refuse = partial(self.refuse, channel, _busy())
            self._enter(self._crew.lanes_in, request, run, refuse)
        elif len(channel.ahead) < request.body.length_bytes:
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
            self._answer(request, answer, in_lane=in_lane)

    def expire(self, request: Request, later: Later) -> None:
        self._crew.small.submit(partial(self._expire, request, later))

    def _expire(self, request: Request, later: Later) -> None:
        answer = self._asked(request, later.default)
        assert isinstance(answer, Response)
        self._answer(request, answer)

    def _asked(
        self, request: Request, ask: Callable[[], Response | Later]
    ) -> Response | Later:
        try:
            return ask()
        except Problem as problem:
            return as_problem(problem)
        except Exception as exc:  # a fault in one handler is no reason to stop serving
            self._on_error(request, exc)
            return as_problem(_fault())

    # Answering.

    def answer(self, request: Request, response: Response) -> None:
        if response.is_bulk(self._limits.small_bytes):
            self._answer(request, response)
        else:
            self._crew.small.submit(partial(self._send, request, response))

    def _answer(
        self, request: Request, response: Response, *, in_lane: bool = False
    ) -> None:
        if in_lane or not response.is_bulk(self._limits.small_bytes):
            self._send(request, response)
            return
        run = partial(self._send, request, response)
        refuse = partial(self._give_up, request, response)
        self._enter(self._crew.lanes_out, request, run, refuse)

    def _give_up(self, request: Request, response: Response) -> None:
        if response.done is not None:
            self.tell(response.done)
        self.answer(request, as_problem(_busy()))

    def _send(self, request: Request, response: Response) -> None:
        is_last = self._is_last(request)
        sent_before = request.connection.bytes_out
        try:
            send(request, response, is_last=is_last)
        except Gone:
            self.lost(request.connection)
        except (Stalled, Cut):
            self.drop(request.connection)
        except Exception as exc:  # a file that is not there, a trailer that failed
            self._on_error(request, exc)
            if request.connection.bytes_out > sent_before:
                self.drop(request.connection)
            else:
                self._refuse(request.connection, _fault())
        else:
            self._sent(request, response, is_last=is_last)
        finally:
            if response.done is not None:
                response.done()

    def _sent(self, request: Request, response: Response, *, is_last: bool) -> None:
        after = partial(self._linger if is_last else self._follow, request)
        if isinstance(response.body, Stream) and request.method != "HEAD":
            watch = Streaming(
                self._lot,
                self,
                request.connection,
                response.body,
                is_chunked=not request.is_old,
                after=after,
            )
            self._lot.park(watch)
        else:
            after()

    def _is_last(self, request: Request) -> bool:
        body = request.body
        # What was awaited and never asked for may come, or may not.
        is_lost = body.is_broken or body.is_awaited
        unread = body.remaining - len(request.connection.ahead)
        is_long = unread > self._limits.drain_bytes
        return request.is_last or is_lost or is_long or self._register.is_closing

    def refuse(self, channel: Channel, problem: Problem) -> None:
        self._crew.small.submit(partial(self._refuse, channel, problem))

    def _refuse(self, channel: Channel, problem: Problem) -> None:
        try:
            send_last(channel, as_problem(problem))
        except Gone:
            self.lost(channel)
        except Stalled:
            self.drop(channel)
        else:
            self._linger_on(channel)

    # What follows.

    def _follow(self, request: Request) -> None:
        request.body.skip_ahead()
        left = request.body.remaining
        if not left:
            self.follow(request.connection)
            return
        until_s = self._after_s(self._limits.idle_s)
        self._lot.park(
            Skipping(self._lot, self, request.connection, until_s=until_s, size=left)
        )

    def follow(self, channel: Channel) -> None:
        self._await_head(channel, self._limits.keep_alive_s)

    def _linger(self, request: Request) -> None:
        self._linger_on(request.connection)

    def _linger_on(self, channel: Channel) -> None:
        if channel.is_gone:
            self.lost(channel)
            return
        channel.end_sending()
        until_s = self._after_s(self._limits.linger_s)
        self._lot.park(Lingering(self._lot, self, channel, until_s=until_s))

    def lost(self, channel: Channel) -> None:
        """Close a connection that the other side has closed."""
        if channel.tag is not None:
            self.tell(partial(self._on_closed, channel.tag))
        self.drop(channel)

    def drop(self, channel: Channel) -> None:
        """Close a connection that we are done with."""
        channel.close()
        self._register.remove(channel)

    def tell(self, callback: Callable[[], None]) -> None:
        self._crew.tell.submit(callback)

    def _enter(
        self,
        lanes: Lanes,
        request: Request,
        run: Callable[[], None],
        refuse: Callable[[], None],
    ) -> None:
        is_incoming = lanes is self._crew.lanes_in
        queued = Queued(
            request.connection,
            until_s=self._after_s(self._limits.lane_wait_s),
            size_bytes=request.body.length_bytes if is_incoming else 0,
            run=run,
            refuse=refuse,
            lanes=lanes,
            lot=self._lot,
        )
        lanes.enter(queued)

    def _after_s(self, wait_s: float) -> float:
        return self._clock.now_s() + wait_s


def _busy() -> Problem:
    return Problem(
        503,
        "busy",
        f"Too many bodies are on their way. Try again in {RETRY_AFTER_S} s.",
        headers={"retry-after": str(RETRY_AFTER_S)},
    )


def _fault() -> Problem:
    return Problem(500, "fault", "Something failed here. Its events say what.")
