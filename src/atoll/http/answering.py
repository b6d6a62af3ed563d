"""The way of an answer: here if it is small, in a lane if it is not; then what follows.

A small answer is sent as far as the socket takes it, and its rest is parked: no thread
waits for a slow reader. Only lanes have threads that wait.

Methods without an underscore or a `_now` return at once, and run what takes time on the
crew's threads; those with one are on such a thread already.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from atoll.clock import Clock
from atoll.http.answers import Streaming
from atoll.http.channel import Channel, Cut
from atoll.http.crew import Crew
from atoll.http.lanes import Lanes, Queued
from atoll.http.leaving import Leaving
from atoll.http.limits import Limits
from atoll.http.lot import Lot
from atoll.http.pace import Gone, Stalled
from atoll.http.parked_answers import ParkedAnswers
from atoll.http.problem import Problem, busy
from atoll.http.register import Register
from atoll.http.request import Request
from atoll.http.response import Response, as_problem
from atoll.http.sending import packed, packed_last, send
from atoll.http.stream import Stream
from atoll.http.watches import Skipping

OnError = Callable[[Request | None, Exception], None]


class Answering:
    """Sends answers, and hands connections on to `follow` for their next request."""

    def __init__(
        self,
        leaving: Leaving,
        *,
        lot: Lot,
        crew: Crew,
        register: Register,
        limits: Limits,
        clock: Clock,
        on_error: OnError,
        on_slow_reader: Callable[[Channel], None],
        owner: Callable[[Request], str],
        follow: Callable[[Channel], None],
    ) -> None:
        self._owner = owner
        self.parked = ParkedAnswers(
            lot, leaving, limits=limits, clock=clock, on_shed=on_slow_reader
        )
        self._leaving, self._lot, self._crew = leaving, lot, crew
        self._register, self._limits, self._clock = register, limits, clock
        self._on_error, self._follow = on_error, follow

    def answer(self, request: Request, response: Response) -> None:
        if response.is_bulk(self._limits.small_bytes):
            self.answer_now(request, response)
        else:
            self._crew.small.submit(partial(self._send, request, response))

    def answer_now(
        self, request: Request, response: Response, *, in_lane: bool = False
    ) -> None:
        if in_lane or not response.is_bulk(self._limits.small_bytes):
            self._send(request, response)
            return
        run = partial(self._send, request, response)
        refuse = partial(self._give_up, request, response)
        self.enter(self._crew.lanes_out, request, run, refuse)

    def refuse(self, channel: Channel, problem: Problem) -> None:
        self._crew.small.submit(partial(self.refuse_now, channel, problem))

    def refuse_now(self, channel: Channel, problem: Problem) -> None:
        data = packed_last(as_problem(problem))
        self._post(channel, data, partial(self._leaving.linger, channel))

    def enter(
        self,
        lanes: Lanes,
        request: Request,
        run: Callable[[], None],
        refuse: Callable[[], None],
    ) -> None:
        """Run what moves a bulk body when there is a lane for it."""
        is_incoming = lanes is self._crew.lanes_in
        queued = Queued(
            request.connection,
            owner=self._owner(request),
            until_s=self._clock.now_s() + self._limits.lane_wait_s,
            size_bytes=request.body.length_bytes if is_incoming else 0,
            run=run,
            refuse=refuse,
            lanes=lanes,
            lot=self._lot,
        )
        lanes.enter(queued)

    def _give_up(self, request: Request, response: Response) -> None:
        if response.done is not None:
            self._leaving.tell(response.done)
        self.answer(request, as_problem(busy()))

    def _post(self, channel: Channel, data: bytes, then: Callable[[], None]) -> None:
        """Send `data` without waiting; what does not go out now is parked."""
        try:
            rest = channel.send_some(memoryview(data))
        except Gone:
            self._leaving.lost(channel)
            return
        if len(rest):
            self.parked.park(channel, rest, then)
        else:
            then()

    def _send(self, request: Request, response: Response) -> None:
        if response.is_bulk(self._limits.small_bytes):
            self._send_bulk(request, response)
        else:
            self._send_small(request, response)

    def _send_small(self, request: Request, response: Response) -> None:
        is_last = self._is_last(request)
        try:
            data = packed(request, response, is_last=is_last)
        except Exception as exc:  # a file that is not there, or too short
            self._on_error(request, exc)
            self.refuse_now(request.connection, fault())
            return
        finally:
            if response.done is not None:
                response.done()
        then = partial(self._sent, request, response, is_last=is_last)
        self._post(request.connection, data, then)

    def _send_bulk(self, request: Request, response: Response) -> None:
        is_last = self._is_last(request)
        sent_before = request.connection.bytes_out
        try:
            send(request, response, is_last=is_last)
        except Gone:
            self._leaving.lost(request.connection)
        except (Stalled, Cut):
            self._leaving.drop(request.connection)
        except Exception as exc:  # a file that is not there, a trailer that failed
            self._on_error(request, exc)
            if request.connection.bytes_out > sent_before:
                self._leaving.drop(request.connection)
            else:
                self.refuse_now(request.connection, fault())
        else:
            self._sent(request, response, is_last=is_last)
        finally:
            if response.done is not None:
                response.done()

    def _is_last(self, request: Request) -> bool:
        body = request.body
        # What was awaited and never asked for may come, or may not.
        is_lost = body.is_broken or body.is_awaited
        unread = body.remaining - len(request.connection.ahead)
        is_long = unread > self._limits.drain_bytes
        return request.is_last or is_lost or is_long or self._register.is_closing

    def _sent(self, request: Request, response: Response, *, is_last: bool) -> None:
        channel = request.connection
        linger = partial(self._leaving.linger, channel)
        after = linger if is_last else partial(self._go_on, request)
        if isinstance(response.body, Stream) and request.method != "HEAD":
            watch = Streaming(
                self._lot,
                self._leaving,
                channel,
                response.body,
                is_chunked=not request.is_old,
                after=after,
            )
            self._lot.park(watch)
        else:
            after()

    def _go_on(self, request: Request) -> None:
        request.body.skip_ahead()
        follow = partial(self._follow, request.connection)
        left = request.body.remaining
        if not left:
            follow()
            return
        watch = Skipping(
            self._lot,
            self._leaving,
            request.connection,
            until_s=self._clock.now_s() + self._limits.idle_s,
            size=left,
            after=follow,
        )
        self._lot.park(watch)


def fault() -> Problem:
    """Return what is said when a handler failed."""
    return Problem(500, "fault", "Something failed here. Its events say what.")
