"""An island that trains the rows that its run deals out.

    python -m tests.e2e.row_island URL NAME --folder FOLDER --step-s 0.01

Run and name come from the environment if they are not given, as a launcher sets them.
The rows of each inner step are appended to FOLDER/NAME.seen before it is counted, so
that a test knows the rows of an island that was killed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np

from atoll import kernels
from atoll.data import DataSpec, batches
from atoll.island import Host
from atoll.island.deal import DealtRows
from atoll.island.signals import Interrupted, Termination
from atoll.protocol import JoinRequest
from atoll.runtime import SystemClock
from atoll.testing import VectorView, vector_model
from tests.e2e.island_process import reach_again

BATCH = 8


class DealtHost:
    """A host as `atoll.data.batches` takes it."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def deal(self, data: DataSpec) -> DealtRows:
        return self._host.open_data(data, may_sync=True)


HELD_S = 0.4
"""Time of an inner step while FOLDER/hold exists, so that others can come."""


def train(host: Host, view: VectorView, seen: Path, *, step_s: float) -> None:
    """Train until the run has no more rows, or this island is asked to end."""
    hold = seen.parent / "hold"
    rows = int(os.environ["DEALT_ROWS"])
    with Termination() as termination, seen.open("ab", buffering=0) as file:
        try:
            for numbers in batches(DealtHost(host), rows=rows, batch=BATCH):
                file.write(numbers.tobytes())
                time.sleep(HELD_S if hold.exists() else step_s)  # what computing takes
                np.subtract.at(view.local[0], numbers % len(view.local[0]), 1e-3)
                host.stepped()
                if host.has_ended or termination.is_asked:
                    break
        except Interrupted:
            pass
        termination.heed()
        host.leave()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url", nargs="?", default=os.environ.get("ATOLL_RUN"))
    parser.add_argument("name", nargs="?", default=os.environ.get("ATOLL_ISLAND"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--elements", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    said = parser.parse_args()
    kernels.use("numpy")  # starts at once
    line = reach_again(said.url, said.name, SystemClock())
    view, model = VectorView(fill=1.0), vector_model({"w": (said.elements,)})
    request = JoinRequest(model=model, island=said.name)
    host = Host(line.exchange, view, request, leaving=line.leaving())
    line.exchange.stats = host.stats
    seen = said.folder / f"{said.name}.seen"
    train(host, view, seen, step_s=said.step_s)
    (said.folder / f"{said.name}.json").write_text(json.dumps({"ended": True}))


if __name__ == "__main__":
    main()
