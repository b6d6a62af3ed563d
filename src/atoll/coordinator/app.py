"""A coordinator as people run it: a directory, a port, tokens and threads.

journal/      the run itself; the only thing that must not be lost
spool/        updates on their way; empty when the process has ended
events.jsonl  what happened
*.token       who may ask
certificate   for TLS
bundle/       the model's definition, if the run has one
move.json     by which move the run has come, if it has: see `arrival`
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll import __version__, kernels
from atoll.clock import Clock, SystemClock
from atoll.coordinator.arrival import JOURNAL as JOURNAL
from atoll.coordinator.arrival import require_arrived
from atoll.coordinator.audits import Audits
from atoll.coordinator.bundles import as_created, kept
from atoll.coordinator.code_files import CodeFiles
from atoll.coordinator.connections import Connections
from atoll.coordinator.office import Office
from atoll.coordinator.operators import Operators, answered
from atoll.coordinator.routes import Desk, Routes, as_response
from atoll.coordinator.service import Service
from atoll.coordinator.spool import Spool
from atoll.coordinator.states import StateFiles
from atoll.coordinator.status import run_state, status_of
from atoll.coordinator.watcher import Watcher
from atoll.disk import SystemDisk
from atoll.errors import AtollError, LeaseLost, Refused, RunEnded, UsageError
from atoll.exchange.forms import (
    Answer,
    Info,
    error_parts,
    info_parts,
    model_fingerprint,
)
from atoll.exchange.forms.info import Limits as InfoLimits
from atoll.http import Later, Limits, Listener, Problem, Request, Response
from atoll.http.response import as_problem
from atoll.protocol import Beat, Stats
from atoll.protocol.membership import HEARTBEAT_S, LEASE_S
from atoll.protocol.rounds import Phase
from atoll.protocol.run_state import CoordinatorState
from atoll.security import (
    Codes,
    Role,
    Tokens,
    listening_context,
    needed_role,
    require,
    require_safe_listening,
    run_tokens,
)
from atoll.security.private import require_own_directory
from atoll.settings import RunSettings
from atoll.telemetry import Events, JsonlWriter

SPOOL, EVENTS = "spool", "events.jsonl"

log = logging.getLogger("atoll")


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where a coordinator listens, and how."""

    host: str = "127.0.0.1"
    port: int = 0
    has_tls: bool = True
    island_certificates: Path | None = None
    """Of an authority: islands must show a certificate that it has signed."""


def open_service(
    directory: Path, settings: RunSettings | None, *, now_s: float
) -> tuple[SystemDisk, Service]:
    """Return the run of a directory, begun if it has none.

    Raises:
        UsageError: there is no run and no settings are given, the run there has
            others, or is on its way still; or the directory belongs to another user,
            or others can change it.
    """
    require_arrived(directory)
    if directory.exists():
        require_own_directory(directory)
    disk = SystemDisk(directory / JOURNAL)
    try:
        return disk, _service(disk, directory, settings, now_s)
    except BaseException:
        disk.close()
        raise


def _service(
    disk: SystemDisk, directory: Path, settings: RunSettings | None, now_s: float
) -> Service:
    if not disk.names("log/"):
        if settings is None:
            raise UsageError(f"{directory} holds no run. Give a run file to begin one.")
        run = f"{settings.run.name}-{secrets.token_hex(6)}"
        return Service.create(disk, settings, run=run, now_s=now_s)
    service = Service.open(disk, now_s=now_s)
    created = service.journal.recorded.created
    assert created is not None
    if settings is not None:
        there = RunSettings.from_dict(created.settings)
        settings = as_created(settings, there, where=directory)
    if settings is not None and settings.fingerprint != created.fingerprint:
        raise UsageError(
            f"{directory} holds run {created.run!r} with settings "
            f"{created.fingerprint[:12]}, and the run file has "
            f"{settings.fingerprint[:12]}. Choose another directory, or change what "
            "can change with `atoll control RUN set`."
        )
    return service


