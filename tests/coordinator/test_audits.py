"""Denials over a real port: told, sparingly, and without what the caller wrote."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.coordinator.app import AuditLog
from atoll.errors import Refused
from atoll.http import Listener, Request, Response
from atoll.routes import find_route
from atoll.runtime import SystemClock
from atoll.security import MustWait, Role, listening_context
from atoll.security.audit import MAX_REPORTS
from atoll.security.certificates import coordinator_certificate
from atoll.telemetry import (
    EventBus,
)
from tests.http.loopback import PATIENCE_S, Dialogue, calling, head

Handle = Callable[[AuditLog, Request], None]


def told(events: EventBus) -> list[dict[str, Any]]:
    """Return the audits so far, without their times."""
    return [
        {k: v for k, v in each.as_dict().items() if k not in ("number", "at_unix_s")}
        for each in events.after(0)
        if each.name == "audit"
    ]


@contextmanager
def audited(
    handle: Handle, *, certificate: Path | None = None
) -> Iterator[tuple[Listener, EventBus]]:
    """Listen on loopback, and let `handle` tell of what comes."""
    events, clock = EventBus(), SystemClock()
    audits = AuditLog(events, clock)

    def answer(request: Request) -> Response:
        handle(audits, request)
        return Response(body=b"")

    listener = Listener(
        answer,
        host="127.0.0.1",
        port=0,
        clock=clock,
        tls=listening_context(certificate) if certificate else None,
        on_refused_handshake=audits.refused_handshake,
    )
    listener.start()
    try:
        yield listener, events
    finally:
        listener.close(grace_s=0.2)


def test_a_scan_costs_ten_lines(tmp_path: Path) -> None:
    """Fifty callers without TLS are ten audits, and each was answered."""
    coordinator_certificate(tmp_path, hosts=[], unix_s=time.time())
    refused = threading.Semaphore(0)
    with audited(lambda *_: None, certificate=tmp_path) as (listener, events):
        events.subscribe(lambda event: refused.release(), name="test")
        for _ in range(50):
            with Dialogue(listener.address) as plain:
                plain.say(head("GET /?token=atoll_i_secret"))
                assert plain.hear().status == 400
        for _ in range(MAX_REPORTS):
            assert refused.acquire(timeout=PATIENCE_S)
        found = told(events)

    assert len(found) == MAX_REPORTS
    assert {(each["what"], each["answer"]) for each in found} == {
        ("handshake", "no_tls")
    }
    assert {(each["address"], each["role"]) for each in found} == {
        ("127.0.0.1", "none")
    }
    assert "secret" not in str(found)


def test_each_denial_has_its_word() -> None:
    """Tokens, roles and codes: what was asked for, by whom, and what was said."""

    def handle(audits: AuditLog, request: Request) -> None:
        found = find_route(request.method, request.segments)
        match request.segments[-1]:
            case "pause":
                audits.denied(request, found, None)
                audits.denied(request, found, Role.ISLAND)
                audits.allowed(request, found, Role.OPERATOR)
            case "redeem":
                audits.failed(request, found, None, Refused("wrong"))
                audits.failed(request, found, None, MustWait(wait_s=1.0))
            case _:
                audits.failed(request, found, None, Refused("no business of ours"))

    with audited(handle) as (listener, events), calling(listener) as caller:
        for path in ("/control/pause", "/invites/redeem", "/islands/a/heartbeat"):
            caller.call("POST", path)
        found = told(events)

    assert [(e["what"], e["answer"], e.get("action")) for e in found] == [
        ("control", "no_token", "pause"),
        ("control", "wrong_role", "pause"),
        ("control", "allowed", "pause"),
        ("code_redeemed", "wrong_code", None),
        ("code_redeemed", "must_wait", None),
    ]


def test_what_was_allowed_is_always_told() -> None:
    """An operator's hundredth control is told as the first; denials are counted."""

    def handle(audits: AuditLog, request: Request) -> None:
        found = find_route(request.method, request.segments)
        for _ in range(100):
            audits.allowed(request, found, Role.OPERATOR)
            audits.denied(request, found, None)

    with audited(handle) as (listener, events), calling(listener) as caller:
        caller.call("POST", "/control/pause")
        found = [each["answer"] for each in told(events)]

    assert found.count("allowed") == 100
    assert found.count("no_token") == MAX_REPORTS
