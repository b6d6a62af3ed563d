"""Owns who decides what, and when. Does not know arrays, clocks, sockets or threads.

Start reading at `messages`, then `island`.
"""

from atoll.protocol.island import advance, decide, join_at, verdict_of, wakes_at
from atoll.protocol.island_events import (
    Action,
    Await,
    End,
    Event,
    Leaving,
    NeverOpens,
    Resend,
    Rest,
    Seal,
    Stepped,
    SyncNow,
    Take,
    Taken,
    Wanted,
)
from atoll.protocol.island_state import How, IslandState, Plan
from atoll.protocol.judge import judge_updates, refuse_all
from atoll.protocol.messages import (
    Beat,
    Holding,
    JoinReply,
    JoinRequest,
    ModelSpec,
    Position,
    Stats,
    TensorSpec,
)
from atoll.protocol.rounds import Phase, Reception

__all__ = [
    "Action",
    "Await",
    "Beat",
    "End",
    "Event",
    "Holding",
    "How",
    "IslandState",
    "JoinReply",
    "JoinRequest",
    "Leaving",
    "ModelSpec",
    "NeverOpens",
    "Phase",
    "Plan",
    "Position",
    "Reception",
    "Resend",
    "Rest",
    "Seal",
    "Stats",
    "Stepped",
    "SyncNow",
    "Take",
    "Taken",
    "TensorSpec",
    "Wanted",
    "advance",
    "decide",
    "join_at",
    "judge_updates",
    "refuse_all",
    "verdict_of",
    "wakes_at",
]
