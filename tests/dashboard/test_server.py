"""The server answers its own page, and nobody else's."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from atoll.dashboard import DashboardServer, RunFeed, Sessions
from atoll.errors import Unreachable
from atoll.run_client import Action
from atoll.runtime import SystemClock
from tests.dashboard.lagoon import LagoonRun, shown

API = (
    ("GET", "/api/first"),
    ("GET", "/api/feed"),
    ("GET", "/api/events"),
    ("POST", "/api/check"),
    ("POST", "/api/control"),
    ("DELETE", "/api/session"),
    ("GET", "/api/nothing"),
)
EVERY = (*API, ("POST", "/api/session"), ("GET", "/"), ("GET", "/page/app.js"))
RUN = "lagoon-5d0c1f6d2a31"

Shown = tuple[DashboardServer, RunFeed, Sessions]


@pytest.fixture
def run() -> LagoonRun:
    """A small run."""
    return LagoonRun(rounds=4)


@pytest.fixture
def dashboard(run: LagoonRun) -> Iterator[Shown]:
    """Its dashboard, with controls."""
    with shown(run) as opened:
        yield opened


def call(
    server: DashboardServer,
    method: str,
    path: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: Any = None,
) -> tuple[int, dict[str, str], Any]:
    """Send one request through a socket of its own; return status, headers, content."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = {"host": f"127.0.0.1:{server.port}", "connection": "close"}
    if body is not None:
        lines |= {"content-type": "application/json"}
    lines |= {"content-length": str(len(data))} | dict(headers or {})
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(
        f"{key}: {value}\r\n" for key, value in lines.items()
    )
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(head.encode() + b"\r\n" + data)
        parts = []
        while part := connection.recv(2**16):
            parts.append(part)
    first, _, content = b"".join(parts).partition(b"\r\n\r\n")
    status, *rest = first.decode().split("\r\n")
    fields = dict(line.split(": ", 1) for line in rest)
    is_json = fields.get("content-type") == "application/json"
    return int(status.split()[1]), fields, json.loads(content) if is_json else content


def session_of(opened: Shown) -> dict[str, str]:
    """Return the header of a new session."""
    server, _, sessions = opened
    code = sessions.make_code(now_s=SystemClock().now_s()).reveal()
    status, _, answer = call(server, "POST", "/api/session", body={"code": code})
    assert status == 200
    return {"authorization": f"Atoll-Session {answer['session']}"}


@pytest.mark.parametrize(("method", "path"), EVERY)
@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("host", "evil.example", 421),
        ("host", "127.0.0.1", 421),
        ("host", "localhost.evil.example:4780", 421),
        ("origin", "https://evil.example", 403),
        ("origin", "null", 403),
        ("sec-fetch-site", "cross-site", 403),
        ("sec-fetch-site", "same-site", 403),
    ],
)
def test_no_other_site_uses_it(
    dashboard: Shown, method: str, path: str, header: str, value: str, status: int
) -> None:
    """Every route refuses a foreign host, origin or site, with a session as well."""
    headers = session_of(dashboard) | {header: value}
    assert call(dashboard[0], method, path, headers=headers)[0] == status


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]"])
def test_its_own_names_are_answered(dashboard: Shown, name: str) -> None:
    """The host and the origin of the machine itself."""
    server = dashboard[0]
    host = f"{name}:{server.port}"
    headers = {
        "host": host,
        "origin": f"http://{host}",
        "sec-fetch-site": "same-origin",
    }
    assert call(server, "GET", "/", headers=headers)[0] == 200


def test_a_link_may_lead_to_the_page(dashboard: Shown) -> None:
    """It holds nothing of the run; the data behind it stay closed to links."""
    headers = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "document",
    }
    server, _, _ = dashboard
    assert call(server, "GET", "/", headers=headers)[0] == 200
    link = headers | session_of(dashboard)
    assert call(server, "GET", "/api/first", headers=link)[0] == 403


