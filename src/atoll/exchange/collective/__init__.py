"""Owns rounds among islands that share a fast network: reduced there, kept by the run.

Does not know models, nor which updates count: the run's coordinator decides that.
Start reading at `exchange.CollectiveExchange`, then `channel` and `follower`.
"""

from atoll.exchange.collective.exchange import CollectiveExchange, CollectiveRun
from atoll.exchange.collective.memory import MemoryWorld
from atoll.exchange.collective.world import CollectiveWorld

__all__ = ["CollectiveExchange", "CollectiveRun", "CollectiveWorld", "MemoryWorld"]
