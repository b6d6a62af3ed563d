"""A Ray cluster whose nodes are processes of this machine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.cluster_utils import Cluster

STORE_BYTES = 80_000_000
"""The least that Ray takes for objects, of which islands have none."""

WATCHFUL = {"health_check_period_ms": 500}
"""How often the head looks for a node that was killed; one that is slow has its time
as ever."""


@dataclass(frozen=True)
class Nodes:
    """The cluster, and one more node for it."""

    cluster: Any

    def add(self, **more: Any) -> Any:
        made = {"num_cpus": 2, "object_store_memory": STORE_BYTES}
        return self.cluster.add_node(**(made | more))


@contextmanager
def ray_cluster(*, num_nodes: int = 3) -> Iterator[Nodes]:
    """Run nodes while the block lasts; this process keeps its signals."""
    before = signal.getsignal(signal.SIGTERM)
    made = Nodes(Cluster())
    try:
        made.add(_system_config=WATCHFUL)
        for _ in range(num_nodes - 1):
            made.add()
        yield made
    finally:
        ray.shutdown()
        made.cluster.shutdown()
        signal.signal(signal.SIGTERM, before)
