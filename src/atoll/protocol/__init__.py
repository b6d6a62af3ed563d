"""Owns who decides what, and when. Does not know arrays, clocks, sockets or threads.

Start reading at `messages`, then `island`.
"""

from atoll.protocol.island import (
    Action,
    End,
    Event,
    How,
    IslandState,
    Leaving,
    Plan,
    Resend,
    Rest,
    Seal,
    Stepped,
    SyncNow,
    Take,
    Taken,
    advance,
    decide,
    join_at,
    verdict_of,
    wakes_at,
)
from atoll.protocol.judge import judge_updates, refuse_all
from atoll.protocol.messages import (
    Beat,
    JoinReply,
    JoinRequest,
    ModelSpec,
    Position,
    TensorSpec,
)

__all__ = [
    "Action",
    "Beat",
    "End",
    "Event",
    "How",
    "IslandState",
    "JoinReply",
    "JoinRequest",
    "Leaving",
    "ModelSpec",
    "Plan",
    "Position",
    "Resend",
    "Rest",
    "Seal",
    "Stepped",
    "SyncNow",
    "Take",
    "Taken",
    "TensorSpec",
    "advance",
    "decide",
    "join_at",
    "judge_updates",
    "refuse_all",
    "verdict_of",
    "wakes_at",
]
