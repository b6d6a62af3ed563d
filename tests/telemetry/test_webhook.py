"""A webhook receives bad findings, rarely."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from atoll.errors import Unreachable, UsageError
from atoll.telemetry import Event
from atoll.telemetry.webhook import Webhook

URL = "https://hooks.example/T0"


def began(at_s: float, kind: str = "quorum", severity: str = "bad") -> Event:
    """Return a finding that begins."""
    fields = {
        "severity": severity,
        "kind": kind,
        "message": "The run has no quorum.",
        "remedy": "Start islands.",
    }
    return Event(1, at_s, "finding_began", fields)


def ended(at_s: float, kind: str = "quorum") -> Event:
    """Return a finding that is over."""
    return Event(2, at_s, "finding_ended", {"kind": kind})


def bodies_of(*events: Event) -> list[dict[str, str]]:
    """Return the bodies that a webhook posts for events."""
    bodies: list[dict[str, str]] = []
    times: list[float] = []
    webhook = Webhook(
        URL,
        "lagoon",
        post=lambda url, body: bodies.append(json.loads(body)),
        now_unix_s=lambda: times[-1],
    )
    for event in events:
        times.append(event.at_unix_s)
        webhook(event)
    return bodies


def test_a_bad_finding_is_posted_when_it_begins_and_ends() -> None:
    """Its text has the run, the sentence and the remedy."""
    assert bodies_of(began(0.0), ended(100.0)) == [
        {
            "text": "lagoon: The run has no quorum. Start islands.",
            "run": "lagoon",
            "finding": "quorum",
        },
        {
            "text": "lagoon: over: The run has no quorum.",
            "run": "lagoon",
            "finding": "quorum",
        },
    ]


def test_only_bad_findings_are_posted() -> None:
    """Not warnings, nor their ends, nor other events."""
    assert bodies_of(began(0.0, severity="warn"), ended(100.0)) == []
    assert bodies_of(Event(1, 0.0, "run_ended", {"round": 3})) == []


def test_at_most_one_a_minute_and_twenty_an_hour() -> None:
    """The others are counted."""
    assert len(bodies_of(began(0.0, "a"), began(59.0, "b"), began(60.0, "c"))) == 2
    # Every two minutes for an hour are 30: the 21st waits for the first to be an hour
    # old, which is the 31st.
    events = [began(120.0 * index, f"kind-{index}") for index in range(31)]
    assert len(bodies_of(*events)) == 21


@pytest.mark.parametrize(
    "url",
    ["http://hooks.example/T0", "file:///etc/passwd", "hooks.example", "https://"],
)
def test_a_url_that_is_not_private_is_refused(url: str) -> None:
    """A finding must not travel in plain text, nor into a file."""
    with pytest.raises(UsageError, match="needs an https:// URL"):
        Webhook(url, "lagoon")


@contextmanager
def listener(status: int) -> Iterator[tuple[str, list[bytes]]]:
    """Give the URL of a server on this machine, and the bodies it receives."""
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_server_receives_json() -> None:
    """Over real HTTP."""
    with listener(200) as (url, received):
        Webhook(url, "lagoon", now_unix_s=lambda: 0.0)(began(0.0))

    assert [json.loads(body)["finding"] for body in received] == ["quorum"]


@pytest.mark.parametrize("status", [302, 404, 500])
def test_a_server_that_refuses_is_named_without_its_path(status: int) -> None:
    """The path of a webhook is its secret; a redirect is not followed."""
    with listener(status) as (url, _):
        webhook = Webhook(f"{url}secret", "lagoon", now_unix_s=lambda: 0.0)
        with pytest.raises(Unreachable, match=str(status)) as caught:
            webhook(began(0.0))

    assert "secret" not in str(caught.value)


def test_findings_of_the_past_are_not_posted() -> None:
    """A first call of `atoll track` reads all events of a run."""
    bodies: list[bytes] = []
    webhook = Webhook(
        URL,
        "lagoon",
        post=lambda url, body: bodies.append(body),
        now_unix_s=lambda: 10_000.0,
    )
    webhook(began(0.0))

    assert bodies == []
