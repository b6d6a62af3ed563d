"""Owns an island: its host memory, its background threads, its membership.

Does not know which framework trains, nor how frames travel.
Start reading at `base.ParameterView`, then `host.Host`, `driver` and `sync_worker`.
"""

from atoll.island.base import Hand, ParameterView, Promise, Runtime, ThreadRuntime
from atoll.island.host import Host
from atoll.island.join import join_run
from atoll.island.progress import IslandCounters

__all__ = [
    "Hand",
    "Host",
    "IslandCounters",
    "ParameterView",
    "Promise",
    "Runtime",
    "ThreadRuntime",
    "join_run",
]
