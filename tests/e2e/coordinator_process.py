"""A coordinator as a process of its own, which may be told to die at a disk call.

    python -m tests.e2e.coordinator_process DIRECTORY --port 4711 --settings run.json

`--dies-at "append log/:3:during"` ends it by SIGKILL at the third change on its disk
whose words begin so, or `before` or `after` that change: these are its fault points.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import atoll.coordinator.directory
from atoll import RunSettings, kernels
from atoll.coordinator.app import Coordinator, ListenOptions
from atoll.disk import Data, SystemDisk


class FaultPoint(NamedTuple):
    """A change on the disk, and whether the process dies before, during or after."""

    words: str
    number: int
    when: str

    @classmethod
    def parsed(cls, text: str) -> FaultPoint:
        words, number, when = text.rsplit(":", 2)
        assert when in {"before", "during", "after"}, text
        return cls(words, int(number), when)


class DyingDisk(SystemDisk):
    """The machine's own disk, on which the process dies at one of its changes."""

    dies_at: FaultPoint | None = None
    note: Path
    """Where changes are told, for who looks for fault points."""

    same = 0
    """Changes so far whose words are the fault point's."""

    def append(self, name: str, data: Data) -> None:
        with Change(self, f"append {name}") as change:
            if change.is_torn:
                super().append(name, bytes(data)[: len(data) // 2])
                die()
            super().append(name, data)

    def sync(self, name: str) -> None:
        with Change(self, f"sync {name}"):
            super().sync(name)

    def write_new(self, name: str, parts: Iterable[Data]) -> None:
        with Change(self, f"write_new {name}") as change:
            super().write_new(name, torn(parts) if change.is_torn else parts)

    def remove(self, name: str) -> None:
        with Change(self, f"remove {name}"):
            super().remove(name)


class Change:
    """One change of the disk, and the process's death if it is the one."""

    def __init__(self, disk: DyingDisk, words: str) -> None:
        self._when = self._due(disk, words)
        self.is_torn = self._when == "during"
        with disk.note.open("a") as note:
            note.write(f"{words} {self._when}\n")

    def _due(self, disk: DyingDisk, words: str) -> str:
        point = disk.dies_at
        if point is None or not words.startswith(point.words):
            return ""
        disk.same += 1
        return point.when if disk.same == point.number else ""

    def __enter__(self) -> Change:
        if self._when == "before":
            die()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._when:
            die()


def torn(parts: Iterable[Data]) -> Iterator[Data]:
    """Yield half of the first part; then the process dies."""
    for part in parts:
        view = memoryview(part).cast("B")
        yield view[: len(view) // 2]
        die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--dies-at", type=FaultPoint.parsed)
    said = parser.parse_args()
    DyingDisk.dies_at = said.dies_at
    DyingDisk.note = said.directory.with_suffix(".changes")
    # `patch.object` fails if the module does not open disks by this name any more.
    mock.patch.object(atoll.coordinator.directory, "SystemDisk", DyingDisk).start()
    kernels.use("numpy")  # starts at once
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    coordinator = Coordinator(
        said.directory,
        RunSettings.from_dict(json.loads(said.settings.read_text())),
        listening=ListenOptions(host=said.host, port=said.port, has_tls=said.tls),
    )
    coordinator.start()
    print(json.dumps({"run": coordinator.run, "pin": coordinator.pin}), flush=True)  # noqa: T201 its starter reads it
    ended.wait()
    coordinator.close()


if __name__ == "__main__":
    main()
