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

from atoll.clock import Clock
from atoll.http.connection import (
    BodyCutShort,
    Connection,
    ConnectionClosed,
    ListenerLimits,
    TransferStalled,
)
from atoll.http.handshake import OnHandshakeFault, TlsHandshakes
from atoll.http.parked_connections import (
    ParkedForBody,
    ParkedForHead,
    ParkedForResponse,
    ParkedForSkip,
    ParkedResponses,
    ParkedStream,
)
from atoll.http.registry import ConnectionCloser, ConnectionRegistry, OnClosed
from atoll.http.request import Request, read_request
from atoll.http.response import (
    DeferredResponse,
    FilePart,
    FileParts,
    Problem,
    Response,
    ResponseBody,
    ResponseStream,
    as_problem,
    busy,
    has_body,
    head_of,
)
from atoll.http.threads import BulkLanes, EventLoop, QueuedTransfer, ThreadPools

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
        handle: Handle,
        *,
        event_loop: EventLoop,
        pools: ThreadPools,
        registry: ConnectionRegistry,
        limits: ListenerLimits,
        clock: Clock,
        on_error: OnError,
        on_closed: OnClosed,
        on_handshake_fault: OnHandshakeFault,
        judge: Judge,
        on_slow_reader: Callable[[Connection], None],
        owner: Callable[[Request], str],
    ) -> None:
        self._handle, self._event_loop, self._pools = handle, event_loop, pools
        self._judge = judge
        self._registry, self._limits, self._clock = registry, limits, clock
        self._on_error = on_error
        self._closer = ConnectionCloser(
            event_loop=event_loop,
            pools=pools,
            registry=registry,
            limits=limits,
            clock=clock,
            on_closed=on_closed,
        )
        self._sender = ResponseSender(
            self._closer,
            event_loop=event_loop,
            pools=pools,
            registry=registry,
            limits=limits,
            clock=clock,
            on_error=on_error,
            on_slow_reader=on_slow_reader,
            owner=owner,
            await_next=self._await_next,
        )
        self._handshakes = TlsHandshakes(
            self,
            event_loop=event_loop,
            pools=pools,
            on_handshake_fault=on_handshake_fault,
        )

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
        if self._registry.is_closing:
            self.drop(connection)
            return
        connection.silent_since_s = self._clock.now_s()
        watch = ParkedForHead(
            self._event_loop,
            self,
            connection,
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
        self._pools.small.submit(partial(self._serve, connection), is_urgent=is_short)

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
            self._sender.enter(self._pools.lanes_in, request, run, refuse)
        elif not is_whole:
            until_s = self._after_s(self._limits.idle_s)
            self._event_loop.park(
                ParkedForBody(self._event_loop, self, request, until_s=until_s)
            )
        else:
            self._ask_and_answer(request)

    def handle(self, request: Request) -> None:
        self._pools.small.submit(partial(self._ask_and_answer, request))

    def _ask_and_answer(self, request: Request, *, in_lane: bool = False) -> None:
        answer = self._guarded(request, partial(self._handle, request))
        if isinstance(answer, DeferredResponse):
            until_s = self._after_s(answer.wait_s)
            self._event_loop.park(
                ParkedForResponse(
                    self._event_loop, self, request, answer, until_s=until_s
                )
            )
        else:
            self._sender.answer_now(request, answer, in_lane=in_lane)

    def expire(self, request: Request, deferred: DeferredResponse) -> None:
        self._pools.small.submit(partial(self._expire, request, deferred))

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
            self._on_error(request, exc)
            return as_problem(internal_error())
        finally:
            if request.connection.is_verified and not was_verified:
                self._registry.verified(request.connection)

    @property
    def parked(self) -> ParkedResponses:
        return self._sender.parked

    # Delegated to the sender and the closer.

    def answer(self, request: Request, response: Response) -> None:
        self._sender.answer(request, response)

    def refuse(self, connection: Connection, problem: Problem) -> None:
        self._sender.refuse(connection, problem)

    def linger(self, connection: Connection) -> None:
        self._closer.linger(connection)

    def lost(self, connection: Connection) -> None:
        self._closer.lost(connection)

    def drop(self, connection: Connection) -> None:
        self._closer.drop(connection)

    def run_callback(self, callback: Callable[[], None]) -> None:
        self._closer.run_callback(callback)

    def _after_s(self, wait_s: float) -> float:
        return self._clock.now_s() + wait_s


OnError = Callable[[Request | None, Exception], None]


class ResponseSender:
    """Sends responses, then calls `await_next` for the next request of a connection."""

    def __init__(
        self,
        closer: ConnectionCloser,
        *,
        event_loop: EventLoop,
        pools: ThreadPools,
        registry: ConnectionRegistry,
        limits: ListenerLimits,
        clock: Clock,
        on_error: OnError,
        on_slow_reader: Callable[[Connection], None],
        owner: Callable[[Request], str],
        await_next: Callable[[Connection], None],
    ) -> None:
        self._owner = owner
        self.parked = ParkedResponses(
            event_loop, closer, limits=limits, clock=clock, on_shed=on_slow_reader
        )
        self._closer, self._event_loop, self._pools = closer, event_loop, pools
        self._registry, self._limits, self._clock = registry, limits, clock
        self._on_error, self._await_next = on_error, await_next

    def answer(self, request: Request, response: Response) -> None:
        if response.is_bulk(self._limits.small_bytes):
            self.answer_now(request, response)
        else:
            self._pools.small.submit(partial(self._send, request, response))

    def answer_now(
        self, request: Request, response: Response, *, in_lane: bool = False
    ) -> None:
        if in_lane or not response.is_bulk(self._limits.small_bytes):
            self._send(request, response)
            return
        run = partial(self._send, request, response)
        refuse = partial(self._give_up, request, response)
        self.enter(self._pools.lanes_out, request, run, refuse)

    def refuse(self, connection: Connection, problem: Problem) -> None:
        self._pools.small.submit(partial(self.refuse_now, connection, problem))

    def refuse_now(self, connection: Connection, problem: Problem) -> None:
        data = encoded_last(as_problem(problem))
        self._send_or_park(connection, data, partial(self._closer.linger, connection))

    def enter(
        self,
        lanes: BulkLanes,
        request: Request,
        run: Callable[[], None],
        refuse: Callable[[], None],
    ) -> None:
        """Call `run` when there is a lane for its bulk body, else `refuse`."""
        is_incoming = lanes is self._pools.lanes_in
        queued = QueuedTransfer(
            request.connection,
            owner=self._owner(request),
            until_s=self._clock.now_s() + self._limits.lane_wait_s,
            size_bytes=request.body.length_bytes if is_incoming else 0,
            run=run,
            refuse=refuse,
            lanes=lanes,
            event_loop=self._event_loop,
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
        if response.is_bulk(self._limits.small_bytes):
            self._send_bulk(request, response)
        else:
            self._send_small(request, response)

    def _send_small(self, request: Request, response: Response) -> None:
        is_last = self._is_last(request)
        try:
            data = encoded(request, response, is_last=is_last)
        except Exception as exc:  # a file is missing or too short
            self._on_error(request, exc)
            self.refuse_now(request.connection, internal_error())
            return
        finally:
            if response.done is not None:
                response.done()
        then = partial(self._sent, request, response, is_last=is_last)
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
            self._on_error(request, exc)
            if request.connection.bytes_out > sent_before:
                self._closer.drop(request.connection)
            else:
                self.refuse_now(request.connection, internal_error())
        else:
            self._sent(request, response, is_last=is_last)
        finally:
            if response.done is not None:
                response.done()

    def _is_last(self, request: Request) -> bool:
        body = request.body
        # Without 100 Continue the client may send its body, or may not.
        is_lost = body.is_broken or body.is_awaited
        unread = body.remaining - len(request.connection.ahead)
        is_long = unread > self._limits.drain_bytes
        return request.is_last or is_lost or is_long or self._registry.is_closing

    def _sent(self, request: Request, response: Response, *, is_last: bool) -> None:
        connection = request.connection
        linger = partial(self._closer.linger, connection)
        after = linger if is_last else partial(self._skip_body, request)
        if isinstance(response.body, ResponseStream) and request.method != "HEAD":
            watch = ParkedStream(
                self._event_loop,
                self._closer,
                connection,
                response.body,
                is_chunked=not request.is_old,
                after=after,
            )
            self._event_loop.park(watch)
        else:
            after()

    def _skip_body(self, request: Request) -> None:
        request.body.skip_ahead()
        await_next = partial(self._await_next, request.connection)
        remaining_bytes = request.body.remaining
        if not remaining_bytes:
            await_next()
            return
        watch = ParkedForSkip(
            self._event_loop,
            self._closer,
            request.connection,
            until_s=self._clock.now_s() + self._limits.idle_s,
            size=remaining_bytes,
            after=await_next,
        )
        self._event_loop.park(watch)


def internal_error() -> Problem:
    """Return the problem for a handler that failed."""
    return Problem(
        500, "fault", "The handler failed. See the events of the coordinator."
    )


def encoded(request: Request, response: Response, *, is_last: bool) -> bytes:
    """Return the bytes of a small response; of a stream, only the head.

    Raises:
        BodyCutShort: a file is shorter than announced.
        OSError: a file cannot be opened.
    """
    is_chunked = isinstance(response.body, ResponseStream) and not request.is_old
    head = head_of(response, is_last=is_last, is_chunked=is_chunked)
    if request.method == "HEAD" or not has_body(response.status):
        return head
    return b"".join([head, *_parts_of(response.body)])


def encoded_last(response: Response) -> bytes:
    """Return the bytes of a response after which the connection is closed."""
    assert isinstance(response.body, bytes)
    return head_of(response, is_last=True, is_chunked=False) + response.body


def _parts_of(body: ResponseBody) -> Iterator[bytes | memoryview]:
    if isinstance(body, bytes):
        yield body
    elif isinstance(body, FilePart | FileParts):
        parts = body.parts if isinstance(body, FileParts) else (body,)
        for part in parts:
            yield _content(part)
    elif not isinstance(body, ResponseStream):
        yield from body


def _content(part: FilePart) -> bytes:
    with _opened(part) as fd:
        data = os.pread(fd, part.length, part.first)
    if len(data) != part.length:
        raise BodyCutShort(f"the file ended {part.length - len(data)} bytes early")
    return data


def send(request: Request, response: Response, *, is_last: bool) -> None:
    """Send a bulk response, on a thread that may block.

    Raises:
        ConnectionClosed: the client has closed the connection.
        TransferStalled: the client reads too slowly.
        BodyCutShort: the body is shorter than announced.
        OSError: a file cannot be opened; nothing was sent.
    """
    connection = request.connection
    head = memoryview(head_of(response, is_last=is_last, is_chunked=False))
    connection.begin_body()
    if request.method == "HEAD" or not has_body(response.status):
        connection.send([head])
        return
    if isinstance(response.body, FilePart):
        _send_file(connection, head, response.body)
    elif isinstance(response.body, FileParts):
        _send_files(connection, head, response.body)
    else:
        assert not isinstance(response.body, ResponseStream)
        _send_views(connection, head, response.body)
    if response.trailer is not None:
        connection.send([memoryview(_trailer(response))])


def _send_views(
    connection: Connection, head: memoryview, body: bytes | Sequence[memoryview]
) -> None:
    if isinstance(body, bytes):
        connection.send([head, memoryview(body)])
    else:
        connection.send([head, *(view.cast("B") for view in body)])


def _send_file(connection: Connection, head: memoryview, part: FilePart) -> None:
    with _opened(part) as fd:
        connection.send([head])
        connection.send_file(fd, part.first, part.length)


def _send_files(connection: Connection, head: memoryview, body: FileParts) -> None:
    connection.send([head])
    for part in body.parts:
        with ExitStack() as stack:
            try:
                fd = stack.enter_context(_opened(part))
            except OSError as exc:  # the head is sent: the body can only be cut short
                raise BodyCutShort(f"a file that cannot be opened: {exc}") from exc
            connection.send_file(fd, part.first, part.length)


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
