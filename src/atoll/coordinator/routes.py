"""Handlers of routes: from a request to a call, and from a reply to a response.

Rule 1: a header is checked before its body is read. So is the proof that a request
        comes from the island that it names, in one method for all routes.
Rule 2: nothing here decides: the service does, and every refusal is one of its errors.
Rule 3: join requests are rate-limited per address, because every new incarnation is a
        durable record. The run limits all addresses together, in
        `protocol.join_leave`; this limit is lower, so that one address does not use up
        the joins of the others.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from atoll.coordinator.initial_weights import InitialWeights
from atoll.coordinator.spool import MOVED_BYTES, Spool
from atoll.coordinator.states import StateFiles, StateUploads, require_foundable
from atoll.coordinator.threads import ThreadedService
from atoll.errors import AtollError, DiskError, Refused, Unreachable
from atoll.exchange import Outcome, api
from atoll.exchange.api.replies import catalogue_parts
from atoll.exchange.calls import (
    LONG_POLL_S,
    AgreedCall,
    Call,
    HeartbeatCall,
    JoinCall,
    OutcomeCall,
    Reply,
)
from atoll.http import (
    DeferredResponse,
    FilePart,
    Request,
    RequestBody,
    Response,
    origin_of,
    ranged,
)
from atoll.journal import Journal
from atoll.journal.constants import name_of
from atoll.journal.files import StoredBody, is_large
from atoll.protocol import Heartbeat, Reception
from atoll.protocol.coordinator_state import TokenBucket
from atoll.protocol.model import bytes_of, has, keepable
from atoll.routes import ROUTES, BodyKind, Route, RouteMatch
from atoll.wire import MAX_HEADER_BYTES
from atoll.wire.digests import view_of
from atoll.wire.frame import island_proof

STATES_HEADERS_BYTES = 2 * MAX_HEADER_BYTES
"""Largest size of the headers before states, including those of outcomes."""

SMALL_BYTES, KEPT_BODIES = 2**16, 16
"""Size limit and number of small outcome bodies that are cached."""

REDUCTIONS = 4
"""Bodies of collectively reduced rounds that are read concurrently."""

Handler = Callable[[Request, api.RequestHead], Response | DeferredResponse]
OnBeat = Callable[[Request, Heartbeat | None], None]


@dataclass(frozen=True)
class RouteContext:
    """The parts of a coordinator that the routes use."""

    run: str
    threaded_service: ThreadedService
    spool: Spool
    states: StateFiles
    journal: Journal
    root: Path
    """The directory of the journal's files."""

    info: Callable[[], api.EncodedReply]
    max_body_bytes: Callable[[], int]
    max_request_bytes: int
    """Largest body of a request."""

    failing: Callable[[str], None]
    """Called with the reason when the disk fails, with an empty string when it
    works."""

    on_beat: OnBeat
    """Called for every request that may carry a heartbeat."""

    unproven: Callable[[Request, Route, str], None]
    """Called with a request that lacks the proof of the island it names."""


