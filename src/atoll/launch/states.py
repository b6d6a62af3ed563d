"""What may become of an island that was launched, and how an engine reports it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Where an island is in its life, by the word of its engine."""

    PENDING = "pending"
    """The engine has it and has not started it: it waits for a place, or is loading."""

    RUNNING = "running"
    RESTARTING = "restarting"
    """A life of it has ended, and the engine will start another."""

    FINISHED = "finished"
    """Its command has ended with 0."""

    FAILED = "failed"
    """Its command has ended otherwise, and nobody starts it again."""

    CANCELLED = "cancelled"
    """Somebody has ended it."""

    LOST = "lost"
    """The engine knows nothing of it any more: nobody can tell how it ended."""

    @property
    def is_over(self) -> bool:
        """Whether nothing becomes of it any more."""
        return self not in (State.PENDING, State.RUNNING, State.RESTARTING)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What an engine says of one island."""

    index: int
    name: str
    state: State
    restarts: int = 0
    """Lives after the first, as far as the engine counts them."""

    exit_code: int | None = None
    """Of its last life that has ended; minus the signal's number if one ended it."""

    why: str = ""
    """In the engine's own words: `OutOfMemory`, `signal 9`, `node n2 is down`."""

    place: str = ""
    """Where it runs: a node, a process, or whatever finds it there."""
