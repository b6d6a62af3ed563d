"""A cable is pulled between two machines for longer than a lease, and put back."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.testing import Namespace, linked_namespaces, namespaces_unavailable
from atoll.testing.namespaces import CABLE
from tests.cli.runs import CODE
from tests.e2e.rounds_again import ended_well
from tests.e2e.stage import Stage, settings_for, until

PORT = 7443

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(
        namespaces_unavailable() is not None and os.environ.get("CI") != "true",
        reason=str(namespaces_unavailable()),
    ),
]


@pytest.fixture
def machines() -> Iterator[tuple[Namespace, Namespace]]:
    with linked_namespaces(rate_mbit=100) as pair:
        yield pair


def plug(machine: Namespace, *, is_in: bool) -> None:
    """Put the cable in, or pull it: nothing is carried then, either way."""
    state = "up" if is_in else "down"
    command = ["ip", "-n", machine.name, "link", "set", CABLE, state]
    subprocess.run(command, check=True, capture_output=True)


def test_a_pulled_cable_ends_nobody(
    tmp_path: Path, machines: tuple[Namespace, Namespace]
) -> None:
    """One goes on by itself; the other comes back by itself, and counts again.

    The kernel's own TCP breaks and mends here: b is told of nothing, has bytes under
    way when the cable is pulled, and trains on until it needs an outcome. How soon TCP
    notices is the kernel's to say: if a has gone on for more than two rounds, b drops
    what it cannot carry, and says so.
    """
    left, right = machines
    stage = Stage(
        tmp_path,
        settings_for(2, 1000),
        host=left.address,
        has_tls=True,
        within=left,
        port=PORT,
    )
    try:
        stage.serve()
        stage.island("a", within=left, elements=10_000, step_s=0.1)
        stage.island("b", within=right, elements=10_000, step_s=0.1)
        stage.until_committed(2)
        plug(left, is_in=False)
        pulled_s = time.monotonic()
        stage.until_event("island_silent", island="b")
        last = stage.committed()
        until("a commits alone", lambda: stage.committed() > last)
        alone_s = time.monotonic() - pulled_s
        plug(left, is_in=True)
        stage.until_event("island_returned", island="b")
        together = len(stage.events("round_committed", counted=2))
        stage.until_event("round_committed", counted=2, count=together + 4)
        words = [sys.executable, "-c", CODE, "control", stage.url, "stop"]
        left.run(words, env=stage.environment, check=True, capture_output=True)
        again, reports = ended_well(stage, may_drop="b")
    finally:
        stage.close()

    stage.tell(f"cable pulled to the other's next commit: {alone_s:.1f} s")
    assert stage.events("round_committed", counted=1)
    assert stage.events("island_joined", incarnation=2) == []
    assert [each["why"] for each in reports.values()] == ["ended", "ended"]
    assert again.counted["b"] < again.counted["a"]
