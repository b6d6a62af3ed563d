"""The path of a request: from a connection, through a handler, to its response.

    admit     make the TLS handshake, if there is one, and wait for a head
    serve     parse the head, judge it, and decide how the body is read
    handle    call the handler; a deferred response is parked
    answer    send a small response from the small pool, a bulk response in a lane;
              then wait for the next request, or close

A small response is sent as far as the socket takes it, and the rest is parked: no
thread waits for a slow reader. Only lanes have threads that wait.

Methods without an underscore or a `_now` never block, and run slow work on the
thread pools; those with one are on such a thread already.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final, TypeVar

from atoll.http import parked_connections
from atoll.http.connection import (
    BodyCutShort,
    Connection,
    ConnectionClosed,
    TransferStalled,
)
from atoll.http.handshake import OnHandshakeFault, TlsHandshakes
from atoll.http.registry import ConnectionCloser, ListenerParts
from atoll.http.request import Request, read_request
from atoll.http.response import (
    BodyPart,
    DeferredResponse,
    FilePart,
    Problem,
    Response,
    as_problem,
    busy,
    encoded_last,
    has_body,
    head_of,
    parts_of,
)
from atoll.http.threads import BulkLanes, QueuedTransfer

Handle = Callable[[Request], Response | DeferredResponse]

Judge = Callable[[Request], Response | None]
"""Returns the refusal of a request by its head, before its body is read, or None."""

Answer = TypeVar("Answer")

SHORT_BYTES: Final = 1024
"""A request is urgent in the pool if no more bytes of it have arrived."""


class RequestServer:
    """Serves connections, from their handshake to their end."""

    def __init__(
        self,
        parts: ListenerParts,
        handle: Handle,
        *,
        judge: Judge,
        on_refused_handshake: OnHandshakeFault,
    ) -> None:
        self._parts, self._handle, self._judge = parts, handle, judge
        self._event_loop, self._limits = parts.event_loop, parts.limits
        closer = ConnectionCloser(parts)
        self._sender = sender = ResponseSender(parts, closer, self._await_next)
        self._handshakes = TlsHandshakes(
            self,
            event_loop=parts.event_loop,
            pools=parts.pools,
            on_handshake_fault=on_refused_handshake,
        )
        # As `RequestHandler` and `HandshakeHandler`.
        self.answer, self.refuse = sender.answer, sender.refuse
        self.linger, self.lost, self.drop = closer.linger, closer.lost, closer.drop
        self.run_callback = closer.run_callback

    # New connections.

    def admit(self, connection: Connection, *, is_encrypted: bool) -> None:
        """Serve a new connection."""
        if is_encrypted:
            self._handshakes.advance(
                connection, self._after_s(self._limits.handshake_s)
            )
        else:
            self.await_request(connection)

    def await_request(self, connection: Connection) -> None:
        self._await_head(connection, self._limits.head_s)

    def _await_next(self, connection: Connection) -> None:
        limits = self._limits
        wait_s = limits.keep_alive_s if connection.is_verified else limits.head_s
        self._await_head(connection, wait_s)

    def _await_head(self, connection: Connection, wait_s: float) -> None:
        if self._parts.registry.is_closing:
            self.drop(connection)
            return
        connection.silent_since_s = self._parts.clock.now_s()
        watch = parked_connections.ParkedForHead(
            event_loop=self._event_loop,
            handler=self,
            connection=connection,
            until_s=self._after_s(wait_s),
            head_until_s=partial(self._after_s, self._limits.head_s),
            max_head_bytes=self._limits.max_head_bytes,
        )
        self._event_loop.park(watch)

    # Requests.

    def serve(self, connection: Connection) -> None:
        connection.silent_since_s = math.inf
        # Heartbeats and queries are short, and must not wait for the bodies of many.
        is_short = len(connection.ahead) <= SHORT_BYTES
        self._parts.pools.small.submit(
            partial(self._serve, connection), is_urgent=is_short
        )

    def _serve(self, connection: Connection) -> None:
        try:
            request = read_request(connection, self._limits)
        except Problem as problem:
            self._sender.refuse_now(connection, problem)
            return
        is_whole = len(connection.ahead) >= request.body.length_bytes
        if request.is_bulk or not is_whole:
            # Lanes and memory are only for clients that may send a body.
            refused = self._guarded(request, partial(self._judge, request))
            if refused is not None:
                self._sender.answer_now(request, refused)
                return
        if request.is_bulk:
            run = partial(self._ask_and_answer, request, in_lane=True)
            refuse = partial(self.refuse, connection, busy())
            self._sender.enter(self._parts.pools.lanes_in, request, run, refuse)
        elif not is_whole:
            until_s = self._after_s(self._limits.idle_s)
            self._event_loop.park(
                parked_connections.ParkedForBody(
                    event_loop=self._event_loop,
                    handler=self,
                    connection=connection,
                    request=request,
                    until_s=until_s,
                )
            )
        else:
            self._ask_and_answer(request)

    def handle(self, request: Request) -> None:
        self._parts.pools.small.submit(partial(self._ask_and_answer, request))

    def _ask_and_answer(self, request: Request, *, in_lane: bool = False) -> None:
        answer = self._guarded(request, partial(self._handle, request))
        if isinstance(answer, DeferredResponse):
            until_s = self._after_s(answer.wait_s)
            self._event_loop.park(
                parked_connections.ParkedForResponse(
                    event_loop=self._event_loop,
                    handler=self,
                    connection=request.connection,
                    request=request,
                    deferred=answer,
                    until_s=until_s,
                )
            )
        else:
            self._sender.answer_now(request, answer, in_lane=in_lane)

    def expire(self, request: Request, deferred: DeferredResponse) -> None:
        self._parts.pools.small.submit(partial(self._expire, request, deferred))

    def _expire(self, request: Request, deferred: DeferredResponse) -> None:
        answer = self._guarded(request, deferred.default)
        assert isinstance(answer, Response)
        self._sender.answer_now(request, answer)

    def _guarded(
        self, request: Request, action: Callable[[], Answer]
    ) -> Answer | Response:
        was_verified = request.connection.is_verified
        try:
            return action()
        except Problem as problem:
            return as_problem(problem)
        except Exception as exc:  # a fault in one handler must not stop the server
            self._parts.on_error(request, exc)
            return as_problem(internal_error())
        finally:
            if request.connection.is_verified and not was_verified:
                self._parts.registry.verified(request.connection)

    @property
    def parked(self) -> parked_connections.ParkedResponses:
        return self._sender.parked

    def _after_s(self, wait_s: float) -> float:
        return self._parts.clock.now_s() + wait_s


class ResponseSender:
    """Sends responses, then calls `await_next` for the next request of a connection."""

    def __init__(
        self,
        parts: ListenerParts,
        closer: ConnectionCloser,
        await_next: Callable[[Connection], None],
    ) -> None:
        self._parts, self._closer, self._await_next = parts, closer, await_next
        self.parked = parked_connections.ParkedResponses(
            parts.event_loop,
            closer,
            limits=parts.limits,
            clock=parts.clock,
            on_shed=parts.on_slow_reader,
        )

    def answer(self, request: Request, response: Response) -> None:
        if response.is_bulk(self._parts.limits.small_bytes):
            self.answer_now(request, response)
        else:
            self._parts.pools.small.submit(partial(self._send, request, response))

    def answer_now(
        self, request: Request, response: Response, *, in_lane: bool = False
    ) -> None:
        if in_lane or not response.is_bulk(self._parts.limits.small_bytes):
            self._send(request, response)
            return
        run = partial(self._send, request, response)
        refuse = partial(self._give_up, request, response)
        self.enter(self._parts.pools.lanes_out, request, run, refuse)

    def refuse(self, connection: Connection, problem: Problem) -> None:
        self._parts.pools.small.submit(partial(self.refuse_now, connection, problem))

    def refuse_now(self, connection: Connection, problem: Problem) -> None:
        data = encoded_last(problem)
        self._send_or_park(connection, data, partial(self._closer.linger, connection))

    def enter(
        self,
        lanes: BulkLanes,
        request: Request,
        run: Callable[[], None],
        refuse: Callable[[], None],
    ) -> None:
        """Call `run` when there is a lane for its bulk body, else `refuse`."""
        is_incoming = lanes is self._parts.pools.lanes_in
        queued = QueuedTransfer(
            connection=request.connection,
            owner=(request.connection.origin, self._parts.owner(request)),
            until_s=self._parts.clock.now_s() + self._parts.limits.lane_wait_s,
            size_bytes=request.body.length_bytes if is_incoming else 0,
            run=run,
            refuse=refuse,
            lanes=lanes,
            event_loop=self._parts.event_loop,
        )
        lanes.enter(queued)

    def _give_up(self, request: Request, response: Response) -> None:
        if response.done is not None:
            self._closer.run_callback(response.done)
        self.answer(request, as_problem(busy()))

    def _send_or_park(
        self, connection: Connection, data: bytes, then: Callable[[], None]
    ) -> None:
        """Send `data` without blocking, and park the unsent rest; then call `then`."""
        try:
            rest = connection.send_some(memoryview(data))
        except ConnectionClosed:
            self._closer.lost(connection)
            return
        if len(rest):
            self.parked.park(connection, rest, then)
        else:
            then()

    def _send(self, request: Request, response: Response) -> None:
        if response.is_bulk(self._parts.limits.small_bytes):
            self._send_bulk(request, response)
        else:
            self._send_small(request, response)

    def _send_small(self, request: Request, response: Response) -> None:
        is_last = self._is_last(request)
        try:
            data = encoded(request, response, is_last=is_last)
        except Exception as exc:  # a file is missing or too short
            self._parts.on_error(request, exc)
            self.refuse_now(request.connection, internal_error())
            return
        finally:
            if response.done is not None:
                response.done()
        then = partial(self._sent, request, is_last=is_last)
        self._send_or_park(request.connection, data, then)

    def _send_bulk(self, request: Request, response: Response) -> None:
        is_last = self._is_last(request)
        sent_before = request.connection.bytes_out
        try:
            send(request, response, is_last=is_last)
        except ConnectionClosed:
            self._closer.lost(request.connection)
        except (TransferStalled, BodyCutShort):
            self._closer.drop(request.connection)
        except Exception as exc:  # a file is missing, or the trailer failed
            self._parts.on_error(request, exc)
            if request.connection.bytes_out > sent_before:
                self._closer.drop(request.connection)
            else:
                self.refuse_now(request.connection, internal_error())
        else:
            self._sent(request, is_last=is_last)
        finally:
            if response.done is not None:
                response.done()

    def _is_last(self, request: Request) -> bool:
        body = request.body
        # Without 100 Continue the client may send its body, or may not.
        is_lost = body.is_broken or body.is_awaited
        unread = body.remaining - len(request.connection.ahead)
        is_long = unread > self._parts.limits.drain_bytes
        return request.is_last or is_lost or is_long or self._parts.registry.is_closing

    def _sent(self, request: Request, *, is_last: bool) -> None:
        if is_last:
            self._closer.linger(request.connection)
        else:
            self._skip_body(request)

    def _skip_body(self, request: Request) -> None:
        request.body.skip_ahead()
        await_next = partial(self._await_next, request.connection)
        remaining_bytes = request.body.remaining
        if not remaining_bytes:
            await_next()
            return
        watch = parked_connections.ParkedForSkip(
            event_loop=self._parts.event_loop,
            closer=self._closer,
            connection=request.connection,
            until_s=self._parts.clock.now_s() + self._parts.limits.idle_s,
            remaining_bytes=remaining_bytes,
            after=await_next,
        )
        self._parts.event_loop.park(watch)


def internal_error() -> Problem:
    """Return the problem for a handler that failed."""
    return Problem(
        500, "fault", "The handler failed. See the events of the coordinator."
    )


def encoded(request: Request, response: Response, *, is_last: bool) -> bytes:
    """Return the bytes of a small response.

    Raises:
        BodyCutShort: a file is shorter than announced.
        OSError: a file cannot be opened.
    """
    data: list[bytes | memoryview] = [head_of(response, is_last=is_last)]
    for part in _sent_parts(request, response):
        if isinstance(part, FilePart):
            with _opened(part) as fd:
                data.append(os.pread(fd, part.length, part.first))
            if missing := part.length - len(data[-1]):
                raise BodyCutShort(f"the file ended {missing} bytes early")
        else:
            data.append(part)
    return b"".join(data)


def send(request: Request, response: Response, *, is_last: bool) -> None:
    """Send a bulk response, on a thread that may block.

    Raises:
        ConnectionClosed: the client has closed the connection.
        TransferStalled: the client reads too slowly.
        BodyCutShort: the body is shorter than announced.
        OSError: the first file cannot be opened; nothing was sent.
    """
    connection = request.connection
    connection.begin_body()
    unsent = [memoryview(head_of(response, is_last=is_last))]
    is_begun = False
    for part in _sent_parts(request, response):
        if isinstance(part, memoryview):
            unsent.append(part.cast("B"))
            continue
        with ExitStack() as stack:
            try:
                fd = stack.enter_context(_opened(part))
            except OSError as exc:
                if not is_begun:
                    raise
                # The head is sent: the body can only be cut short.
                raise BodyCutShort(f"a file that cannot be opened: {exc}") from exc
            connection.send(unsent)
            unsent, is_begun = [], True
            connection.send_file(fd, part.first, part.length)
    connection.send(unsent)
    if response.trailer is not None and request.method != "HEAD":
        connection.send([memoryview(_trailer(response))])


def _sent_parts(request: Request, response: Response) -> Sequence[BodyPart]:
    """Return the parts of the body that follow the head."""
    if request.method == "HEAD" or not has_body(response.status):
        return []
    return parts_of(response.body)


@contextmanager
def _opened(part: FilePart) -> Iterator[int]:
    if isinstance(part.file, int):
        yield part.file
        return
    fd = os.open(part.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _trailer(response: Response) -> bytes:
    assert response.trailer is not None
    data = response.trailer()
    if len(data) != response.trailer_bytes:
        raise BodyCutShort(
            f"a trailer of {len(data)} bytes for {response.trailer_bytes}"
        )
    return data
