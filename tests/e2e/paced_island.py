"""An island that notes its clock and its waiting when it comes to a round.

    python -m tests.e2e.paced_island URL NAME --folder FOLDER --step-s 0.036

An inner step is a sleep, so that islands of one machine keep their paces. The notes are
in FOLDER/NAME.json, beside what every island of these tests reports.
"""

from __future__ import annotations

import argparse
import json
import time

from atoll import kernels
from atoll.island import Host
from atoll.protocol import JoinRequest
from atoll.runtime import SystemClock
from atoll.testing import VectorView, vector_model
from tests.e2e.island_process import (
    Kept,
    Line,
    Training,
    arguments,
    reach_again,
    report,
    train,
)


class NotedTraining(Training):
    """Training that notes when its island is in another round than before."""

    def __init__(self, view: VectorView, host: Host, seed: int) -> None:
        super().__init__(view, seed)
        self._host = host
        self.notes: list[dict[str, float]] = []

    def step(self) -> None:
        if not self.notes or self._host.round != self.notes[-1]["round"]:
            self.note()
        super().step()

    def note(self) -> None:
        counters = self._host.counters
        self.notes.append(
            {
                "round": self._host.round,
                "at_s": time.monotonic(),
                "wait_s": counters.wait_s,
                "inner_steps": counters.inner_steps,
            }
        )


def live(line: Line, said: argparse.Namespace) -> None:
    """Take part in a run, and write what was done when it has ended."""
    view = VectorView(fill=1.0)
    model = vector_model({f"blocks.{n}.weight": (said.elements,) for n in range(2)})
    exchange = Kept(line.exchange, said.folder / "updates")
    request = JoinRequest(model=model, island=said.name)
    host = Host(exchange, view, request, leaving=line.leaving())
    line.exchange.stats = host.stats
    training = NotedTraining(view, host, said.seed)
    why = train(host, training, said)
    written = said.folder / f"{said.name}.part"
    told = report(host, view, training, why) | {"notes": training.notes}
    written.write_text(json.dumps(told))
    written.rename(said.folder / f"{said.name}.json")


def main() -> None:
    said = arguments().parse_args()
    kernels.use("numpy")  # starts at once
    live(reach_again(said.url, said.name, SystemClock()), said)


if __name__ == "__main__":
    main()
