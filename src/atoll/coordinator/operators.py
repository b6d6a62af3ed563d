"""HTTP routes of operators: status, metrics, events, control."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from atoll.bundle.archive import MAX_CODE_BYTES
from atoll.coordinator.anchor_file import CONTENT_TYPE as SAFETENSORS
from atoll.coordinator.anchor_file import AnchorFiles
from atoll.coordinator.directory import CodeFiles
from atoll.coordinator.move import moved_run_of, update_of
from atoll.coordinator.threads import ThreadedService
from atoll.errors import AtollError, Refused, UsageError
from atoll.exchange.api import error_parts
from atoll.exchange.api.fields import (
    MAX_LARGE_BYTES,
    SEE,
    dump,
    hexed,
    load,
    require_name,
)
from atoll.exchange.api.frames import buffers_of
from atoll.exchange.api.replies import TARGET
from atoll.exchange.api.routes import BodyKind, whole_text
from atoll.exchange.bucket.move import MOVED_RUN, UnclaimedUpdate
from atoll.http import DeferredResponse, FilePart, Request, Response, as_json, ranged
from atoll.protocol.events import (
    Event,
    Leave,
    MoveCancelled,
    MoveCompleted,
    MoveRequested,
    PauseRequested,
    SaveRequested,
    SettingsChanged,
    StopRequested,
)
from atoll.security import OneTimeCodes
from atoll.telemetry import EventBus, render
from atoll.telemetry.prometheus import CONTENT_TYPE
from atoll.wire.digests import view_of
from atoll.wire.roster import reason_fault

MAX_COMMAND_BYTES = 64 * 1024
ARCHIVE = "application/x-tar"
EVENTS_WAIT_S = 20.0
"""Timeout of a long poll for new events."""

MAX_READERS = 256
"""Open long polls for new events; beyond it the oldest is answered empty."""

NONCE = hexed(16, 16)
"""The identifier of a move."""

Status = Callable[[], dict[str, Any]]


class Operators:
    """Handles the routes of operators and tools."""

    def __init__(
        self,
        threaded_service: ThreadedService,
        events: EventBus,
        status: Status,
        codes: OneTimeCodes,
        *,
        spool: Path,
        root: Path,
        code: CodeFiles,
        bundle: Path | None = None,
    ) -> None:
        self._threaded_service, self._events, self._status = (
            threaded_service,
            events,
            status,
        )
        self._codes, self._bundle, self._code = codes, bundle, code
        self._anchors = AnchorFiles(threaded_service, spool, root)
        self._lock = threading.Lock()
        self._readers: dict[DeferredResponse, int] = {}
        """Open event requests and the event number each one follows, oldest first."""

        events.subscribe(lambda event: self._wake(), name="readers")

    def handle(
        self, request: Request, now_s: float
    ) -> Response | DeferredResponse | None:
        """Return the answer to a request, or None if it is an island's."""
        match request.method, *request.segments:
            case "GET", "health":
                return as_json({"ok": True})
            case "GET", "status":
                return as_json(self._status())
            case "GET", "metrics":
                text = render(self._status(), self._events.counters())
                return Response(
                    headers={"Content-Type": CONTENT_TYPE}, body=text.encode()
                )
            case "GET", "events":
                return self._read_events(request)
            case "GET", "anchor":
                return self._anchor(request)
            case "GET", "bundle":
                return self._definition(request)
            case "GET", "code":
                return as_json({"digests": self._code.digests()})
            case "GET", "code", digest:
                return _archive(request, self._code.find(digest))
            case "PUT", "code", digest:
                self._code.store(digest, request.body.read(MAX_CODE_BYTES))
                return as_json({"digest": digest})
            case "GET", "belongings":
                return self._belongings()
            case "GET", "belongings", fragment, round, island:
                unclaimed = UnclaimedUpdate(
                    fragment=whole_text(fragment, "fragment"),
                    round=whole_text(round, "round"),
                    island=require_name(island, "island"),
                )
                return self._update(unclaimed)
            case "POST", "control", action:
                return self._control(action, _command(request))
            case "POST", "invites":
                code = self._codes.make(now_s=now_s)
                return as_json({"code": code.reveal()})
            case "POST", "invites", "redeem":
                invite = _command(request).get("code")
                token = self._codes.redeem(
                    str(invite), address=request.address[0], now_s=now_s
                )
                return as_json({"token": token.reveal()})
        return None

    def _control(self, action: str, fields: Mapping[str, Any]) -> Response:
        self._threaded_service.change(_event(action, fields, self._threaded_service))
        if action in ("stop", "drain"):
            last = self._threaded_service.look()[0].last_round
            self._events.emit("run_stopped", last_round=last)
        return as_json(self._status())

    def _belongings(self) -> Response:
        """Answer with the description of a run that is being moved."""
        moved = self._threaded_service.change_by(moved_run_of)
        body = dump(
            MOVED_RUN.write(moved), name="belongings", max_bytes=MAX_LARGE_BYTES
        )
        return Response(headers={"Content-Type": BodyKind.JSON.value}, body=body)

    def _update(self, unclaimed: UnclaimedUpdate) -> Response:
        frame = self._threaded_service.change_by(
            lambda service, _: update_of(service, unclaimed)
        )
        return Response(
            headers={"Content-Type": BodyKind.FRAME.value},
            body=[view_of(part) for part in buffers_of(frame)],
        )

    def _read_events(self, request: Request) -> Response | DeferredResponse:
        """Answer with events after a number, once there are any."""
        after = whole_text(request.query.get("after", "0"), "after")
        events = self._events.after(after)
        if events or "wait" not in request.query:
            return as_json([event.as_dict() for event in events])
        later = DeferredResponse(
            wait_s=EVENTS_WAIT_S, default=lambda: self._give_up(later)
        )
        later.on_gone(partial(self._forget, later))
        with self._lock:
            self._readers[later] = after
            oldest = next(iter(self._readers))
            is_full = len(self._readers) > MAX_READERS
        if is_full:
            self._forget(oldest)
            oldest.set(as_json([]))
        return later

    def _forget(self, later: DeferredResponse) -> None:
        with self._lock:
            self._readers.pop(later, None)

    def _give_up(self, later: DeferredResponse) -> Response:
        self._forget(later)
        return as_json([])

    def _anchor(self, request: Request) -> Response:
        """Answer with the weights, as a file that every framework reads."""
        round_text = request.query.get("round")
        if round_text is None:
            file = self._anchors.newest()
        else:
            file = self._anchors.at(whole_text(round_text, "round"))
        headers = {"Content-Type": SAFETENSORS}
        response = ranged(request, file.body, etag=file.digest, headers=headers)
        return replace(response, done=partial(_keep, file))

    def _definition(self, request: Request) -> Response:
        """Answer with the bundle that defines the model."""
        path = self._bundle
        if path is None:
            raise Refused(
                "The run has no bundle: every island brings its model's definition. "
                "One is given when a run begins: `atoll serve RUN.toml --bundle DIR`."
            )
        return _archive(request, path)

    def _wake(self) -> None:
        with self._lock:
            readers, self._readers = self._readers, {}
        for later, after in readers.items():
            events = self._events.after(after)
            if not later.is_gone:
                later.set(as_json([event.as_dict() for event in events]))


