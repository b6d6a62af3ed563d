"""Asks a coordinator on behalf of a person: one call, one answer, one error of ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from atoll.cli.names import url_of
from atoll.errors import Refused, RunEnded
from atoll.exchange.forms import Incoming
from atoll.exchange.forms.failures import read_failure
from atoll.http import Caller, Reply
from atoll.island.environment import surroundings_from_environment
from atoll.island.reach import call_to
from atoll.security import Role, RunUrl

Progress = Callable[[int, int], None]
Into = Callable[[int], memoryview]


class Asking:
    """A way to the coordinator of a run. Close it, or use it in a `with` block."""

    def __init__(
        self, url: RunUrl, caller: Caller, headers: Mapping[str, str] | None = None
    ) -> None:
        self.url, self._caller, self._headers = url, caller, dict(headers or {})

    @classmethod
    def of(cls, run: str | RunUrl, *, role: Role = Role.ISLAND) -> Asking:
        """Return the way to what a user called a run.

        Raises:
            UsageError: it is not known here, or no token for it is.
        """
        url = url_of(run) if isinstance(run, str) else run
        return cls(url, *call_to(url, surroundings_from_environment(), role=role))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._caller.close()

    def get(self, target: str, *, timeout_s: float | None = None) -> Any:
        """Return what a route says, read as JSON."""
        return self.call("GET", target, timeout_s=timeout_s).json()

    def post(self, target: str, said: Mapping[str, Any] | None = None) -> Any:
        """Tell a route something, and return what it says, read as JSON."""
        body = json.dumps(said or {}).encode()
        return self.call("POST", target, body=body).json()

    def call(
        self,
        method: str,
        target: str,
        *,
        body: bytes | None = None,
        into: Into | None = None,
        progress: Progress | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """Return a good answer.

        Raises:
            AtollError: what the coordinator said, or that nobody answered.
        """
        kind = {"Content-Type": "application/json"} if body is not None else {}
        reply = self._caller.call(
            method,
            target,
            headers={**self._headers, **kind},
            body=body,
            into=into,
            progress=progress,
            timeout_s=timeout_s,
            is_repeatable=method == "GET",
        )
        if reply.status >= 400:
            raise _failure(reply)
        return reply


def _failure(reply: Reply) -> Exception:
    said = reply.headers.get("content-type", "")
    failure = read_failure(reply.status, said, Incoming.of(bytes(reply.body)))
    # To a person that a run is over is an answer like any other no.
    return Refused(str(failure)) if isinstance(failure, RunEnded) else failure
