"""An island as a process of its own that trains rows. `data.py` starts four.

python bench/_data_island.py URL NAME ROWS FILE

With shares by number it trains its share once, from the beginning in every life, as an
island without a checkpoint does. The rows of its inner steps are appended to FILE.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.data import DataSpec, batches
from atoll.island import Host
from atoll.island.connection import connect
from atoll.island.deal import DealtRows
from atoll.island.environment import credentials_from_environment
from atoll.island.numpy_model import VectorView, vector_model
from atoll.protocol import JoinRequest
from atoll.runtime import SystemClock

BATCH, STEP_S = 8, 0.03


class DealtHost:
    """A host as `atoll.data.batches` takes it."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def deal(self, data: DataSpec) -> DealtRows:
        return self._host.open_data(data, may_sync=True)


def batches_of(host: Host, rows: int) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of one inner step after the other."""
    if host.settings.data.is_dealt:
        yield from batches(DealtHost(host), rows=rows, batch=BATCH)
        return
    share = np.arange(rows)[host.joined.slot :: host.settings.run.start_islands]
    for first in range(0, len(share), BATCH):
        yield share[first : first + BATCH]


def main() -> None:
    """Train until there are no more rows."""
    url, name, rows, file = sys.argv[1:]
    paths = credentials_from_environment()
    connection = connect(url, island=name, paths=paths, clock=SystemClock())
    view = VectorView(fill=1.0)
    request = JoinRequest(model=vector_model({"w": (1000,)}), island=name)
    leaving = connection.leaving()
    host = Host(connection.exchange, view, request, leaving=leaving)
    connection.exchange.stats = host.stats
    with Path(file).open("ab", buffering=0) as seen:
        for numbers in batches_of(host, int(rows)):
            for local in view.local:
                local -= 1e-3
            time.sleep(STEP_S)  # computing
            host.stepped()
            seen.write(numbers.tobytes())
            if host.has_ended:
                break
    host.leave()


if __name__ == "__main__":
    main()
