"""Audits hold no secret, whatever they are given."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.routes import ROUTES, UNLISTED, find_route
from atoll.security import (
    AuditAction,
    AuditAnswer,
    AuditEvent,
    AuditKind,
    OneTimeCodes,
    Role,
    make_token,
)

TOKEN = make_token(Role.OPERATOR)
CODE = OneTimeCodes(TOKEN).make(now_s=0.0)
SECRETS = [TOKEN.reveal(), CODE.reveal(), TOKEN.digest().hex()]


def made(**changes: Any) -> AuditEvent:
    """Return an audit of a control, with some fields changed."""
    fields: dict[str, Any] = {
        "kind": AuditKind.CONTROL,
        "answer": AuditAnswer.ALLOWED,
        "address": "10.0.0.7",
        "at_unix_s": 12.5,
        "role": Role.OPERATOR,
        "route": find_route("POST", ("control", "stop")).route,
        "action": AuditAction.STOP,
    }
    return AuditEvent(**fields | changes)


def test_an_audit_says_who_did_what() -> None:
    """As plain values that go into a line of JSON."""
    assert json.loads(json.dumps(made().as_event())) == {
        "what": "control",
        "answer": "allowed",
        "address": "10.0.0.7",
        "at_unix_s": 12.5,
        "role": "operator",
        "route": "POST /control/{action}",
        "action": "stop",
    }


def test_nobody_has_no_role() -> None:
    """A refused stranger is recorded as one."""
    event = made(answer=AuditAnswer.NO_TOKEN, role=None, action=None).as_event()

    assert event["role"] == "none"
    assert "action" not in event


@pytest.mark.parametrize("field", [each.name for each in fields(AuditEvent)])
@pytest.mark.parametrize("secret", SECRETS, ids=["token", "code", "digest"])
def test_no_field_takes_a_secret(field: str, secret: str) -> None:
    """Text that somebody wrote is refused in every field, and not repeated."""
    attempts: list[Any] = [secret, TOKEN]
    attempts += [replace(UNLISTED, path=f"/{secret}")]
    for attempt in attempts:
        with pytest.raises(UsageError, match=r"audit|ROUTES") as caught:
            made(**{field: attempt})
        assert secret not in str(caught.value)


def test_the_zone_of_an_address_is_left_out() -> None:
    """It is text, and could be anything."""
    audit = made(address=f"fe80::1%{TOKEN.reveal()}")

    assert audit.address == "fe80::1"
    assert TOKEN.reveal() not in repr(audit)


@given(st.sampled_from(SECRETS), st.sampled_from(["GET", "PUT", "POST", "DELETE"]))
def test_a_path_with_a_secret_leaves_no_trace(secret: str, method: str) -> None:
    """An event names the row of the table, never the path that came."""
    paths = [
        ("islands", secret),
        ("code", secret),
        (secret,),
        ("control", secret),
    ]
    events = [made(route=find_route(method, path).route) for path in paths]

    assert secret not in repr(events)
    assert secret not in json.dumps([event.as_event() for event in events])


@pytest.mark.parametrize("time", [float("nan"), float("inf"), "12"])
def test_a_time_is_a_number(time: object) -> None:
    """What is none is refused."""
    with pytest.raises(UsageError, match="finite number"):
        made(at_unix_s=time)


def test_every_route_can_be_audited() -> None:
    """Its name is made of the table's words only."""
    assert len({made(route=row).as_event()["route"] for row in ROUTES}) == len(ROUTES)
