"""Who may do what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.http import Problem
from atoll.http.request import parse_target
from atoll.routes import ROUTES, UNLISTED, Route, find_route
from atoll.security import Role, require_safe_listening


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


def row_of(method: str, target: str) -> Route:
    """Return the row that a coordinator finds for a request."""
    segments, _ = parse_target(target, max_path_bytes=2048)
    return find_route(method, segments).route


@pytest.mark.parametrize(
    ("request_line", "role"),
    [
        ("GET /health", None),
        ("HEAD /health", None),
        ("GET /info", Role.ISLAND),
        ("GET /status", Role.ISLAND),
        ("GET /metrics", Role.ISLAND),
        ("GET /events", Role.ISLAND),
        ("POST /islands/tokyo-1", Role.ISLAND),
        ("POST /islands/tokyo-1/heartbeat", Role.ISLAND),
        ("DELETE /islands/%C3%AEle", Role.ISLAND),
        ("PUT /fragments/0/rounds/12/updates/tokyo-1", Role.ISLAND),
        ("GET /fragments/0/rounds/12/outcome", Role.ISLAND),
        ("GET /state/3", Role.ISLAND),
        ("GET /anchor", Role.ISLAND),
        ("POST /anchor", Role.ISLAND),
        ("GET /code/abc", Role.ISLAND),
        ("PUT /code/abc", Role.OPERATOR),
        ("POST /control/stop", Role.OPERATOR),
        ("POST /invites", Role.OPERATOR),
        ("POST /invites/redeem", None),
    ],
)
def test_every_route_has_its_role(request_line: str, role: Role | None) -> None:
    """The table, as it is promised."""
    method, path = request_line.split(" ")

    assert row_of(method, path).role is role


@pytest.mark.parametrize(
    "request_line",
    [
        "POST /health",
        "get /health",
        "GET /HEALTH",
        "GET /healthx",
        "GET /",
        "GET /islands/a",
        "POST /islands/a/b",
    ],
)
def test_what_is_not_listed_is_for_operators(request_line: str) -> None:
    """No other spelling opens an open door, and a forgotten route is closed."""
    method, path = request_line.split(" ")

    assert row_of(method, path) is UNLISTED
    assert UNLISTED.role is Role.OPERATOR


@pytest.mark.parametrize(
    "path",
    [
        "/health/",
        "//health",
        "/health%2f..%2fcontrol%2fstop",
        "/health/../status",
        "/invites/redeem/",
        "/invites//redeem",
        "health",
        "*",
    ],
)
def test_a_path_with_two_readings_is_refused(path: str) -> None:
    """It is malformed before anything looks for its row."""
    with pytest.raises(Problem, match=r"holds the segment|starts with '/'"):
        row_of("GET", path)


def test_another_spelling_finds_the_same_row() -> None:
    """The row that gives the role gives the handler: a spelling opens nothing else."""
    assert row_of("POST", "/%63ontrol/stop") is row_of("POST", "/control/stop")
    assert row_of("POST", "/%63ontrol/stop").role is Role.OPERATOR


@given(st.text(), st.lists(st.text()).map(tuple))
def test_only_two_requests_need_no_token(method: str, path: tuple[str, ...]) -> None:
    """Whatever is asked, nothing but the two listed ones is open."""
    assert find_route(method, path).route.role is not None or path in {
        ("health",),
        ("invites", "redeem"),
    }
    open_routes = [row.title for row in ROUTES if row.role is None]
    assert open_routes == ["GET /health", "POST /invites/redeem"]


@given(st.text())
def test_no_control_is_open_to_islands(action: str) -> None:
    """Whatever the action is called."""
    assert find_route("POST", ("control", action)).route.role is Role.OPERATOR
