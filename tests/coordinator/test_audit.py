"""Who changes a run, and who is turned away, is told; every promised event is."""

from __future__ import annotations

import threading
from pathlib import Path

import atoll
from atoll.coordinator.app import Coordinator, ListenOptions
from atoll.http import HttpClient
from atoll.security import Role, authorization, read_token, token_file
from atoll.telemetry import EVENTS
from atoll.testing.fixtures import plain_settings

SOURCE = Path(atoll.__file__).parent


def test_every_promised_event_has_a_place_that_emits_it() -> None:
    """A name in the table that nobody says would be a lie in the docs."""
    text = "".join(
        path.read_text()
        for path in SOURCE.rglob("*.py")
        if path.name != "events.py" or path.parent.name != "telemetry"
    )

    assert [name for name in EVENTS if f'"{name}"' not in text] == []


def test_refusals_and_controls_are_audited(tmp_path: Path) -> None:
    """No token, the wrong role, a pause and a stop: four audits, and no secret."""
    run = Coordinator(
        tmp_path, plain_settings(), listening=ListenOptions(has_tls=False)
    )
    run.start()
    caller = HttpClient(*run.address, timeout_s=20.0, connect_timeout_s=20.0)
    tokens = {role: read_token(token_file(tmp_path, role)) for role in Role}

    def post(action: str, role: Role | None) -> int:
        headers = {"Authorization": authorization(tokens[role])} if role else {}
        return caller.call("POST", f"/control/{action}", headers=headers).status

    try:
        assert post("pause", None) == 401
        assert post("pause", Role.ISLAND) == 403
        assert post("pause", Role.OPERATOR) == 200
        assert post("stop", Role.OPERATOR) == 200
        told = [each.as_dict() for each in run.events.after(0)]
    finally:
        caller.close()
        run.close()

    audits = [
        (each["answer"], each.get("action"))
        for each in told
        if each["event"] == "audit"
    ]
    assert audits == [
        ("no_token", "pause"),
        ("wrong_role", "pause"),
        ("allowed", "pause"),
        ("allowed", "stop"),
    ]
    assert {"run_created", "run_paused", "run_stopped"} <= {e["event"] for e in told}
    assert not any(token.reveal() in str(told) for token in tokens.values())


def test_who_speaks_no_tls_is_audited(tmp_path: Path) -> None:
    """A refused handshake is an event, and the caller is told what to write."""
    run = Coordinator(tmp_path, plain_settings())
    run.start()
    caller = HttpClient(*run.address, timeout_s=20.0, connect_timeout_s=20.0)
    told = threading.Event()
    try:
        run.events.subscribe(
            lambda event: told.set() if event.name == "audit" else None, name="test"
        )
        reply = caller.call("GET", "/health")
        assert (reply.status, reply.json()["error"]) == (400, "no_tls")
        assert told.wait(20.0)
        (audit,) = [e.as_dict() for e in run.events.after(0) if e.name == "audit"]
    finally:
        caller.close()
        run.close()

    said = {key: audit[key] for key in ("what", "answer", "address")}
    assert said == {"what": "handshake", "answer": "no_tls", "address": "127.0.0.1"}
