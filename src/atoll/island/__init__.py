"""Owns an island: its host memory, its background threads, its membership.

Does not know which framework trains, nor how frames travel.
Start reading at `base.ParameterView`, then `handle`, `host.Host`, `driver` and
`sync_worker`.
"""

from atoll.island.base import ParameterView
from atoll.island.host import Host
from atoll.island.join import join_run
from atoll.island.progress import IslandCounters

__all__ = [
    "Host",
    "IslandCounters",
    "ParameterView",
    "join_run",
]
