"""Owns who decides what, and when. Does not know arrays, clocks, sockets or threads.

Start reading at `messages`, then `island`.
"""

from atoll.protocol.island import advance, decide, join_at, verdict_of, wakes_at
from atoll.protocol.island_types import (
    Action,
    Await,
    End,
    Event,
    FragmentsRequested,
    IslandState,
    Leaving,
    NeverOpens,
    OutcomeTaken,
    PublishRest,
    Resend,
    Seal,
    Stepped,
    SyncNow,
    SyncPlan,
    Take,
    WorkDecision,
)
from atoll.protocol.judge import judge_updates, refuse_all
from atoll.protocol.messages import (
    Heartbeat,
    HeldRound,
    JoinReply,
    JoinRequest,
    Position,
    Stats,
)
from atoll.protocol.model import ModelSpec, TensorSpec
from atoll.protocol.rounds import Phase, Reception

__all__ = [
    "Action",
    "Await",
    "End",
    "Event",
    "FragmentsRequested",
    "Heartbeat",
    "HeldRound",
    "IslandState",
    "JoinReply",
    "JoinRequest",
    "Leaving",
    "ModelSpec",
    "NeverOpens",
    "OutcomeTaken",
    "Phase",
    "Position",
    "PublishRest",
    "Reception",
    "Resend",
    "Seal",
    "Stats",
    "Stepped",
    "SyncNow",
    "SyncPlan",
    "Take",
    "TensorSpec",
    "WorkDecision",
    "advance",
    "decide",
    "join_at",
    "judge_updates",
    "refuse_all",
    "verdict_of",
    "wakes_at",
]
