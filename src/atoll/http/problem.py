"""An answer that is raised: what is wrong with a request, for its sender to read."""

from __future__ import annotations

from collections.abc import Mapping


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