class Routes:
    """Handles requests: the method of a route's name is its handler.

    This class has those of islands, and `tools` those of people.
    """

    def __init__(self, context: RouteContext, tools: object) -> None:
        self._context = context
        self._small_bodies: dict[tuple[str, int], np.ndarray] = {}
        self._first = InitialWeights(context.threaded_service, context.root)
        self._uploads = StateUploads(context.threaded_service, context.spool)
        self._large = ThreadPoolExecutor(1, thread_name_prefix="atoll-large")
        self._reductions = threading.BoundedSemaphore(REDUCTIONS)
        self._join_limits = JoinLimits()
        self._handlers: Mapping[str, Handler] = {
            route.name: getattr(self, route.name, None) or getattr(tools, route.name)
            for route in ROUTES
        }

    def handle(
        self, request: Request, match: RouteMatch
    ) -> Response | DeferredResponse:
        """Return the answer to a request that may use its route."""
        head = api.read_head(match, request.query, request.headers)
        api.require_run(request.headers, self._context.run)
        if head.route.is_call:
            self._context.threaded_service.look()[0].require_here()
        self._require_proof(request, head)
        return self._handlers[head.route.name](request, head)

    def _require_proof(self, request: Request, head: api.RequestHead) -> None:
        """Check that a request comes from the island that it names, if any.

        Raises:
            LeaseLost: the run does not know this incarnation, and cannot check the
                proof: an honest island joins again.
            Refused: the proof does not match the island's key.
        """
        claim = head.claim
        if claim is None:
            return
        state, _ = self._context.threaded_service.look()
        island, incarnation = claim.identity.island, claim.identity.incarnation
        member = state.members.require_life(island, incarnation)
        key, run = member.key, self._context.run
        proof = island_proof(key, run=run, island=island, incarnation=incarnation)
        if hmac.compare_digest(proof, claim.proof):
            return
        self._context.unproven(request, head.route, island)
        raise Refused(
            f"The {api.PROOF_HEADER} of this call is not that of incarnation "
            f"{incarnation} of island {island!r}: its key is another. An island "
            "speaks only for itself. Join with the island's key, or under another "
            "name."
        )

    def offer(self, request: Request, head: api.RequestHead) -> Response:
        return self._with_call(request, head, self._context.threaded_service.ask)

    leave = open_data = claim = offer

    def info(self, request: Request, head: api.RequestHead) -> Response:
        return as_response(self._context.info())

    def join(self, request: Request, head: api.RequestHead) -> Response:
        _, now_s = self._context.threaded_service.look()
        self._join_limits.require(origin_of(request.address[0]), now_s=now_s)

        def join(call: Call) -> Reply:
            assert isinstance(call, JoinCall)
            self._require_foundable(call)
            return self._first.join(call)

        return self._with_call(request, head, join)

    join_unnamed = join

    def _require_foundable(self, call: JoinCall) -> None:
        """Refuse a model that is too large to found the run."""
        state, _ = self._context.threaded_service.look()
        if state.model is None and not self._first.is_awaited:
            require_foundable(
                call.request.model,
                state.settings,
                room=self._context.journal.room,
                most_bytes=self._context.max_request_bytes,
            )

    def heartbeat(self, request: Request, head: api.RequestHead) -> Response:
        def beat(call: Call) -> Reply:
            assert isinstance(call, HeartbeatCall)
            reply = self._context.threaded_service.ask(call)
            self._context.on_beat(request, call.beat)
            return reply

        return self._with_call(request, head, beat)

    def publish(self, request: Request, head: api.RequestHead) -> Response:
        """Check the header, then read the body into the spool."""
        context, incoming = self._context, self._incoming(request.body)
        max_bytes = context.threaded_service.change_by(
            lambda service, now_s: service.header_bytes(head.fragment)
        )
        upload = api.parse_upload(head, incoming, max_header_bytes=max_bytes)
        header = upload.header
        reception = context.threaded_service.offer(header, upload.beat)
        context.on_beat(request, upload.beat)
        if reception is Reception.WANTED:
            incoming.expect(header)
            check = context.threaded_service.check_of(header)
            with self._telling_of_the_disk():
                frame = context.spool.take(header, request.body.readinto, check)
            reception = context.threaded_service.take(frame)
        return as_response(api.reply_parts(reception))

    def agreed(self, request: Request, head: api.RequestHead) -> Response:
        """Read a collectively reduced round, up to the size of the round."""
        threaded_service, length = (
            self._context.threaded_service,
            request.body.length_bytes,
        )
        max_bytes = threaded_service.change_by(
            lambda service, now_s: service.agreed_bytes(head.fragment)
        )
        if length > max_bytes:
            raise Refused(
                f"{length} bytes cannot be an outcome of fragment {head.fragment}, "
                f"which takes {max_bytes} with its updates' headers. Bring one round's."
            )
        if not self._reductions.acquire(blocking=False):
            raise Unreachable(
                f"Outcomes of collectives are already being read (limit {REDUCTIONS}). "
                "Ask again."
            )
        try:
            call = api.parse_call(head, self._incoming(request.body))
            assert isinstance(call, AgreedCall)
            return as_response(api.reply_parts(threaded_service.gather(call)))
        finally:
            self._reductions.release()

    def outcome(self, request: Request, head: api.RequestHead) -> DeferredResponse:
        """Answer when the outcome is ready; no thread waits for it."""
        call = api.parse_call(head, self._incoming(request.body))
        assert isinstance(call, OutcomeCall)
        later = DeferredResponse(
            wait_s=4 * LONG_POLL_S, default=lambda: as_response(api.reply_parts(None))
        )

        def answer(reply: Reply | Exception) -> None:
            try:
                later.set(
                    self._outcome_response(request, reply, has_body=call.has_body)
                )
            except AtollError as exc:  # the file on the disk is damaged
                later.set(as_response(api.error_parts(exc)))

        threaded_service, short = (
            self._context.threaded_service,
            replace(call, has_body=False),
        )
        later.on_gone(partial(threaded_service.forget, later))
        origin = request.connection.origin
        if threaded_service.put(short, answer, ticket=later, origin=origin):
            self._context.on_beat(request, call.beat)
        return later

    def _outcome_response(
        self, request: Request, reply: Reply | Exception, *, has_body: bool
    ) -> Response:
        if isinstance(reply, Exception):
            return as_response(api.error_parts(reply))
        answer = api.reply_parts(reply)
        if not (isinstance(reply, Outcome) and has_body):
            return as_response(answer)
        header = reply.agreed.header
        stored = self._context.journal.body(header.fragment, header.round)
        if stored is None:
            return as_response(answer)
        packed_bytes = len(answer.body[0])
        # A large body has its own file, which begins with the header; a small one
        # shares a file, and may start at the same offset by chance.
        if not is_large(header) or len(answer.body) > 1:
            return as_response(_with_body(answer, self._body(stored)))
        file = FilePart(
            file=self._context.root / stored.name,
            length=packed_bytes + header.body_bytes,
        )
        return ranged(request, file, headers=_framed(answer))

    def _body(self, stored: StoredBody) -> np.ndarray:
        """Return a body; a small one is cached, because every island takes it."""
        key = stored.name, stored.first
        body = self._small_bodies.get(key)
        if body is None:
            body = stored.read()
            if len(body) <= SMALL_BYTES:
                self._small_bodies[key] = body
                if len(self._small_bodies) > KEPT_BODIES:
                    del self._small_bodies[next(iter(self._small_bodies))]
        return body

    def state(self, request: Request, head: api.RequestHead) -> Response:
        file = self._context.states.newest(head.fragment)
        part = FilePart(file=file.handle, length=file.size_bytes)
        headers = {"Content-Type": BodyKind.FRAME.value}
        headers |= api.receipt_headers(state=file.receipt)
        response = ranged(request, part, etag=file.digest, headers=headers)
        return replace(response, done=partial(keep_until_sent, file))

    def constants(self, request: Request, head: api.RequestHead) -> Response:
        catalogue = self._context.threaded_service.change_by(
            lambda service, _: service.catalogue
        )
        return as_response(catalogue_parts(catalogue))

    def constant(self, request: Request, head: api.RequestHead) -> Response:
        """Send a constant from its file, which never changes."""
        state, _ = self._context.threaded_service.look()
        constants = self._context.journal.constants
        constant = keepable(state.model).get(head.digest) if state.model else None
        if constant is None or not has(constants.complete, constant):
            raise Refused(
                f"The run keeps no constant with the digest {head.digest[:12]}. "
                "GET /constants lists those that it keeps."
            )
        if not bytes_of(constant):
            return ranged(request, b"", etag=constant.digest)
        file = self._context.root / name_of(constant.digest)
        part = FilePart(file=file, length=bytes_of(constant))
        return ranged(request, part, etag=constant.digest)

    def keep(self, request: Request, head: api.RequestHead) -> Response:
        """Check the founder and the constant, then read a part of it."""
        claim = head.island, head.incarnation, head.digest
        self._context.threaded_service.change_by(
            lambda service, now_s: service.awaited_constant(*claim)
        )
        return self._with_call(request, head, self._context.threaded_service.ask)

    def found(self, request: Request, head: api.RequestHead) -> Response:
        incoming = self._states_of(request, head)
        with self._telling_of_the_disk():
            call = self._uploads.founding(head, incoming, request.body.readinto)
        return as_response(api.reply_parts(self._context.threaded_service.ask(call)))

    def recover(self, request: Request, head: api.RequestHead) -> Response:
        incoming = self._states_of(request, head)
        with self._telling_of_the_disk():
            call = self._uploads.recovery(head, incoming, request.body.readinto)
        return as_response(api.reply_parts(self._context.threaded_service.ask(call)))

    def _states_of(self, request: Request, head: api.RequestHead) -> api.Incoming:
        """Return the body's reader, if this island may send states of this size."""
        sender = head.island, head.incarnation
        max_bytes = self._context.threaded_service.change_by(
            lambda service, now_s: service.states_bytes(*sender)
        )
        if request.body.length_bytes > max_bytes + STATES_HEADERS_BYTES:
            raise Refused(
                f"{request.body.length_bytes} bytes cannot be states of the run's "
                f"model, which take {max_bytes}. Bring one for each fragment."
            )
        return self._incoming(request.body)

    @contextmanager
    def _telling_of_the_disk(self) -> Iterator[None]:
        """Report when the disk fails, and when it works again."""
        try:
            yield
        except DiskError as exc:
            self._context.failing(str(exc))
            raise
        self._context.failing("")

    def _with_call(
        self, request: Request, head: api.RequestHead, answer: Callable[[Call], Reply]
    ) -> Response:
        """Handle a call whose body is read completely.

        A document takes many times its size in memory while it is parsed. Those that
        are large are parsed and answered by one thread, which reuses its memory.
        """
        size = request.body.length_bytes
        is_large = SMALL_BYTES < size <= api.MAX_LARGE_BYTES
        if head.route.body is not BodyKind.JSON or not is_large:
            call = api.parse_call(head, self._incoming(request.body))
            return as_response(api.reply_parts(answer(call)))
        data = self._context.spool.take_bytes(size, request.body.readinto)
        reply = self._large.submit(
            lambda: answer(api.parse_call(head, api.Incoming.of(data)))
        ).result()
        return as_response(api.reply_parts(reply))

    def _incoming(self, body: RequestBody) -> api.Incoming:
        def read(size: int) -> memoryview:
            if size > MOVED_BYTES:
                return self._context.spool.take_bytes(size, body.readinto)
            # Not a bytearray: only bytes that have arrived become resident.
            part = np.empty(size, np.uint8).data
            body.readinto(part)
            return part

        return api.Incoming(
            read, body.length_bytes, max_body_bytes=self._context.max_body_bytes()
        )