@pytest.mark.parametrize(("method", "path"), API)
@pytest.mark.parametrize(
    "authorization",
    [None, "Atoll-Session ", "Atoll-Session " + 64 * "0", "Bearer " + 64 * "0"],
)
def test_data_need_a_session(
    dashboard: Shown, method: str, path: str, authorization: str | None
) -> None:
    """Every route but the page and the exchange of a code."""
    headers = {} if authorization is None else {"authorization": authorization}
    status, _, answer = call(dashboard[0], method, path, headers=headers)
    assert (status, answer["error"]) == (401, "session")


@pytest.mark.parametrize(("method", "path"), EVERY)
def test_every_answer_binds_the_browser(
    dashboard: Shown, method: str, path: str
) -> None:
    """With the policy of the page, without a cookie or an opening to other sites."""
    for headers in ({}, session_of(dashboard), {"host": "evil.example"}):
        _, fields, _ = call(dashboard[0], method, path, headers=headers)
        assert "default-src 'none'" in fields["content-security-policy"]
        assert fields["x-content-type-options"] == "nosniff"
        assert not any(name.startswith("access-control") for name in fields)
        assert "set-cookie" not in fields
        stored = "no-cache" if not path.startswith("/api/") else "no-store"
        is_refused = headers.get("host") is not None
        assert fields["cache-control"] == ("no-store" if is_refused else stored)


def test_a_code_is_good_once(dashboard: Shown) -> None:
    """A second browser with the same link is refused, and so is a wrong code."""
    server, _, sessions = dashboard
    code = sessions.make_code(now_s=SystemClock().now_s()).reveal()
    assert call(server, "POST", "/api/session", body={"code": code})[0] == 200
    status, _, answer = call(server, "POST", "/api/session", body={"code": code})
    assert (status, answer["error"]) == (403, "code")
    assert call(server, "POST", "/api/session", body={"code": 7})[0] == 400
    for _ in range(9):
        call(server, "POST", "/api/session", body={"code": "wrong"})
    assert call(server, "POST", "/api/session", body={"code": "wrong"})[0] == 429


def test_the_first_answer_has_everything(dashboard: Shown, run: LagoonRun) -> None:
    """Status, past, settings, events, and the rights of the one who looks."""
    headers = session_of(dashboard)
    status, _, first = call(dashboard[0], "GET", "/api/first", headers=headers)
    assert status == 200
    assert first["status"]["name"] == "lagoon"
    assert first["history"][0]["is_whole"]
    assert len(first["history"][0]["marks"]["columns"]) == 8  # 4 rounds, 2 fragments
    assert first["may"] == ["look", "control"]
    assert first["events"][-1]["number"] == run.stream.number
    keys = {row["key"] for row in first["settings"]["rows"]}
    assert {"outer.lr", "sync.sync_every", "run.quorum"} <= keys


def test_the_feed_has_the_changes(dashboard: Shown, run: LagoonRun) -> None:
    """Fields that differ, rows of islands that differ, and new columns of marks."""
    server, headers = dashboard[0], session_of(dashboard)
    _, _, first = call(server, "GET", "/api/first", headers=headers)
    run.rows["sydney-1"] = {"state": "silent"}
    run.train("#######.")
    version = first["version"]
    news: list[dict[str, Any]] = []
    while not any(answer["history"] and answer["islands"] for answer in news):
        path = f"/api/feed?after={version}"
        _, _, answer = call(server, "GET", path, headers=headers)
        version = answer["version"]
        news.append(answer)
    rows = {key: row for answer in news for key, row in answer["islands"].items()}
    assert rows["sydney-1"]["state"] == "silent"
    columns = [
        column
        for answer in news
        for history in answer["history"]
        for column in history["marks"]["columns"]
    ]
    assert [column[3] for column in columns] == ["#######.", "#######."]
    assert not any(history["is_whole"] for a in news for history in a["history"])
    names = {event["event"] for answer in news for event in answer["events"]}
    assert "round_committed" in names
    assert "loss_reported" not in names


