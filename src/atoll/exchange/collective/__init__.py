"""Owns rounds among islands that share a fast network: reduced there, kept by the run.

Does not know what is trained, nor who counts: the run's coordinator decides that.
Start reading at `exchange.CollectiveExchange`, then `leading` and `shares`.
"""

from atoll.exchange.collective.exchange import CollectiveExchange
from atoll.exchange.collective.memory import MemoryWorld
from atoll.exchange.collective.run import CollectiveRun
from atoll.exchange.collective.world import World

__all__ = ["CollectiveExchange", "CollectiveRun", "MemoryWorld", "World"]
