"""Owns how islands' updates become the agreed mean. Does not know what trains them.

Start reading at `base.Exchange`, then `memory`; `coordinator` reaches a run elsewhere.
"""

from typing import TYPE_CHECKING, Any

from atoll.exchange.base import Exchange, Frame, Outcome
from atoll.exchange.coordinator import CoordinatorExchange
from atoll.exchange.memory import MemoryRun

if TYPE_CHECKING:
    from atoll.exchange.collective import CollectiveRun

__all__ = [
    "CollectiveRun",
    "CoordinatorExchange",
    "Exchange",
    "Frame",
    "MemoryRun",
    "Outcome",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # Only islands that share a process group load the collective.
        if name == "CollectiveRun":
            from atoll.exchange.collective import CollectiveRun

            return CollectiveRun
        raise AttributeError(f"module 'atoll.exchange' has no attribute {name!r}")
