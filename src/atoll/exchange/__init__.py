"""Owns how islands' updates become the agreed mean. Does not know what trains them.

Start reading at `base.Exchange`, then `memory`.
"""

from atoll.exchange.base import Exchange, Frame, Outcome
from atoll.exchange.memory import MemoryRun

__all__ = ["Exchange", "Frame", "MemoryRun", "Outcome"]
