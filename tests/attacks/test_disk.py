"""Names that come and go cannot fill the disk that the journal needs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atoll.errors import DiskFull, Unreachable
from atoll.exchange import CoordinatorExchange, Frame, Outcome
from atoll.exchange.calls import (
    JoinCall,
    LeaveCall,
    OutcomeCall,
    PublishCall,
    StateCall,
)
from atoll.exchange.over_http import HttpTransport
from atoll.island.numpy_model import vector_model
from atoll.protocol import JoinReply, JoinRequest, Reception
from atoll.testing.fixtures import plain_settings
from atoll.wire import FrameKind
from tests.attacks.conftest import Serve
from tests.coordinator.apart import serving_apart
from tests.coordinator.large import found, update
from tests.coordinator.serving import asking

ELEMENTS = 2**20
MODEL = vector_model({"w": (ELEMENTS,)})
DISK_BYTES = 96 * 2**20
PATIENCE = 40
"""Questions for an outcome, each of half a second."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a directory on a file system of its own, which has 96 MB."""
    directory = tmp_path / "small"
    directory.mkdir(mode=0o700)
    said = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "atoll"]
    done = subprocess.run([*said, str(directory)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode()}")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def join(line: HttpTransport, name: str) -> JoinReply:
    request = JoinRequest(model=MODEL, island=name)
    reply = line.call(JoinCall(request, name.encode(), b"1"))
    assert isinstance(reply, JoinReply)
    return reply


def come_and_go(line: HttpTransport, name: str, base: bytes) -> object:
    """Join under a made-up name, leave an update behind, and go."""
    joined = join(line, name)
    frame = update(joined, np.ones(ELEMENTS, np.float32), base=base)
    try:
        departing = replace(frame.header, kind=FrameKind.DEPARTING)
        return line.call(PublishCall(Frame(departing, frame.body)))
    finally:
        line.call(LeaveCall(name, joined.incarnation))


def fill(line: HttpTransport, base: bytes) -> None:
    for number in range(100):
        come_and_go(line, f"made-up-{number}", base)


def test_a_round_is_committed_though_the_disk_was_filled(small_disk: Path) -> None:
    """Uploads stop at the reserve, with the numbers; the round that closes has it."""
    settings = plain_settings(start_islands=2, quorum=1).to_dict()
    with serving_apart(small_disk / "run", settings) as apart, apart.line() as line:
        a = CoordinatorExchange(line, key=b"a", nonce=b"1")
        first, base = found(a, "a", np.zeros(ELEMENTS, np.float32))
        second = join(line, "b")
        frame = update(first, np.ones(ELEMENTS, np.float32), base=base)
        assert line.call(PublishCall(frame)) is Reception.STAGED
        with pytest.raises(DiskFull, match=r"\d+ bytes are free, \d+ of them are kept"):
            fill(line, base)
        status = asking(apart, "GET /status").body.decode()
        line.call(LeaveCall("b", second.incarnation))
        outcomes = (line.call(OutcomeCall(0, 1, 0.5)) for _ in range(PATIENCE))
        outcome = next((each for each in outcomes if isinstance(each, Outcome)), None)
        free = os.statvfs(small_disk)

        assert outcome is not None
        assert isinstance(line.call(StateCall(0)), Frame)
    assert '"reserve_bytes"' in status
    assert "kept for the journal" in status
    assert free.f_bavail * free.f_frsize > 2**24


def test_a_round_holds_no_more_strangers_than_the_run_has_islands(serve: Serve) -> None:
    """The next one is refused before its body is read; those waited for are not."""
    apart = serve(start_islands=2, quorum=2, max_islands=3)
    with apart.line() as line:
        a = CoordinatorExchange(line, key=b"a", nonce=b"1")
        first, base = found(a, "a", np.zeros(ELEMENTS, np.float32))
        join(line, "b")
        for number in range(3):
            assert come_and_go(line, f"made-up-{number}", base) is Reception.STAGED
        with pytest.raises(Unreachable, match=r"holds 3 updates .*run\.max_islands"):
            come_and_go(line, "made-up-3", base)
        frame = update(first, np.ones(ELEMENTS, np.float32), base=base)

        assert line.call(PublishCall(frame)) is Reception.STAGED
