"""An island process whose inner steps can be counted one by one.

    python -m tests.kill_storm.island URL NAME --folder FOLDER --process 7

Every inner step takes `--unit` from coordinate `--process` of every fragment. The
process keeps its counters in a mapped file, which a SIGKILL does not take away.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from atoll import kernels
from atoll.errors import Unreachable
from atoll.exchange import Exchange, Frame
from atoll.island import Host
from atoll.island.connection import is_coordinator
from atoll.protocol import JoinReply, JoinRequest, Reception
from atoll.runtime import SystemClock
from atoll.testing import VectorView, vector_model
from tests.e2e.bucket_island import reach
from tests.e2e.island_process import Kept, Line, arguments, reach_again, report, train
from tests.kill_storm.process_files import (
    Marks,
    joined_file,
    open_marks,
    report_file,
    write,
)


class Counted:
    """Training that takes one unit per step from this process's own coordinate."""

    def __init__(self, view: VectorView, marks: Marks, *, coordinate: int, unit: int):
        self._view, self._marks = view, marks
        self._coordinate, self._unit = coordinate, np.float32(unit)
        self.work = [0.0 for _ in view.local]

    def step(self) -> None:
        self._marks["made"] += 1
        for fragment, local in enumerate(self._view.local):
            local[self._coordinate] -= self._unit
            self.work[fragment] += float(self._unit)


class Marking(Kept):
    """Marks what its island has dropped before each update is kept and sent."""

    def __init__(self, inner: Exchange, folder: Path, marks: Marks) -> None:
        super().__init__(inner, folder)
        self._marks = marks
        self.host: Host | None = None

    def publish(self, frame: Frame) -> Reception:
        if self.host is not None:
            self._marks["dropped"] = dropped_steps(self.host)
            self._marks["refused"] = self.host.counters.refused
            self._marks["round"] = self.host.round
        return super().publish(frame)


def live(way: Line, said: argparse.Namespace) -> None:
    """Take part in a run, and write a report when the island has left it."""
    marks = open_marks(said.folder, said.process)
    view = VectorView(fill=0.0)
    model = vector_model({f"blocks.{n}.weight": (said.elements,) for n in range(2)})
    exchange = Marking(way.exchange, said.folder / "updates", marks)
    request = JoinRequest(model=model, island=said.name)
    leaving = way.leaving()
    host = Host(exchange, view, request, leaving=leaving)
    write(joined_file(said.folder, said.process), joining(host.joined))
    marks["has_joined"] = 1
    way.exchange.stats, exchange.host = host.stats, host
    training = Counted(view, marks, coordinate=said.process, unit=said.unit)
    why = train(host, training, said)
    told = {
        **report(host, view, training, why),
        "dropped": dropped_steps(host),
    }
    write(report_file(said.folder, said.process), told)


def dropped_steps(host: Host) -> list[int]:
    """Return how many inner steps an island says that it dropped, by fragment."""
    return [slot.dropped_steps for slot in host.slots]


def joining(joined: JoinReply) -> dict[str, object]:
    """Return what the run has told this life at its joining."""
    opened = joined.position.rounds
    return {
        "incarnation": joined.incarnation,
        "inner_steps": joined.inner_steps,
        "spoken_for": [[each, opened[each]] for each in joined.spoken_for],
    }


def reached(url: str, name: str) -> Line:
    """Return the way to a run, once its coordinator or its store answers."""
    if is_coordinator(url):
        return reach_again(url, name, SystemClock())
    while True:
        try:
            return reach(url, name, None)
        except Unreachable:
            time.sleep(0.1)


def main() -> None:
    parser = arguments()
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--unit", type=int, required=True)
    said = parser.parse_args()
    kernels.use("numpy")  # starts at once
    live(reached(said.url, said.name), said)


if __name__ == "__main__":
    main()
