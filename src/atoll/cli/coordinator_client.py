"""Asks a coordinator on behalf of a person: one call, one answer, one error of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from atoll.cli.run_names import url_of
from atoll.errors import Refused, RunEnded, Unreachable
from atoll.exchange.api import Incoming
from atoll.exchange.api.replies import read_failure
from atoll.http import Download, HttpClient, HttpReply
from atoll.island.connection import call_to
from atoll.island.environment import CredentialPaths, surroundings_from_environment
from atoll.security import Credentials, Role, RunUrl, certificate_refusal


def surroundings_for(url: RunUrl) -> CredentialPaths:
    """Return this user's surroundings, with the certificate that is shown to a run.

    It is the one that ATOLL_CERTIFICATE names, or else the one that was remembered.
    """
    around = surroundings_from_environment()
    if around.certificate is not None:
        return around
    known = Credentials(around.credentials).find(str(url))
    if known is None or known.certificate is None:
        return around
    return replace(around, certificate=known.certificate, certificate_key=None)


class Asking:
    """A way to the coordinator of a run. Close it, or use it in a `with` block."""

    def __init__(
        self,
        url: RunUrl,
        caller: HttpClient,
        headers: Mapping[str, str] | None = None,
        *,
        shown: Path | None = None,
    ) -> None:
        self.url, self._caller, self._headers = url, caller, dict(headers or {})
        self._shown = shown

    @classmethod
    def of(cls, run: str | RunUrl, *, role: Role = Role.ISLAND) -> Asking:
        """Return the way to what a user called a run.

        Raises:
            UsageError: it is not known here, or no token for it is.
        """
        url = url_of(run) if isinstance(run, str) else run
        around = surroundings_for(url)
        caller, headers = call_to(url, around, role=role)
        return cls(url, caller, headers, shown=around.certificate)

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
        headers: Mapping[str, str] | None = None,
        fetching: Download | None = None,
        timeout_s: float | None = None,
    ) -> HttpReply:
        """Return a good answer.

        Raises:
            AtollError: what the coordinator said, or that nobody answered.
        """
        kind = {"Content-Type": "application/json"} if body is not None else {}
        try:
            reply = self._caller.call(
                method,
                target,
                headers={**self._headers, **kind, **(headers or {})},
                body=body,
                fetching=fetching,
                timeout_s=timeout_s,
                is_repeatable=method == "GET",
            )
        except Unreachable as exc:
            refusal = certificate_refusal(exc, address=str(self.url), shown=self._shown)
            if refusal is None:
                raise
            raise refusal from exc
        if reply.status >= 400:
            raise _failure(reply)
        return reply


def _failure(reply: HttpReply) -> Exception:
    said = reply.headers.get("content-type", "")
    failure = read_failure(reply.status, said, Incoming.of(bytes(reply.body)))
    # To a person that a run is over is an answer like any other no.
    return Refused(str(failure)) if isinstance(failure, RunEnded) else failure
