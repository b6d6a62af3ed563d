"""The coordinator process: a directory, a port, tokens and threads.

journal/      the run itself; the only part that must not be lost
spool/        updates in flight; empty when the process has ended
events.jsonl  the events of the run
*.token       the tokens of islands, operators and observers
certificate   for TLS
bundle/       the model's definition, if the run has one
move.json     the move that brought the run here, if one did: see `move`

Connections: when the peer closes the last connection of an island, the island may be
gone. That is only a hint: a connection may break and be opened again, so an island
whose lease still runs gets a grace period. Idle connections that the coordinator closes
itself give no hint.

Audit events: every permitted change is reported. Denials are rate-limited per kind, and
the next reported one carries the number of those left out. So a stranger at the port
can neither fill a disk nor crowd out other events.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from atoll import __version__, kernels, security
from atoll.coordinator.directory import CodeFiles, find_bundle, open_service
from atoll.coordinator.live_status import LiveStatus, ProgressReporter
from atoll.coordinator.operators import Operators, PastReader
from atoll.coordinator.routes import RouteContext, Routes, as_response
from atoll.coordinator.spool import Spool
from atoll.coordinator.states import StateFiles
from atoll.coordinator.status import Watcher, run_state
from atoll.coordinator.threads import ThreadedService
from atoll.errors import AtollError, LeaseLost, Refused, RunEnded, UsageError
from atoll.exchange.api import (
    EncodedReply,
    Info,
    error_parts,
    info_parts,
    model_fingerprint,
    not_found_reply,
)
from atoll.exchange.api.replies import Limits as InfoLimits
from atoll.http import (
    DeferredResponse,
    HandshakeFault,
    Listener,
    ListenerLimits,
    Problem,
    Request,
    Response,
    ShedReason,
)
from atoll.http.response import as_problem
from atoll.protocol import Heartbeat
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.membership import HEARTBEAT_S, LEASE_S
from atoll.protocol.rounds import Phase
from atoll.routes import UNLISTED, Route, RouteMatch, find_route
from atoll.runtime import Clock, SystemClock
from atoll.settings import RunSettings
from atoll.telemetry import (
    EventBus,
    EventFiles,
    JsonlWriter,
    PastRecorder,
)
from atoll.telemetry.past_recorder import MAX_WAITING

SPOOL, EVENTS = "spool", "events.jsonl"

STOPPED = "coordinator_stopped"
LOAD_S = 5.0
"""Wait for the past at a start; a longer one is loaded while the run is served."""

log = logging.getLogger("atoll")


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Address and TLS options of a coordinator's listener."""

    host: str = "127.0.0.1"
    port: int = 0
    has_tls: bool = True
    island_certificates: Path | None = None
    """Certificate of an authority that must have signed the certificates of islands."""