def as_response(answer: api.EncodedReply) -> Response:
    """Return the HTTP response of an encoded reply."""
    views = [view_of(part) for part in answer.body]
    return Response(status=answer.status, headers=answer.headers, body=views)


def _with_body(answer: api.EncodedReply, body: object) -> api.EncodedReply:
    header, *rest = answer.body
    return replace(answer, headers=_framed(answer), body=(header, body, *rest))  # type: ignore[arg-type]


def _framed(answer: api.EncodedReply) -> dict[str, str]:
    return {**answer.headers, "Content-Type": BodyKind.FRAME.value}


def keep_until_sent(file: object) -> None:
    """Keep a reference to a file until it is sent: its last owner closes it."""


BURST = 256
"""Joins of islands that start together behind one address, with retries."""

PER_S = 1.0
MAX_ADDRESSES = 4096
"""Tracked addresses; a forgotten one starts with a full budget."""

_FULL = TokenBucket.full(BURST, per_s=PER_S)


class JoinLimits:
    """The join budgets of addresses. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._budgets: dict[str, TokenBucket] = {}

    def __len__(self) -> int:
        """Return the number of tracked addresses."""
        return len(self._budgets)

    def require(self, address: str, *, now_s: float) -> None:
        """Count one join request of an address.

        Raises:
            Unreachable: the address has used up its budget: ask again later.
        """
        with self._lock:
            # Removed and inserted again, so that the first entry is the oldest.
            before = self._budgets.pop(address, _FULL)
            after = before.spent(now_s)
            self._budgets[address] = after or before
            if len(self._budgets) > MAX_ADDRESSES:
                del self._budgets[next(iter(self._budgets))]
        if after is None:
            raise Unreachable(
                f"{address} has asked to join more than {BURST} times in a burst, and "
                f"then more than {PER_S:g} times per second. Ask again in a moment."
            )
