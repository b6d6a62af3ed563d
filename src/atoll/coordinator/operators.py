"""Handlers of the routes of people and their tools: status, events, control."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from atoll.bundle.archive import MAX_CODE_BYTES
from atoll.coordinator.anchor_file import CONTENT_TYPE as SAFETENSORS
from atoll.coordinator.anchor_file import AnchorFiles
from atoll.coordinator.directory import CodeFiles
from atoll.coordinator.move import moved_run_of
from atoll.coordinator.routes import as_response, keep_until_sent
from atoll.coordinator.rows import CONTENT_TYPE as CSV
from atoll.coordinator.rows import LedgerFiles
from atoll.coordinator.status_fields import last_round_of
from atoll.coordinator.threads import ThreadedService
from atoll.errors import Refused, Unreachable, UsageError
from atoll.exchange.api import RequestHead, json_answer
from atoll.exchange.api.bodies import (
    SEE,
    hexed,
    load,
)
from atoll.exchange.api.replies import TARGET
from atoll.exchange.api.request_head import whole_text
from atoll.exchange.bucket.move import MOVED_RUN
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
from atoll.routes import BodyKind
from atoll.security import OneTimeCodes
from atoll.telemetry import Event as RunEvent
from atoll.telemetry import EventBus, EventFiles, PastRecorder, history, render
from atoll.telemetry.event_files import EventFilter
from atoll.telemetry.history import history_query
from atoll.telemetry.prometheus import CONTENT_TYPE
from atoll.wire.roster import reason_fault

MAX_COMMAND_BYTES = 64 * 1024
EVENTS_WAIT_S = 20.0
"""Timeout of a long poll for new events."""

MAX_READERS = 256
"""Open long polls for new events; beyond it the oldest is answered empty."""

PAGE_KEYS = {"before", "limit", "kind", "island"}
"""A query with one of these asks for a page of the files."""

NONCE = hexed(16, 16)
"""The identifier of a move."""

Status = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class PastReader:
    """The files of events, and their fold."""

    files: EventFiles
    recorder: PastRecorder


class Operators:
    """Handles the routes of operators and tools, by their names in `ROUTES`."""

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
        past: PastReader,
        bundle: Path | None = None,
    ) -> None:
        self._threaded_service, self._events, self._status = (
            threaded_service,
            events,
            status,
        )
        self._codes, self._bundle, self._code = codes, bundle, code
        self._past = past
        self._anchors = AnchorFiles(threaded_service, spool, root)
        self._ledgers = LedgerFiles(threaded_service, spool)
        self._lock = threading.Lock()
        self._readers: dict[DeferredResponse, int] = {}
        """Open event requests and the event number each one follows, oldest first."""

        events.subscribe(lambda event: self._wake(), name="readers")

    def health(self, request: Request, head: RequestHead) -> Response:
        return as_json({"ok": True})

    def status(self, request: Request, head: RequestHead) -> Response:
        return as_json(self._status())

    def metrics(self, request: Request, head: RequestHead) -> Response:
        text = render(self._status(), self._events.counters())
        return Response(headers={"Content-Type": CONTENT_TYPE}, body=text.encode())

    def make_invite(self, request: Request, head: RequestHead) -> Response:
        _, now_s = self._threaded_service.look()
        return as_json({"code": self._codes.make(now_s=now_s).reveal()})

    def redeem_invite(self, request: Request, head: RequestHead) -> Response:
        _, now_s = self._threaded_service.look()
        code, address = str(_command(request).get("code")), request.address[0]
        token = self._codes.redeem(code, address=address, now_s=now_s)
        return as_json({"token": token.reveal()})

    def code(self, request: Request, head: RequestHead) -> Response:
        return as_json({"digests": self._code.digests()})

    def fetch_code(self, request: Request, head: RequestHead) -> Response:
        return _archive(request, self._code.find(head.path_values["digest"]))

    def store_code(self, request: Request, head: RequestHead) -> Response:
        digest = head.path_values["digest"]
        self._code.store(digest, request.body.read(MAX_CODE_BYTES))
        return as_json({"digest": digest})

    def control(self, request: Request, head: RequestHead) -> Response:
        action, fields = head.path_values["action"], _command(request)
        self._threaded_service.change(_event(action, fields, self._threaded_service))
        if action in ("stop", "drain"):
            last = last_round_of(self._threaded_service.look()[0])
            self._events.emit("run_stopped", last_round=last)
        return as_json(self._status())

    def belongings(self, request: Request, head: RequestHead) -> Response:
        """Answer with the description of a run that is being moved."""
        moved = self._threaded_service.change_by(moved_run_of)
        return as_response(json_answer(MOVED_RUN.write(moved), name="belongings"))

    def events(
        self, request: Request, head: RequestHead
    ) -> Response | DeferredResponse:
        """Answer with events after a number, once there are any, or a page of files.

        A number of an earlier process is no number of this one: then all that are kept.
        """
        if head.query.keys() & PAGE_KEYS:
            return as_json(self._page(head.query))
        after = whole_text(head.query.get("after", "0"), "after")
        if head.query.get("process", self._events.process) != self._events.process:
            after = 0
        events = self._events.after(after)
        if events or "wait" not in head.query:
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

    def _page(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return a page of older events, oldest first, and the cursor of the next."""
        before = query.get("before", "")
        limit = whole_text(query.get("limit", "200"), "limit")
        only = EventFilter(kind=query.get("kind", ""), island=query.get("island", ""))
        # Read before the page: one that is written in between is in the page.
        last = None if before else self._past.files.last()
        page = self._past.files.page(before, limit=limit, only=only)
        events = page.events
        if not before:
            unwritten = self._unwritten([last, *events[-1:]])
            events = [*events, *filter(only, unwritten)]
        return {"events": [event.as_dict() for event in events], "before": page.before}

    def _unwritten(self, written: Sequence[RunEvent | None]) -> list[RunEvent]:
        """Return the events of this process after those that its file has."""
        process = self._events.process
        numbers = [x.number for x in written if x is not None and x.process == process]
        return self._events.after(max(numbers, default=0))

    def history(self, request: Request, head: RequestHead) -> Response:
        """Answer with the past of the run, or with its news."""
        arguments = history_query(head.query)
        answer = self._past.recorder.read(lambda past: history(past, **arguments))
        if answer is None:
            raise Unreachable("The past of the run is being loaded. Ask again.")
        return Response(headers={"content-type": BodyKind.JSON.value}, body=answer)

    def _forget(self, later: DeferredResponse) -> None:
        with self._lock:
            self._readers.pop(later, None)

    def _give_up(self, later: DeferredResponse) -> Response:
        self._forget(later)
        return as_json([])

    def anchor(self, request: Request, head: RequestHead) -> Response:
        """Answer with the weights, as a file that every framework reads."""
        round_text = head.query.get("round")
        if round_text is None:
            file = self._anchors.newest()
        else:
            file = self._anchors.at(whole_text(round_text, "round"))
        headers = {"Content-Type": SAFETENSORS}
        response = ranged(request, file.body, etag=file.digest, headers=headers)
        return replace(response, done=partial(keep_until_sent, file))

    def ledger(self, request: Request, head: RequestHead) -> Response:
        """Answer with the ledger of the run's rows, as a table."""
        file = self._ledgers.write()
        part = FilePart(file=file.handle, length=file.size_bytes)
        headers = {"Content-Type": CSV}
        response = ranged(request, part, headers=headers)
        return replace(response, done=partial(keep_until_sent, file))

    def bundle(self, request: Request, head: RequestHead) -> Response:
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
    return ranged(
        request, part, etag=path.name, headers={"Content-Type": BodyKind.ARCHIVE.value}
    )


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