class Coordinator:
    """One run, served. `start`, then `close`."""

    def __init__(
        self,
        directory: Path,
        settings: RunSettings | None,
        *,
        listening: ListenOptions | None = None,
        clock: Clock | None = None,
        limits: ListenerLimits | None = None,
    ) -> None:
        self.listening = listening or ListenOptions()
        security.require_safe_listening(
            self.listening.host, has_tls=self.listening.has_tls
        )
        self.directory, self._clock = directory, clock or SystemClock()
        self._started_unix_s, now_s = time.time(), self._clock.now_s()
        is_new = not (directory / EVENTS).exists()
        self._disk, self._service = open_service(directory, settings, now_s=now_s)
        self.run = self._service.state.run
        self._bundle = self._locate_bundle()
        self.fault: Exception | None = None
        """The last unexpected exception; the events have it too."""

        self._trouble, self._has_stopped = "", False
        self._open_events(is_new=is_new)
        self._open_service(now_s)
        self._open_operators(directory)
        self._open_routes(Spool(directory / SPOOL, self._service.journal.room), limits)
        self._connections = Connections()
        self._listener = self._listen(limits)

    def _locate_bundle(self) -> Path | None:
        try:
            return find_bundle(self.directory, self._service.state.settings.run.bundle)
        except BaseException:
            self._disk.close()
            raise

    def _open_events(self, *, is_new: bool) -> None:
        """Open the event bus and its log file; report a new run."""
        files = EventFiles(self.directory)
        last = files.last()
        self.events = EventBus(process=secrets.token_hex(4))
        self._audit_log = AuditLog(self.events, self._clock)
        self._jsonl = JsonlWriter(
            self.directory,
            on_failure=lambda message: self.events.emit("disk_failed", message=message),
        )
        self.events.subscribe(self._jsonl, name="jsonl")
        self._past = PastRecorder(self.directory, process=self.events.process)
        self.events.subscribe(self._past, name="past", max_waiting=MAX_WAITING)
        state = self._service.state
        if is_new:
            self.events.emit("run_created")
        self.events.emit(
            "coordinator_started",
            round=lowest_round(state),
            fragments=len(state.rounds),
            was_clean=is_new or (last is not None and last.name == STOPPED),
            version=__version__,
        )
        if is_new and state.model is not None:  # by `serve --init`
            self.events.emit("run_founded", island="", fragments=len(state.rounds))

    def _open_service(self, now_s: float) -> None:
        """Start the watcher and wrap the service for use by threads."""
        self._watcher = Watcher(self.events, self._service.state, now_s)
        self._reporter = ProgressReporter(self.events, self._watcher.stats)
        self._service.failing = self._failing
        self._threaded_service = ThreadedService(
            self._service,
            clock=self._clock,
            watch=self._watcher.look,
            on_tick=self._watcher.tell_damage,
            on_fault=self._faulted,
        )
        self.live_status = LiveStatus(
            self._service,
            self._threaded_service,
            self._watcher,
            self._past,
            self.events,
            trouble=self._reduction_fault,
            traffic=self._traffic,
            started_unix_s=self._started_unix_s,
        )

    def _open_routes(self, spool: Spool, limits: ListenerLimits | None) -> None:
        """Create the routes of islands, whose request bodies go through the spool."""
        self._service.after_block = spool.release
        self._service.use_threads(kernels.usable_threads())
        self._routes = Routes(
            RouteContext(
                run=self.run,
                threaded_service=self._threaded_service,
                spool=spool,
                states=StateFiles(
                    self._threaded_service,
                    self.directory / SPOOL,
                    self._service.journal.room,
                ),
                journal=self._service.journal,
                root=self._disk.root,
                info=self._info,
                max_body_bytes=self._max_body_bytes,
                max_request_bytes=(limits or ListenerLimits()).max_body_bytes,
                failing=self._failing,
                on_beat=self._on_beat,
                unproven=self._unproven,
            ),
            self._operators,
        )

    @property
    def address(self) -> tuple[str, int]:
        """The address of the listener."""
        return self._listener.address

    @property
    def url(self) -> str:
        host, port = self._listener.address
        scheme = "https" if self.listening.has_tls else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def pin(self) -> str | None:
        """The fingerprint of the certificate, if there is one."""
        return self._pin

    @property
    def has_ended(self) -> bool:
        state, _ = self._threaded_service.look()
        return run_state(state, 0.0) == "ended"

    def start(self) -> None:
        """Start the threads and the listener."""
        self._watcher.tell_damage(self._service)  # before a signal can end this process
        self._past.wait_loaded(LOAD_S)
        self._threaded_service.start()
        self._listener.start()
        self.live_status.start()
        # Kernels take seconds to load, which the first update would wait for.
        threading.Thread(target=self._warm, name="atoll-warm", daemon=True).start()

    def _warm(self) -> None:
        settings = self._threaded_service.look()[0].settings
        try:
            kernels.warm(
                up=settings.wire.up,
                down=settings.wire.mean_codec,
                optimizer=settings.outer.optimizer,
                is_async=settings.sync.is_async,
            )
        except Exception as exc:  # the first update tries again
            self._failed(None, exc)

    def close(self, *, grace_s: float = 5.0) -> None:
        """Stop serving; everything that was acknowledged is durable. Safe to repeat."""
        self._listener.close(grace_s)
        self.live_status.close()
        self._threaded_service.close()
        with suppress(UsageError):  # the disk was closed before
            self._service.seal()
        if not self._has_stopped:
            self._has_stopped = True
            self.events.emit(STOPPED, round=lowest_round(self._service.state))
        self.events.close()
        self._past.close()
        self._jsonl.close()
        self._disk.close()

    def status(self) -> dict[str, Any]:
        """Return the status document."""
        return self.live_status.document()

    def _traffic(self) -> dict[str, Any]:
        """Return the part of the status that is the listener's."""
        counts = self._listener.counts
        return {
            "bytes_in": counts.bytes_in,
            "bytes_out": counts.bytes_out,
            "listening": self.url,
            "connections": {
                "open": counts.connections,
                "most": self._listener.max_connections,
                "unverified": counts.unverified,
                "parked_answers": counts.parked_answers,
                "parked_bytes": counts.parked_bytes,
                "bulk_active": counts.bulk_active,
                "bulk_waiting": counts.bulk_waiting,
                "long_polls": self._threaded_service.open_polls,
                "shed": dict(counts.shed),
            },
        }

    def _reduction_fault(self) -> str:
        """Return a failed write, or the fault that keeps a round from closing."""
        if self._trouble or self.fault is None:
            return self._trouble
        state, _ = self._threaded_service.look()
        if not any(round.phase is Phase.CLOSING for round in state.rounds):
            return ""
        return f"A fault occurred: {type(self.fault).__name__}: {self.fault}"

    def _open_operators(self, directory: Path) -> None:
        tokens = security.run_tokens(directory)
        self._tokens = security.Tokens(tokens)
        codes = security.OneTimeCodes(tokens[security.Role.ISLAND])
        self._operators = Operators(
            self._threaded_service,
            self.events,
            self.status,
            codes,
            spool=directory / SPOOL,
            root=self._disk.root,
            code=CodeFiles(directory, self._service.journal.room),
            past=PastReader(EventFiles(directory), self._past),
            bundle=self._bundle,
        )

    def _listen(self, limits: ListenerLimits | None) -> Listener:
        tls, self._pin = None, None
        if self.listening.has_tls:
            from atoll.security.certificates import coordinator_certificate

            certificate = coordinator_certificate(
                self.directory, hosts=[self.listening.host], unix_s=time.time()
            )
            self._pin = certificate.pin
            tls = security.listening_context(
                self.directory,
                require_island_certificates=self.listening.island_certificates,
            )
        return Listener(
            self._handle,
            host=self.listening.host,
            port=self.listening.port,
            clock=self._clock,
            tls=tls,
            limits=limits,
            on_closed=self._closed,
            on_error=self._failed,
            on_refused_handshake=self._audit_log.refused_handshake,
            on_shed=self._audit_log.shed,
            judge=self._judge,
            owner=_island_of,
            verifies=True,
        )

    def _judge(self, request: Request) -> Response | None:
        """Return the error response for a denied request; None if it is permitted."""
        match = find_route(request.method, request.segments)
        return self._denied(request, match, self._role_of(request))

    def _role_of(self, request: Request) -> security.Role | None:
        return self._tokens.role_of(request.headers.get("authorization"))

    def _denied(
        self, request: Request, match: RouteMatch, role: security.Role | None
    ) -> Response | None:
        if role is not None:
            request.connection.is_verified = True
        try:
            security.require(role, match.route.role)
        except Refused as exc:
            self._audit_log.denied(request, match, role)
            status = 401 if role is None else 403
            return replace(as_response(error_parts(exc)), status=status)
        if match.route.role is None and request.is_bulk:
            message = "A request without a token may not have so large a body."
            return as_problem(Problem(413, "length", message))
        return None

    def _handle(self, request: Request) -> Response | DeferredResponse:
        match = find_route(request.method, request.segments)
        role = self._role_of(request)
        denied = self._denied(request, match, role)
        if denied is not None:
            return denied
        if match.route is UNLISTED or request.method == "HEAD":
            return as_response(not_found_reply(request.segments))
        try:
            response = self._routes.handle(request, match)
        except (AtollError, RunEnded) as exc:
            self._audit_log.failed(request, match, role, exc)
            return as_response(error_parts(exc))
        if match.route.method in ("POST", "PUT") and not match.route.is_call:
            self._audit_log.allowed(request, match, role)
        return response

    def _info(self) -> EncodedReply:
        state, _ = self._threaded_service.look()
        return info_parts(
            Info(
                run=self.run,
                version=__version__,
                settings=state.settings,
                epoch=state.epoch,
                model_fingerprint=model_fingerprint(
                    state.model, bundle=state.settings.run.bundle
                ),
                lease_s=LEASE_S,
                heartbeat_s=HEARTBEAT_S,
                limits=InfoLimits(body_bytes=self._max_body_bytes()),
            )
        )

    def _max_body_bytes(self) -> int:
        return self._threaded_service.look()[0].settings.limits.max_body_bytes

    def _on_beat(self, request: Request, beat: Heartbeat | None) -> None:
        """Record the island of a connection, and the statistics in its heartbeat."""
        if beat is None:
            return
        incarnation = (beat.island, beat.incarnation)
        self._connections.heard(request.connection, incarnation)
        if beat.stats is not None:
            self._reporter.report(beat.island, beat.holds, beat.stats)

    def _unproven(self, request: Request, route: Route, island: str) -> None:
        """Audit a call that names an island without the proof of its key."""
        self._audit_log.unproven(request, route, self._role_of(request), island)

    def _closed(self, tag: object) -> None:
        """Handle the close of an island's last connection."""
        assert isinstance(tag, tuple)
        if self._connections.closed(tag):
            with suppress(LeaseLost):  # it has left, or has a newer incarnation
                self._threaded_service.closed(*tag)

    def _failing(self, message: str) -> None:
        """Report a failing disk once; an empty message means that it works again."""
        before, self._trouble = self._trouble, message
        if message and not before:
            self.events.emit("disk_failed", message=message)

    def _faulted(self, exc: Exception) -> None:
        self.fault = exc
        self._failed(None, exc)

    def _failed(self, request: Request | None, exc: Exception) -> None:
        source = request.path if request else "the coordinator"
        message = f"{source}: {type(exc).__name__}: {exc}"
        log.error("%s", message, exc_info=exc)
        self.events.emit("fault", message=message)