def _archive(request: Request, path: Path) -> Response:
    """Answer with a file that is named by its digest."""
    part = FilePart(file=path, length=path.stat().st_size)
    return ranged(request, part, etag=path.name, headers={"Content-Type": ARCHIVE})


def _keep(file: object) -> None:
    """Keep a reference to a file until it is sent: its last owner closes it."""


def _event(
    action: str, fields: Mapping[str, Any], threaded_service: ThreadedService
) -> Event:
    match action:
        case "pause" | "resume":
            return PauseRequested(is_paused=action == "pause")
        case "save":
            return SaveRequested()
        case "stop" | "drain":
            return StopRequested()
        case "evict":
            return _eviction(str(fields.get("island", "")), threaded_service)
        case "set":
            values = fields.get("values")
            if not isinstance(values, dict) or not values:
                raise UsageError("Say what to set, as KEY=VALUE.")
            return SettingsChanged(values)
        case "move" | "moved" | "stay":
            return _moving(action, fields)
    actions = "pause, resume, save, stop, drain, evict, set, move, moved, stay"
    raise UsageError(f"{action!r} is no action. Known are: {actions}.")


def _moving(
    action: str, fields: Mapping[str, Any]
) -> MoveRequested | MoveCompleted | MoveCancelled:
    target = TARGET.read(fields.get("target"), "target")
    if fault := reason_fault(target, field="target"):
        raise UsageError(f"{fault}. Give the URL of a store.")
    match action:
        case "move":
            return MoveRequested(target, NONCE.read(fields.get("nonce"), "nonce").hex())
        case "moved":
            return MoveCompleted(target)
    return MoveCancelled(target)


def _eviction(island: str, threaded_service: ThreadedService) -> Leave:
    state, _ = threaded_service.look()
    member = state.members.known.get(island)
    if member is None:
        names = ", ".join(sorted(state.members.known)) or "none"
        raise UsageError(f"No island is called {island!r}. Known are: {names}.")
    return Leave(island, member.incarnation, reason="evicted")


def _command(request: Request) -> Mapping[str, Any]:
    data = request.body.read(MAX_COMMAND_BYTES)
    fields = load(data or b"{}", name="command", max_bytes=MAX_COMMAND_BYTES)
    if not isinstance(fields, dict):
        raise UsageError(f"A command is a JSON object. {SEE}")
    return fields


def error_response(exc: AtollError) -> Response:
    """Return the answer to a request that was refused."""
    answer = error_parts(exc)
    return Response(
        status=answer.status,
        headers=answer.headers,
        body=[memoryview(bytes(part)) for part in answer.body],
    )
