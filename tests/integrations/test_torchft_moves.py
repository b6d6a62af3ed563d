"""torchft's own classes over a run that moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from atoll.coordinator.app import Coordinator, ListenOptions
from atoll.exchange import MemoryRun
from atoll.exchange.bucket.create import init
from atoll.integrations.torchft import run_settings
from atoll.run_client.move import MoveToCoordinator
from atoll.security import parse_run_url
from tests.e2e.stage import free_port
from tests.integrations.trainings import STEPS, Training, diloco, train_all
from tests.torch.runs import bits, together

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

MOVES_AT = 10
"""In the middle of a window."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def move(bucket: str, directory: Path, stack: ExitStack) -> None:
    """Take a run from a bucket to a coordinator, and serve it there."""
    port = free_port()
    target = parse_run_url(f"http://127.0.0.1:{port}")
    with MoveToCoordinator(bucket, target, directory) as removal:
        removal.go()
    listening = ListenOptions(port=port, has_tls=False)
    coordinator = Coordinator(directory, None, listening=listening)
    stack.callback(coordinator.close)
    coordinator.start()


def test_islands_follow_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    """They end with the bits of a run that stayed where it was."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    bucket, wrap = str(tmp_path / "bucket"), diloco(4)
    settings = run_settings(1).with_values({"run.start_islands": 2})
    init(bucket, settings)
    first, second = Training(0), Training(1)

    def live(training: Training) -> None:
        with (
            training.manager(bucket, init_sync=False) as manager,
            wrap(training, manager),
        ):
            for step in range(STEPS):
                if training is first and step == MOVES_AT:
                    move(bucket, tmp_path / "target", stack)
                training.step()

    together(lambda: live(first), lambda: live(second))
    stayed = train_all(MemoryRun(settings), wrap, steps=STEPS, fragments=1)

    assert [bits(each.weights()) for each in (first, second)] == [
        bits(each) for each in stayed
    ]
