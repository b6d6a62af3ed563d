"""Two thousand that wait cost memory, little of it, and no thread."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.http.loopback import Dialogue, head

NUM_WAITERS = 2000
MAX_GROWTH_BYTES = 64 * 2**20


@contextmanager
def listening_apart() -> Iterator[tuple[str, int]]:
    """Start a listener whose memory is its own."""
    script = Path(__file__).with_name("crowd.py")
    with subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield "127.0.0.1", int(process.stdout.readline())
        assert process.stdin is not None
        process.stdin.close()
    assert process.returncode == 0


def cost(dialogue: Dialogue) -> dict[str, int]:
    told: dict[str, int] = json.loads(dialogue.ask("GET /cost").body)
    return told


def test_two_thousand_waiters_cost_no_thread_each() -> None:
    """Threads stay as many as they were, memory grows by at most 64 MB."""
    # A listener takes as many connections as half of its descriptors.
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * (NUM_WAITERS + 100):
        pytest.skip("this process may not open two thousand connections")
    with listening_apart() as address, ExitStack() as stack:
        asking = stack.enter_context(Dialogue(address))
        before = cost(asking)
        crowd = [stack.enter_context(Dialogue(address)) for _ in range(NUM_WAITERS)]
        for dialogue in crowd:
            dialogue.say(head("GET /wait"))
        during = cost(asking)
        while during["waiting"] < NUM_WAITERS:
            during = cost(asking)
        asking.ask("GET /answer")

        assert {dialogue.hear().body for dialogue in crowd} == {b"now"}
    assert during["threads"] == before["threads"]
    assert during["rss_bytes"] - before["rss_bytes"] <= MAX_GROWTH_BYTES
