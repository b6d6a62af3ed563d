"""Who may do what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.security import (
    ROUTES,
    UNLISTED,
    Requirement,
    Role,
    needed_role,
    require_safe_listening,
    route_of,
)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_needs_no_tls(host: str) -> None:
    """With it is fine too."""
    require_safe_listening(host, has_tls=False)
    require_safe_listening(host, has_tls=True)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "host.example"])
def test_beyond_loopback_needs_tls(host: str) -> None:
    """Without it the coordinator does not start, and says what to do."""
    require_safe_listening(host, has_tls=True)
    with pytest.raises(UsageError, match=rf"{host}' without TLS.*127\.0\.0\.1 only"):
        require_safe_listening(host, has_tls=False)


def test_an_empty_host_is_every_interface() -> None:
    """That is what a socket makes of it."""
    with pytest.raises(UsageError, match="every interface"):
        require_safe_listening("", has_tls=False)


@pytest.mark.parametrize(
    ("request_line", "need"),
    [
        ("GET /health", Requirement.NO_PROOF),
        ("HEAD /health", Requirement.NO_PROOF),
        ("GET /info", Requirement.ISLAND),
        ("GET /status", Requirement.ISLAND),
        ("GET /metrics", Requirement.ISLAND),
        ("GET /events", Requirement.ISLAND),
        ("POST /islands/tokyo-1", Requirement.ISLAND),
        ("POST /islands/tokyo-1/heartbeat", Requirement.ISLAND),
        ("DELETE /islands/%C3%AEle", Requirement.ISLAND),
        ("PUT /fragments/0/rounds/12/updates/tokyo-1", Requirement.ISLAND),
        ("GET /fragments/0/rounds/12/outcome", Requirement.ISLAND),
        ("GET /state/3", Requirement.ISLAND),
        ("GET /anchor", Requirement.ISLAND),
        ("POST /anchor", Requirement.ISLAND),
        ("GET /code/abc", Requirement.ISLAND),
        ("PUT /code/abc", Requirement.OPERATOR),
        ("POST /control/stop", Requirement.OPERATOR),
        ("POST /invites", Requirement.OPERATOR),
        ("POST /invites/redeem", Requirement.CODE),
    ],
)
def test_every_route_has_its_need(request_line: str, need: Requirement) -> None:
    """The table, as it is promised."""
    method, path = request_line.split(" ")

    assert route_of(method, path).need is need
    assert needed_role(method, path) is need.role


@pytest.mark.parametrize(
    "request_line",
    [
        "POST /health",
        "get /health",
        "GET /health/",
        "GET //health",
        "GET /HEALTH",
        "GET /health?x",
        "GET /health%2f..%2fcontrol%2fstop",
        "GET /health/../status",
        "GET health",
        "GET /",
        "GET *",
        "GET /islands/a",
        "POST /islands/a/b",
        "POST /invites/redeem/",
        "POST /invites//redeem",
        "OPTIONS *",
    ],
)
def test_what_is_not_listed_is_for_operators(request_line: str) -> None:
    """No other spelling opens an open door, and a forgotten route is closed."""
    method, path = request_line.split(" ")

    assert route_of(method, path) is UNLISTED
    assert needed_role(method, path) is Role.OPERATOR


@given(st.text(), st.text())
def test_only_two_requests_need_no_token(method: str, path: str) -> None:
    """Whatever is asked, nothing but the two listed ones is open."""
    assert needed_role(method, path) is not None or path in {
        "/health",
        "/invites/redeem",
    }
    open_routes = [row.name for row in ROUTES if row.need.role is None]
    assert open_routes == ["GET /health", "POST /invites/redeem"]


@given(st.text())
def test_no_control_is_open_to_islands(action: str) -> None:
    """Whatever the action is called."""
    assert needed_role("POST", f"/control/{action}") is Role.OPERATOR