def test_events_of_a_store_come_as_a_whole(dashboard: Shown, run: LagoonRun) -> None:
    """They are made anew, so a page forgets those that it has."""
    server, headers = dashboard[0], session_of(dashboard)
    run.is_store = True
    _, _, first = call(server, "GET", "/api/first", headers=headers)
    run.train("#######.")
    version = first["version"]
    answer: dict[str, Any] = {"events": []}
    while not answer["events"]:
        path = f"/api/feed?after={version}"
        _, _, answer = call(server, "GET", path, headers=headers)
        version = answer["version"]
    assert answer["has_all_events"]
    assert answer["events"][0]["event"] == "run_created"
    assert answer["events"][-1]["number"] == run.stream.number


def test_a_page_that_is_too_old_starts_again(dashboard: Shown) -> None:
    """A version that is not stored has no changes."""
    headers = session_of(dashboard)
    path = "/api/feed?after=123456"
    _, _, answer = call(dashboard[0], "GET", path, headers=headers)
    assert answer["is_lost"]


def test_an_error_of_the_run_is_news(dashboard: Shown, run: LagoonRun) -> None:
    """The last status stays; the message and its time come with it, and go again."""
    server, headers = dashboard[0], session_of(dashboard)
    _, _, first = call(server, "GET", "/api/first", headers=headers)
    run.error = Unreachable("lagoon does not answer.")
    version, error = first["version"], None
    while error is None:
        path = f"/api/feed?after={version}"
        _, _, answer = call(server, "GET", path, headers=headers)
        version, error = answer["version"], answer["error"]
    assert error["message"] == "lagoon does not answer."
    run.error = None
    while error is not None:
        path = f"/api/feed?after={version}"
        _, _, answer = call(server, "GET", path, headers=headers)
        version, error = answer["version"], answer["error"]


def test_events_come_in_pages(dashboard: Shown, run: LagoonRun) -> None:
    """Backwards, to the first one."""
    headers, before = session_of(dashboard), ""
    numbers: list[int] = []
    while before is not None:
        path = f"/api/events?before={before}"
        _, _, page = call(dashboard[0], "GET", path, headers=headers)
        numbers = [event["number"] for event in page["events"]] + numbers
        before = page["before"]
    assert numbers == [event.number for event in run.stream.made]


def test_settings_are_checked(dashboard: Shown) -> None:
    """A value comes back as the run would have it, or with its error."""
    server, headers = dashboard[0], session_of(dashboard)
    body = {"values": {"outer.lr": "0.50"}}
    _, _, answer = call(server, "POST", "/api/check", headers=headers, body=body)
    assert answer == {"values": {"outer.lr": "0.5"}}
    body = {"values": {"outer.lr": "-1"}}
    status, _, answer = call(server, "POST", "/api/check", headers=headers, body=body)
    assert status == 400
    assert "outer.lr" in answer["message"]


def test_a_command_reaches_the_run(dashboard: Shown, run: LagoonRun) -> None:
    """With its values in the types of a run file."""
    server, headers = dashboard[0], session_of(dashboard)
    body = {
        "run": RUN,
        "action": "set",
        "values": {"outer.lr": "0.5"},
        "if_epoch": 1,
    }
    status, _, answer = call(server, "POST", "/api/control", headers=headers, body=body)
    assert (status, answer["state"]) == (200, "training")
    assert run.commands[0].action is Action.SET
    assert run.commands[0].values == {"outer.lr": 0.5}
    status, _, answer = call(server, "POST", "/api/control", headers=headers, body=body)
    assert status == 409
    assert "Epoch 2 is in force" in answer["message"]
    assert len(run.commands) == 1


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"run": "other"}, 409),
        ({"run": None}, 409),
        ({"action": "reboot"}, 400),
        ({"action": ["pause"]}, 400),
        ({"action": "evict"}, 400),
        ({"action": "evict", "island": 7}, 400),
        ({"action": "evict", "island": 201 * "i"}, 400),
        ({"action": "evict", "island": "nobody"}, 409),
        ({"action": "set"}, 400),
        ({"action": "set", "values": {}}, 400),
        ({"action": "set", "values": {"outer.lr": 0.5}}, 400),
        ({"action": "set", "values": {"outer.lr": 300 * "1"}}, 400),
        ({"if_epoch": "1"}, 400),
        ({"if_epoch": True}, 400),
    ],
)
def test_a_bad_command_is_refused(
    dashboard: Shown, changes: dict[str, Any], status: int
) -> None:
    """With a message, before it reaches the run."""
    body = {"run": RUN, "action": "pause"} | changes
    answer = call(
        dashboard[0], "POST", "/api/control", headers=session_of(dashboard), body=body
    )
    assert (answer[0], bool(answer[2]["message"])) == (status, True)


