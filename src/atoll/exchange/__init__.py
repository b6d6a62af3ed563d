"""Owns how islands' updates become the agreed mean. Does not know what trains them.

Start reading at `base.Exchange`, then `memory`; `coordinator` reaches a run elsewhere.
"""

from atoll.exchange.base import Exchange, Frame, Outcome
from atoll.exchange.calls import (
    LONG_POLL_S,
    AgreedCall,
    Call,
    FoundCall,
    HeartbeatCall,
    JoinCall,
    KeepCall,
    Kept,
    LeaveCall,
    OfferCall,
    OutcomeCall,
    PublishCall,
    RecoverCall,
    Reply,
    StateCall,
    size_of,
)
from atoll.exchange.constants import Constants, Keeper, KeepingExchange
from atoll.exchange.coordinator import CoordinatorExchange, Line
from atoll.exchange.memory import MemoryRun

__all__ = [
    "LONG_POLL_S",
    "AgreedCall",
    "Call",
    "Constants",
    "CoordinatorExchange",
    "Exchange",
    "FoundCall",
    "Frame",
    "HeartbeatCall",
    "JoinCall",
    "KeepCall",
    "Keeper",
    "KeepingExchange",
    "Kept",
    "LeaveCall",
    "Line",
    "MemoryRun",
    "OfferCall",
    "Outcome",
    "OutcomeCall",
    "PublishCall",
    "RecoverCall",
    "Reply",
    "StateCall",
    "size_of",
]
