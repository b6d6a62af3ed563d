"""An island, as a process of its own, that trains the rows which its run deals out.

python -m tests.e2e.dealt_island URL NAME --rows N --batch N [--step-s S]
"""

from __future__ import annotations

import argparse
import time

from atoll import kernels
from atoll.data import DataSpec, batches
from atoll.island import Host
from atoll.island.deal import DealtRows
from atoll.protocol import JoinRequest
from atoll.testing import VectorView, vector_model
from tests.e2e.bucket_island import reach


class Dealt:
    """The rows of a host, for `atoll.data.batches`."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def deal(self, data: DataSpec) -> DealtRows:
        return self._host.open_data(data, may_sync=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("name")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--lease-s", type=float, default=10.0)
    given = parser.parse_args()
    kernels.use("numpy")  # starts at once
    connection = reach(given.url, given.name, None, lease_s=given.lease_s)
    view = VectorView(fill=1.0)
    request = JoinRequest(model=vector_model({"w": (64,)}), island=given.name)
    host = Host(connection.exchange, view, request, leaving=connection.leaving())
    for rows in batches(Dealt(host), rows=given.rows, batch=given.batch):
        view.local[0] -= 1e-3 * len(rows)
        time.sleep(given.step_s)  # the time of a step
        host.stepped()
        if host.has_ended:
            break
    host.leave()
    connection.close()


if __name__ == "__main__":
    main()