class Coordinator:
    """One run, served. `start`, then `close`."""

    def __init__(
        self,
        directory: Path,
        settings: RunSettings | None,
        *,
        listening: Listening | None = None,
        clock: Clock | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.listening = listening or Listening()
        require_safe_listening(self.listening.host, has_tls=self.listening.has_tls)
        self.directory, self._clock = directory, clock or SystemClock()
        self._started_unix_s, now_s = time.time(), self._clock.now_s()
        is_new = not (directory / EVENTS).exists()
        self._disk, self._service = open_service(directory, settings, now_s=now_s)
        self.run = self._service.state.run
        self._bundle = self._find_bundle()
        self.fault: Exception | None = None
        """What should never happen, and did: see the events."""

        self._trouble = ""
        self._tell_events(is_new=is_new)
        self._open_office(now_s)
        self._people(directory)
        self._open_desk(Spool(directory / SPOOL, self._service.journal.room), limits)
        self._connections = Connections()
        self._listener = self._listen(limits)

    def _find_bundle(self) -> Path | None:
        try:
            return kept(self.directory, self._service.state.settings.run.bundle)
        except BaseException:
            self._disk.close()
            raise

    def _tell_events(self, *, is_new: bool) -> None:
        """Write down what happens, from the run's beginning if that is now."""
        self.events = Events()
        self._audits = Audits(self.events, self._clock)
        self._jsonl = JsonlWriter(
            self.directory,
            on_failure=lambda said: self.events.emit("disk_failed", message=said),
        )
        self.events.subscribe(self._jsonl, name="jsonl")
        if is_new:
            self.events.emit("run_created")
            if self._service.state.model is not None:
                self.events.emit("run_founded", island="")  # by `serve --init`

    def _open_office(self, now_s: float) -> None:
        """Let one thread change the run, and people see what it does."""
        self._watcher = Watcher(self.events, self._service.state, now_s)
        self._service.failing = self._failing
        self._office = Office(
            self._service,
            clock=self._clock,
            watch=self._watcher.look,
            on_fault=self._faulted,
        )

    def _open_desk(self, spool: Spool, limits: Limits | None) -> None:
        """Let islands ask, and their bodies go by the spool."""
        self._service.after_block = spool.release
        self._service.use_threads(kernels.usable_threads())
        self._routes = Routes(
            Desk(
                run=self.run,
                office=self._office,
                spool=spool,
                states=StateFiles(
                    self._office, self.directory / SPOOL, self._service.journal.room
                ),
                journal=self._service.journal,
                root=self._disk.root,
                info=self._info,
                max_body_bytes=self._max_body_bytes,
                max_request_bytes=(limits or Limits()).max_body_bytes,
                failing=self._failing,
                heard=self._heard,
                unproven=self._unproven,
            )
        )

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
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
        state, _ = self._office.look()
        return run_state(state, 0.0) == "ended"

    def start(self) -> None:
        """Serve from now on."""
        self._watcher.tell_damage(self._service)  # before a signal can end this process
        self._office.start()
        self._listener.start()
        # Kernels take seconds to load, which the first update would wait for.
        threading.Thread(target=self._warm, name="atoll-warm", daemon=True).start()

    def _warm(self) -> None:
        settings = self._office.look()[0].settings
        try:
            kernels.warm(
                up=settings.wire.up,
                down=settings.wire.down,
                optimizer=settings.outer.optimizer,
            )
        except Exception as exc:  # the first update tries again
            self._failed(None, exc)

    def close(self, *, grace_s: float = 5.0) -> None:
        """Stop serving; everything that was promised is durable. Safe to repeat."""
        self._listener.close(grace_s)
        self._office.close()
        with suppress(UsageError):  # the disk was closed before
            self._service.seal()
        self.events.close()
        self._jsonl.close()
        self._disk.close()

    def status(self) -> dict[str, Any]:
        """Return the status document."""
        state, now_s = self._office.look()
        said = status_of(
            state,
            now_s,
            stats=dict(self._watcher.stats),
            verdicts=self._watcher.verdicts,
            since_unix_s=self._watcher.since_unix_s,
        )
        counts = self._listener.counts
        return said | {
            "why": self._trouble or said["why"] + self._fault_text(state),
            "version": __version__,
            "started_unix_s": self._started_unix_s,
            "now_unix_s": time.time(),
            "recent": list(self._watcher.recent),
            "disk": self._disk_room(),
            "damage": [*self._service.journal.reports, *self._service.damage],
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
                "long_polls": self._office.open_questions,
                "shed": dict(counts.shed),
            },
        }

    def _disk_room(self) -> dict[str, int]:
        """Return what is free, and what of it is kept for the journal."""
        room = self._service.journal.room
        return {"free_bytes": room.free_bytes, "reserve_bytes": room.reserve_bytes}

    def _fault_text(self, state: CoordinatorState) -> str:
        """Return what to add to why the run waits, if a round could not be reduced."""
        is_closing = any(round.phase is Phase.CLOSING for round in state.rounds)
        if self.fault is None or not is_closing:
            return ""
        return f" A fault occurred: {type(self.fault).__name__}: {self.fault}"

    def _people(self, directory: Path) -> None:
        tokens = run_tokens(directory)
        self._tokens = Tokens(tokens)
        codes = Codes(tokens[Role.ISLAND])
        self._operators = Operators(
            self._office,
            self.events,
            self.status,
            codes,
            spool=directory / SPOOL,
            root=self._disk.root,
            code=CodeFiles(directory, self._service.journal.room),
            bundle=self._bundle,
        )

    def _listen(self, limits: Limits | None) -> Listener:
        tls, self._pin = None, None
        if self.listening.has_tls:
            from atoll.security.certificate import coordinator_certificate

            certificate = coordinator_certificate(
                self.directory, hosts=[self.listening.host], unix_s=time.time()
            )
            self._pin = certificate.pin
            tls = listening_context(
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
            on_refused_handshake=self._audits.refused_handshake,
            on_shed=self._audits.shed,
            judge=self._denied,
            owner=_island_of,
            verifies=True,
        )

    def _denied(self, request: Request) -> Response | None:
        """Return what who may not ask is told; None if a request may be handled."""
        needed = needed_role(request.method, request.target.partition("?")[0])
        role = self._tokens.role_of(request.headers.get("authorization"))
        if role is not None:
            request.connection.is_verified = True
        try:
            if needed is not None:
                require(role, needed)
        except Refused as exc:
            self._audits.denied(request, role)
            status = 401 if role is None else 403
            return replace(as_response(error_parts(exc)), status=status)
        if needed is None and request.is_bulk:
            said = "Nobody without a token may send so much, or be asked for it."
            return as_problem(Problem(413, "length", said))
        return None

    def _handle(self, request: Request) -> Response | Later:
        denied = self._denied(request)
        if denied is not None:
            return denied
        role = self._tokens.role_of(request.headers.get("authorization"))
        try:
            own = self._operators.handle(request, self._clock.now_s())
        except (AtollError, RunEnded) as exc:
            self._audits.failed(request, role, exc)
            return answered(exc)  # type: ignore[arg-type]
        if request.method in ("POST", "PUT") and own is not None:
            self._audits.allowed(request, role)
        return own if own is not None else self._routes.handle(request)

    def _info(self) -> Answer:
        state, _ = self._office.look()
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
        return self._office.look()[0].settings.limits.max_body_bytes

    def _heard(self, request: Request, beat: Beat | None) -> None:
        """Remember who is at the other end of a connection, and what it told."""
        if beat is None:
            return
        who = (beat.island, beat.incarnation)
        self._connections.heard(request.connection, who)
        if beat.stats is not None:
            self._tell(beat)

    def _unproven(self, request: Request, island: str) -> None:
        """Audit a call that speaks for an island without its key."""
        role = self._tokens.role_of(request.headers.get("authorization"))
        self._audits.unproven(request, role, island)

    def _tell(self, beat: Beat) -> None:
        assert beat.stats is not None
        before = self._watcher.stats.get(beat.island)
        self._watcher.stats[beat.island] = beat.stats
        self._report_dropped(beat.island, before, beat.stats)
        if before is not None and _progress(before) == _progress(beat.stats):
            return  # one that stands still would push all else out of the events
        self.events.emit(
            "loss_reported",
            island=beat.island,
            round=min((held.round for held in beat.holds), default=0),
            inner_steps=beat.stats.inner_steps,
            tokens=beat.stats.tokens,
            loss=beat.stats.loss,
        )

    def _report_dropped(self, island: str, before: Stats | None, now: Stats) -> None:
        """Emit an event when an island says that it has dropped more work."""
        known = (before.dropped_steps if before else None) or 0
        total = now.dropped_steps or 0
        if total > known:
            self.events.emit(
                "work_dropped", island=island, steps=total - known, total_steps=total
            )

    def _closed(self, tag: object) -> None:
        """Take the hint of an island whose last connection is gone."""
        assert isinstance(tag, tuple)
        if self._connections.closed(tag):
            with suppress(LeaseLost):  # it has left, or lives again elsewhere
                self._office.closed(*tag)

    def _failing(self, said: str) -> None:
        """Tell people, once, that the disk takes nothing; nothing means it does."""
        before, self._trouble = self._trouble, said
        if said and not before:
            self.events.emit("disk_failed", message=said)

    def _faulted(self, exc: Exception) -> None:
        self.fault = exc
        self._failed(None, exc)

    def _failed(self, request: Request | None, exc: Exception) -> None:
        where = request.path if request else "the coordinator"
        said = f"{where}: {type(exc).__name__}: {exc}"
        log.error("%s", said, exc_info=exc)
        self.events.emit("fault", message=said)


def _island_of(request: Request) -> str:
    """Return the island that a request names, for its share of the lanes; or nothing.

    It is not proven yet. Shares are counted by address as well, so that a false
    name from another address does not use up the island's share.
    """
    match request.segments:
        case ("islands", island, *_) | (_, _, _, _, "updates" | "offers", island):
            return island
    return request.query.get("island", "")


def _progress(stats: Stats) -> tuple[int, int, float | None]:
    return stats.inner_steps, stats.tokens, stats.loss
