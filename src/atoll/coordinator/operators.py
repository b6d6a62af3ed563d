"""What people and their tools ask: status, metrics, events, control."""

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
from atoll.coordinator.belongings import belongings_of, update_of
from atoll.coordinator.code_files import CodeFiles
from atoll.coordinator.office import Office
from atoll.errors import AtollError, Refused, UsageError
from atoll.exchange.bucket.arriving import BELONGINGS, Left
from atoll.exchange.forms import error_parts
from atoll.exchange.forms.failures import TARGET
from atoll.exchange.forms.fields import hexed, require_name
from atoll.exchange.forms.frames import buffers_of
from atoll.exchange.forms.heads import whole_text
from atoll.exchange.forms.routes import Takes
from atoll.exchange.forms.text import MAX_LARGE_BYTES, SEE, dump, load
from atoll.http import FilePart, Later, Request, Response, as_json, ranged
from atoll.protocol.events import (
    Event,
    Leave,
    Moved,
    Moving,
    NewValues,
    Pausing,
    Saving,
    Staying,
    Stopping,
)
from atoll.security import Codes
from atoll.telemetry import Events, render
from atoll.telemetry.prometheus import CONTENT_TYPE
from atoll.wire.digests import view_of
from atoll.wire.text import reason_fault

MAX_COMMAND_BYTES = 64 * 1024
ARCHIVE = "application/x-tar"
EVENTS_WAIT_S = 20.0
"""How long a question for new events may stay open."""

MAX_READERS = 256
"""Questions for new events that stay open; beyond it the oldest is answered empty."""

NONCE = hexed(16, 16)
"""What names a move."""

Status = Callable[[], dict[str, Any]]


class Operators:
    """Answers the routes that are not an island's."""

    def __init__(
        self,
        office: Office,
        events: Events,
        status: Status,
        codes: Codes,
        *,
        spool: Path,
        root: Path,
        code: CodeFiles,
        bundle: Path | None = None,
    ) -> None:
        self._office, self._events, self._status = office, events, status
        self._codes, self._bundle, self._code = codes, bundle, code
        self._anchors = AnchorFiles(office, spool, root)
        self._lock = threading.Lock()
        self._readers: dict[Later, int] = {}
        """Open event requests and the event number each one follows, oldest first."""

        events.subscribe(lambda event: self._wake(), name="readers")

    def handle(self, request: Request, now_s: float) -> Response | Later | None:
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
                self._code.keep(digest, request.body.read(MAX_CODE_BYTES))
                return as_json({"digest": digest})
            case "GET", "belongings":
                return self._belongings()
            case "GET", "belongings", fragment, round, island:
                left = Left(
                    fragment=whole_text(fragment, "fragment"),
                    round=whole_text(round, "round"),
                    island=require_name(island, "island"),
                )
                return self._update(left)
            case "POST", "control", action:
                return self._control(action, _command(request))
            case "POST", "invites":
                code = self._codes.make(now_s=now_s)
                return as_json({"code": code.reveal()})
            case "POST", "invites", "redeem":
                said = _command(request).get("code")
                token = self._codes.redeem(
                    str(said), address=request.address[0], now_s=now_s
                )
                return as_json({"token": token.reveal()})
        return None

    def _control(self, action: str, said: Mapping[str, Any]) -> Response:
        self._office.change(_event(action, said, self._office))
        if action in ("stop", "drain"):
            last = self._office.look()[0].last_round
            self._events.emit("run_stopped", last_round=last)
        return as_json(self._status())

    def _belongings(self) -> Response:
        """Answer with what a run on its way takes along."""
        found = self._office.change_by(belongings_of)
        said = dump(BELONGINGS.write(found), what="belongings", most=MAX_LARGE_BYTES)
        return Response(headers={"Content-Type": Takes.JSON.value}, body=said)

    def _update(self, left: Left) -> Response:
        frame = self._office.change_by(lambda service, _: update_of(service, left))
        return Response(
            headers={"Content-Type": Takes.FRAME.value},
            body=[view_of(part) for part in buffers_of(frame)],
        )

    def _read_events(self, request: Request) -> Response | Later:
        """Answer with events after a number, once there are any."""
        after = whole_text(request.query.get("after", "0"), "after")
        found = self._events.after(after)
        if found or "wait" not in request.query:
            return as_json([each.as_dict() for each in found])
        later = Later(wait_s=EVENTS_WAIT_S, default=lambda: self._give_up(later))
        later.on_gone(partial(self._forget, later))
        with self._lock:
            self._readers[later] = after
            oldest = next(iter(self._readers))
            is_full = len(self._readers) > MAX_READERS
        if is_full:
            self._forget(oldest)
            oldest.set(as_json([]))
        return later

    def _forget(self, later: Later) -> None:
        with self._lock:
            self._readers.pop(later, None)

    def _give_up(self, later: Later) -> Response:
        self._forget(later)
        return as_json([])

    def _anchor(self, request: Request) -> Response:
        """Answer with the weights, as a file that every framework reads."""
        asked = request.query.get("round")
        if asked is None:
            file = self._anchors.newest()
        else:
            file = self._anchors.at(whole_text(asked, "round"))
        said = {"Content-Type": SAFETENSORS}
        response = ranged(request, file.body, etag=file.digest, headers=said)
        return replace(response, done=partial(_keep, file))

    def _definition(self, request: Request) -> Response:
        """Answer with what defines the model, as it was given."""
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
            found = self._events.after(after)
            if not later.is_gone:
                later.set(as_json([each.as_dict() for each in found]))