@pytest.mark.parametrize("content", ["[]", "{", "7", '"text"', 1000 * "["])
def test_a_bad_body_is_refused(dashboard: Shown, content: str) -> None:
    """It is no object."""
    server, headers = dashboard[0], session_of(dashboard)
    headers |= {"content-type": "application/json"}
    headers["content-length"] = str(len(content))
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        lines = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
        head = f"POST /api/control HTTP/1.1\r\nhost: localhost:{server.port}\r\n{lines}"
        connection.sendall(f"{head}\r\n{content}".encode())
        assert connection.recv(2**16).startswith(b"HTTP/1.1 400")


def test_a_large_body_is_not_read(dashboard: Shown) -> None:
    """Commands are short."""
    body = {"run": RUN, "action": "pause", "note": 20_000 * "x"}
    headers = session_of(dashboard)
    server = dashboard[0]
    assert call(server, "POST", "/api/control", headers=headers, body=body)[0] == 413


def test_a_form_of_another_site_is_no_command(dashboard: Shown) -> None:
    """A browser sends forms without asking first; they are not JSON."""
    headers = session_of(dashboard) | {"content-type": "text/plain"}
    body = {"run": RUN, "action": "pause"}
    server = dashboard[0]
    assert call(server, "POST", "/api/control", headers=headers, body=body)[0] == 415


def test_who_may_only_look_controls_nothing(run: LagoonRun) -> None:
    """Whatever the page sends."""
    with shown(run, may_control=False) as opened:
        headers = session_of(opened)
        _, _, first = call(opened[0], "GET", "/api/first", headers=headers)
        body = {"run": RUN, "action": "pause"}
        answer = call(opened[0], "POST", "/api/control", headers=headers, body=body)
    assert first["may"] == ["look"]
    assert (answer[0], answer[2]["error"]) == (403, "role")
    assert not run.commands


@pytest.mark.parametrize(
    "path",
    ["/page/../server.py", "/page/%2e%2e/server.py", "/server.py", "/page/", "/etc"],
)
def test_only_the_files_of_the_page_are_served(dashboard: Shown, path: str) -> None:
    """A path never reaches the disk."""
    assert call(dashboard[0], "GET", path)[0] in (400, 404)


def test_a_file_that_has_not_changed_is_not_sent(dashboard: Shown) -> None:
    """By its ETag."""
    _, fields, _ = call(dashboard[0], "GET", "/page/app.js")
    headers = {"if-none-match": fields["etag"]}
    status, _, content = call(dashboard[0], "GET", "/page/app.js", headers=headers)
    assert (status, content) == (304, b"")


def test_pages_of_a_hundred_islands_are_small() -> None:
    """The first answer has less than 900 kB, and a tick less than 16 kB."""
    names = tuple(f"island-{number:03}" for number in range(100))
    run = LagoonRun(rounds=60, names=names)
    with shown(run, poll_s=30.0) as opened:
        headers = session_of(opened)
        _, fields, first = call(opened[0], "GET", "/api/first", headers=headers)
        assert int(fields["content-length"]) < 900_000
        run.train()
        opened[1].first()
        path = f"/api/feed?after={first['version']}"
        _, fields, answer = call(opened[0], "GET", path, headers=headers)
    del answer["history"]  # the second `first` asked for all of it
    assert len(json.dumps(answer)) < 16_000
