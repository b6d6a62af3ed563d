"""Prints, as JSON, the files of `src/atoll` that an update and a heartbeat run through.

    python -m tests.update_trace

A real island trains a tiny model in a real run, in memory, at a coordinator over HTTP
and in a directory store. Every thread is traced but the coordinator's ticker and the
recorder of the past, for which no update waits.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

import atoll
from atoll import RunSettings
from atoll.coordinator.app import Coordinator, ListenOptions
from atoll.exchange import MemoryRun
from atoll.security import Role, token_file

SOURCE = f"{Path(atoll.__file__).parent}/"
SYNC_EVERY = 2
WARM_UP_STEPS = 4 * SYNC_EVERY
TRACED_STEPS = 2 * SYNC_EVERY
"""Two rounds: rare work, such as the compaction every ten rounds, is not among them."""

HEARTBEAT = "CoordinatorExchange._send_beat"
HEARTBEAT_WAIT_S = 60.0


class FileTrace:
    """Collects the files whose functions are called while it records."""

    def __init__(self) -> None:
        self.files: set[str] | None = None
        self.heartbeat_sent = threading.Event()

    def start(self) -> None:
        self.files = set()

    def stop(self) -> list[str]:
        files, self.files = self.files, None
        return sorted(files or ())

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        files, code = self.files, frame.f_code
        if files is None or not code.co_filename.startswith(SOURCE):
            return
        if threading.current_thread().name in ("atoll-tick", "events-past"):
            return
        if event == "call":
            files.add(code.co_filename.removeprefix(SOURCE))
        elif event == "return" and code.co_qualname == HEARTBEAT:
            self.heartbeat_sent.set()


def train(
    run: MemoryRun | str, trace: FileTrace, *, heartbeat: bool = False
) -> dict[str, list[str]]:
    """Return the files of an update, and of a heartbeat that a silent island sends."""
    import atoll.torch

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    traced = {}
    with atoll.torch.join(model, optimizer, run, island="i0") as island:

        def step() -> None:
            model(torch.ones(4, 8)).sum().backward()
            island.report(tokens=4)
            optimizer.step()
            optimizer.zero_grad()

        repeat(step, WARM_UP_STEPS)
        trace.start()
        repeat(step, TRACED_STEPS)
        traced["update"] = trace.stop()
        if heartbeat:
            trace_heartbeat(trace)  # it reports the last steps, which is an event
            traced["heartbeat"] = trace_heartbeat(trace)
    return traced


def trace_heartbeat(trace: FileTrace) -> list[str]:
    """Return the files of the next heartbeat."""
    trace.heartbeat_sent.clear()
    trace.start()
    assert trace.heartbeat_sent.wait(HEARTBEAT_WAIT_S), "no heartbeat was sent"
    return trace.stop()


def repeat(action: Callable[[], None], times: int) -> None:
    for _ in range(times):
        action()


def main() -> None:
    trace = FileTrace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    settings = RunSettings.from_dict(
        {"run": {"start_islands": 1}, "sync": {"sync_every": SYNC_EVERY}}
    )
    traced = {"memory": train(MemoryRun(settings), trace)["update"]}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        os.environ["XDG_CONFIG_HOME"] = name
        atoll.init(str(directory / "store"), settings)
        traced["bucket"] = train(str(directory / "store"), trace)["update"]
        coordinator = Coordinator(
            directory / "run", settings, listening=ListenOptions(has_tls=False)
        )
        coordinator.start()
        host, port = coordinator.address[:2]
        os.environ["ATOLL_HEARTBEAT_S"] = "1"
        os.environ["ATOLL_TOKEN_FILE"] = str(token_file(directory / "run", Role.ISLAND))
        over_http = train(f"http://{host}:{port}", trace, heartbeat=True)
        traced |= {"http": over_http["update"], "heartbeat": over_http["heartbeat"]}
        coordinator.close()
    json.dump(traced, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