def _archive(request: Request, path: Path) -> Response:
    """Answer with a file that is called by its digest."""
    part = FilePart(file=path, length=path.stat().st_size)
    return ranged(request, part, etag=path.name, headers={"Content-Type": ARCHIVE})


def _keep(file: object) -> None:
    """Hold a file until it has been sent: its handle is closed with its last owner."""


def _event(action: str, said: Mapping[str, Any], office: Office) -> Event:
    match action:
        case "pause" | "resume":
            return Pausing(is_paused=action == "pause")
        case "save":
            return Saving()
        case "stop" | "drain":
            return Stopping()
        case "evict":
            return _eviction(str(said.get("island", "")), office)
        case "set":
            values = said.get("values")
            if not isinstance(values, dict) or not values:
                raise UsageError("Say what to set, as KEY=VALUE.")
            return NewValues(values)
        case "move" | "moved" | "stay":
            return _moving(action, said)
    known = "pause, resume, save, stop, drain, evict, set, move, moved, stay"
    raise UsageError(f"{action!r} is no action. Known are: {known}.")


def _moving(action: str, said: Mapping[str, Any]) -> Moving | Moved | Staying:
    target = TARGET.read(said.get("target"), "target")
    if fault := reason_fault(target, what="target"):
        raise UsageError(f"{fault}. Give the URL of a store.")
    match action:
        case "move":
            return Moving(target, NONCE.read(said.get("nonce"), "nonce").hex())
        case "moved":
            return Moved(target)
    return Staying(target)


def _eviction(island: str, office: Office) -> Leave:
    state, _ = office.look()
    member = state.members.known.get(island)
    if member is None:
        known = ", ".join(sorted(state.members.known)) or "none"
        raise UsageError(f"No island is called {island!r}. Known are: {known}.")
    return Leave(island, member.incarnation, reason="evicted")


def _command(request: Request) -> Mapping[str, Any]:
    data = request.body.read(MAX_COMMAND_BYTES)
    said = load(data or b"{}", what="command", most=MAX_COMMAND_BYTES)
    if not isinstance(said, dict):
        raise UsageError(f"A command is a JSON object. {SEE}")
    return said


def answered(exc: AtollError) -> Response:
    """Return the answer to a request that was refused."""
    answer = error_parts(exc)
    return Response(
        status=answer.status,
        headers=answer.headers,
        body=[memoryview(bytes(part)) for part in answer.body],
    )
