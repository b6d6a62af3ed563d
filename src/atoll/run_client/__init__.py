"""Owns the use of a run by people and launchers: status, control, export, checks.

Does not know how results are shown, nor how a name becomes a URL.
Start reading at `base.RunClient`, then `coordinator`, `store` and `directory`.
"""

from atoll.run_client.base import (
    Action,
    Check,
    Command,
    ControlReply,
    ExportedWeights,
    RunClient,
    RunStatus,
)
from atoll.run_client.location import StatusPoll, open_run, settings_of, try_status

__all__ = [
    "Action",
    "Check",
    "Command",
    "ControlReply",
    "ExportedWeights",
    "RunClient",
    "RunStatus",
    "StatusPoll",
    "open_run",
    "settings_of",
    "try_status",
]