def lowest_round(state: CoordinatorState) -> int:
    """Return the lowest round committed over the fragments."""
    return min((round.number for round in state.rounds), default=1) - 1


def _island_of(request: Request) -> str:
    """Return the island that a request names, or an empty string; lanes share by it.

    It is not proven yet. Shares are counted by address as well, so that a false
    name from another address does not use up the island's share.
    """
    values = find_route(request.method, request.segments).values
    return values.get("island", request.query.get("island", ""))


MAX_PER_INCARNATION = 64
"""Connections of one incarnation; beyond it the oldest is aborted.

An island keeps four, and opens a few more while it moves fragments.
"""

IslandIncarnation = tuple[str, int]
"""An island and its incarnation."""


class TaggedConnection(Protocol):
    """A connection with a tag for its owner."""

    tag: object
    is_open: bool

    def abort(self) -> None:
        """Close the connection immediately, from any thread."""


class Connections:
    """Tracks the connections of each incarnation. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_incarnation: dict[IslandIncarnation, list[TaggedConnection]] = (
            defaultdict(list)
        )

    def heard(
        self, connection: TaggedConnection, incarnation: IslandIncarnation
    ) -> None:
        """Record the owner of a connection; it may have had another before."""
        with self._lock:
            if connection.tag == incarnation:
                return
            connection.tag = incarnation
            self._prune(incarnation)
            self._by_incarnation[incarnation].append(connection)
            while len(self._by_incarnation[incarnation]) > MAX_PER_INCARNATION:
                self._by_incarnation[incarnation].pop(0).abort()

    def closed(self, incarnation: IslandIncarnation) -> bool:
        """Return whether the incarnation has no open connection left."""
        with self._lock:
            self._prune(incarnation)
            is_last = not self._by_incarnation[incarnation]
            if is_last:
                del self._by_incarnation[incarnation]
            return is_last

    def _prune(self, incarnation: IslandIncarnation) -> None:
        connections = self._by_incarnation[incarnation]
        connections[:] = [
            connection
            for connection in connections
            if connection.is_open and connection.tag == incarnation
        ]


_ACTIONS = {action.value: action for action in security.AuditAction}
_KINDS = {
    "control": security.AuditKind.CONTROL,
    "make_invite": security.AuditKind.CODE_MADE,
    "redeem_invite": security.AuditKind.CODE_REDEEMED,
}


class AuditLog:
    """Emits audit events. Thread-safe."""

    def __init__(
        self,
        events: EventBus,
        clock: Clock,
        *,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._events, self._clock, self._unix_s = events, clock, unix_s
        self._sparing = security.RateLimiter()

    def allowed(
        self, request: Request, match: RouteMatch, role: security.Role | None
    ) -> None:
        """Audit a permitted change."""
        self._tell(security.AuditAnswer.ALLOWED, request, match, role)

    def denied(
        self, request: Request, match: RouteMatch, role: security.Role | None
    ) -> None:
        """Audit a request whose token is missing or insufficient."""
        is_missing = role is None
        answers = security.AuditAnswer
        answer = answers.NO_TOKEN if is_missing else answers.WRONG_ROLE
        self._tell(answer, request, match, role)

    def failed(
        self,
        request: Request,
        match: RouteMatch,
        role: security.Role | None,
        exc: AtollError | RunEnded,
    ) -> None:
        """Audit a wrong invitation code; other failures are not audited."""
        if match.route.name in ("make_invite", "redeem_invite"):
            answers, waits = security.AuditAnswer, isinstance(exc, security.MustWait)
            answer = answers.MUST_WAIT if waits else answers.WRONG_CODE
            self._tell(answer, request, match, role)

    def unproven(
        self, request: Request, route: Route, role: security.Role | None, island: str
    ) -> None:
        """Audit a call that lacks the proof of the island it names."""
        self._emit(
            security.AuditKind.REQUEST,
            security.AuditAnswer.WRONG_PROOF,
            request.address[0],
            role=role,
            route=route,
            island=island,
        )

    def refused_handshake(self, address: str, fault: HandshakeFault) -> None:
        """Audit a failed TLS handshake; a callback of the listener."""
        self._emit(
            security.AuditKind.HANDSHAKE, security.AuditAnswer(fault.value), address
        )

    def shed(self, address: str, reason: ShedReason) -> None:
        """Audit a connection closed by a limit; a callback of the listener."""
        self._emit(
            security.AuditKind.CONNECTION, security.AuditAnswer(reason.value), address
        )

    def _tell(
        self,
        answer: security.AuditAnswer,
        request: Request,
        match: RouteMatch,
        role: security.Role | None,
    ) -> None:
        self._emit(
            _KINDS.get(match.route.name, security.AuditKind.REQUEST),
            answer,
            request.address[0],
            role=role,
            route=match.route,
            action=_ACTIONS.get(match.values.get("action", "")),
        )

    def _emit(
        self,
        kind: security.AuditKind,
        answer: security.AuditAnswer,
        address: str,
        *,
        role: security.Role | None = None,
        route: Route = UNLISTED,
        action: security.AuditAction | None = None,
        island: str = "",
    ) -> None:
        untold: int | None = 0
        if answer is not security.AuditAnswer.ALLOWED:
            untold = self._sparing.untold((kind, answer), now_s=self._clock.now_s())
        if untold is None:
            return
        audit = security.AuditEvent(
            kind=kind,
            answer=answer,
            address=address,
            at_unix_s=self._unix_s(),
            role=role,
            route=route,
            action=action,
            untold=untold,
        )
        # The name of a member, which events contain already: not text from the caller.
        member = {"island": island} if island else {}
        self._events.emit("audit", **audit.as_event(), **member)
