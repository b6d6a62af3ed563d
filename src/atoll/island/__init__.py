"""Owns an island's life: its host memory, its background threads, its membership.

Does not know which framework trains, nor how frames travel.
Start reading at `view.ParameterView`, then `host.Host`.
"""

from atoll.island.background import Background, Hand, Promise, Threads
from atoll.island.host import Host
from atoll.island.joining import join_run
from atoll.island.tally import Tally
from atoll.island.view import ParameterView

__all__ = [
    "Background",
    "Hand",
    "Host",
    "ParameterView",
    "Promise",
    "Tally",
    "Threads",
    "join_run",
]
