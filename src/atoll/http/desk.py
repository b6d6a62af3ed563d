"""Who takes a connection over when it leaves the parking lot.

Nothing here blocks the lot: what takes time runs on a thread of the crew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from atoll.http.channel import Channel
from atoll.http.later import Later
from atoll.http.problem import Problem
from atoll.http.request import Request
from atoll.http.response import Response


class Exit(Protocol):
    """Where connections end."""

    def lost(self, channel: Channel) -> None:
        """Close a connection that the other side has closed."""

    def drop(self, channel: Channel) -> None:
        """Close a connection that we are done with."""

    def tell(self, callback: Callable[[], None]) -> None:
        """Run a callback about who has gone."""


class Desk(Exit, Protocol):
    """Where requests are served."""

    def serve(self, channel: Channel) -> None:
        """Read the head that is there, and what it asks for."""

    def handle(self, request: Request) -> None:
        """Answer a request whose body is there."""

    def answer(self, request: Request, response: Response) -> None:
        """Send what a Later was given."""

    def expire(self, request: Request, later: Later) -> None:
        """Send what a Later says when its time is up."""

    def refuse(self, channel: Channel, problem: Problem) -> None:
        """Send what is wrong, and close."""
