"""An answer that is raised: what is wrong with a request, for its sender to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

RETRY_AFTER_S: Final = 5


class Problem(Exception):
    """Ends a request with `status` and a short JSON body.

    A handler may raise one; a body that does not arrive as declared raises one.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = dict(headers or {})


def busy(why: str = "Too many bodies are on their way.") -> Problem:
    """Return the answer to a body that finds no lane, or loses it."""
    return Problem(
        503,
        "busy",
        f"{why} Try again in {RETRY_AFTER_S} s.",
        headers={"retry-after": str(RETRY_AFTER_S)},
    )
