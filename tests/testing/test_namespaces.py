"""Two namespaces and a cable: programs reach each other, and nothing is left."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from atoll.errors import UsageError
from atoll.testing import linked_namespaces, namespaces_unavailable

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(
        namespaces_unavailable() is not None, reason=str(namespaces_unavailable())
    ),
]

LISTEN = """
import socket
with socket.create_server(("", 7000)) as listener:
    print("listening", flush=True)
    with listener.accept()[0] as sock, sock.makefile("rb") as file:
        print(len(file.read()), flush=True)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000)) as sock:
    sock.sendall(bytes(int(sys.argv[2])))
"""


def namespaces() -> str:
    """Return the names of the machine's namespaces."""
    done = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_programs_reach_each_other_no_faster_than_the_cable() -> None:
    """1 MB at 20 Mbit/s is 0.4 s; what the bucket of 64 KB saves is 0.03 s."""
    with linked_namespaces(rate_mbit=20) as (left, right):
        listener = left.popen(
            [sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True
        )
        assert listener.stdout is not None
        with listener.stdout:
            assert listener.stdout.readline() == "listening\n"
            begun_s = time.monotonic()
            right.run([sys.executable, "-c", SEND, left.address, "1000000"], check=True)
            assert listener.stdout.readline() == "1000000\n"
            assert time.monotonic() - begun_s >= 0.37
        assert listener.wait() == 0


def test_nothing_is_left_after_an_error() -> None:
    """Programs are dead, with those they started, and the namespaces are gone."""
    with (  # noqa: PT012 the error comes from inside the block
        pytest.raises(ZeroDivisionError),
        linked_namespaces() as (left, right),
    ):
        names = left.name, right.name
        assert all(name in namespaces() for name in names)
        program = left.popen(
            ["sh", "-c", "sleep 600 & echo ready; wait"], stdout=subprocess.PIPE
        )
        assert program.stdout is not None
        with program.stdout:
            program.stdout.readline()
        _ = 1 / 0

    assert program.returncode == -9
    assert not any(name in namespaces() for name in names)


def test_what_a_killed_process_left_is_removed_by_the_next() -> None:
    """A namespace is named after its process, and goes when that is gone."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    name = f"atoll-{gone.pid}-0-left"
    subprocess.run(["ip", "netns", "add", name], check=True)
    with linked_namespaces():
        pass

    assert name not in namespaces()


def test_an_impossible_rate_is_refused() -> None:
    """And nothing is made."""
    with (
        pytest.raises(UsageError, match="rate_mbit=0 must be positive"),
        linked_namespaces(rate_mbit=0),
    ):
        pass
