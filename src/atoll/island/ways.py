"""How an outcome is taken into the live weights."""

from __future__ import annotations

from atoll.protocol import How
from atoll.settings import SyncSection


def way_of(how: How, sync: SyncSection) -> str:
    """Return which text of `weights.adopt` an outcome asks for."""
    match how:
        case How.ADOPT:
            return sync.adopt
        case How.REBASE:
            return "rebase"
        case How.CARRY:
            return "carry"
        case How.DROP | How.REFUSE:
            return "replace"
