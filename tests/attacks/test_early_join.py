"""`atoll join` before its coordinator listens: it waits, as an island does."""

from __future__ import annotations

import json
import signal
import socket
import sys
from pathlib import Path

from tests.cli.runs import atoll, ended, serving, started


def test_a_join_waits_for_a_coordinator_that_starts(tmp_path: Path) -> None:
    """It says that it waits, and runs its command when the coordinator is up."""
    home = tmp_path / "other"
    with serving(tmp_path) as served:
        paste = json.loads(atoll("invite", served.url, "--json", home=served.home)[1])
        assert atoll("join", paste["invite"], "--", "true", home=home)[0] == 0
        url = served.url
        port = served.url.rpartition(":")[2]
        served.stop()
    joining = started("join", url, "--", sys.executable, "-c", "print(7)", home=home)
    assert joining.stderr is not None
    line = joining.stderr.readline()
    with serving(tmp_path, "--port", port):
        code, out, _ = ended(joining)

    assert f"retrying {url} for 60 s: " in line
    assert (code, out) == (0, "7\n")


def test_a_join_that_waits_can_be_interrupted(tmp_path: Path) -> None:
    """Ctrl-C ends it at once, with 130 and without a traceback."""
    with serving(tmp_path) as served:
        paste = json.loads(atoll("invite", served.url, "--json", home=served.home)[1])
        port = int(served.url.rpartition(":")[2])
        served.stop()
    with socket.socket() as unused:
        # Bound and not listening: no other process can answer at this port.
        unused.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        unused.bind(("127.0.0.1", port))
        joining = started(
            "join", paste["invite"], "--", "true", home=tmp_path / "other"
        )
        assert joining.stderr is not None
        line = joining.stderr.readline()
        joining.send_signal(signal.SIGINT)
        code, _, err = ended(joining)

    assert (code, "retrying" in line) == (130, True), line + err
    assert "Traceback" not in err
