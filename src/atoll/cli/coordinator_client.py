"""Client of a coordinator for the commands of a user."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from atoll.cli.run_names import coordinator_url
from atoll.errors import Refused, RunEnded, Unreachable
from atoll.exchange.api import Incoming
from atoll.exchange.api.replies import read_failure
from atoll.http import Download, HttpClient, HttpReply
from atoll.island.connection import call_to
from atoll.island.environment import CredentialPaths, credentials_from_environment
from atoll.security import Credentials, Role, RunUrl, certificate_refusal


def credential_paths_for(url: RunUrl) -> CredentialPaths:
    """Return this user's credential paths, with the certificate for this run.

    It is the certificate of ATOLL_CERTIFICATE, or else the remembered one.
    """
    paths = credentials_from_environment()
    if paths.certificate is not None:
        return paths
    credential = Credentials(paths.credentials).find(str(url))
    if credential is None or credential.certificate is None:
        return paths
    return replace(paths, certificate=credential.certificate, certificate_key=None)


class CoordinatorClient:
    """A connection to the coordinator of a run; a context manager, or call `close`."""

    def __init__(
        self,
        url: RunUrl,
        http_client: HttpClient,
        headers: Mapping[str, str] | None = None,
        *,
        certificate: Path | None = None,
    ) -> None:
        self.url, self._http_client, self._headers = (
            url,
            http_client,
            dict(headers or {}),
        )
        self._certificate = certificate

    @classmethod
    def of(cls, run: str | RunUrl, *, role: Role = Role.ISLAND) -> CoordinatorClient:
        """Return a client for a run, given by URL, directory or name.

        Raises:
            UsageError: the run is unknown here, or there is no token for it.
        """
        url = coordinator_url(run) if isinstance(run, str) else run
        paths = credential_paths_for(url)
        http_client, headers = call_to(url, paths, role=role)
        return cls(url, http_client, headers, certificate=paths.certificate)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http_client.close()

    def get(self, target: str, *, timeout_s: float | None = None) -> Any:
        """Return the JSON reply of a route."""
        return self.call("GET", target, timeout_s=timeout_s).json()

    def post(self, target: str, payload: Mapping[str, Any] | None = None) -> Any:
        """Post a JSON payload to a route, and return its JSON reply."""
        body = json.dumps(payload or {}).encode()
        return self.call("POST", target, body=body).json()

    def call(
        self,
        method: str,
        target: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        download: Download | None = None,
        timeout_s: float | None = None,
    ) -> HttpReply:
        """Return a successful reply.

        Raises:
            AtollError: the coordinator reports an error, or does not answer.
        """
        content_type = {"Content-Type": "application/json"} if body is not None else {}
        try:
            reply = self._http_client.call(
                method,
                target,
                headers={**self._headers, **content_type, **(headers or {})},
                body=body,
                fetching=download,
                timeout_s=timeout_s,
                is_repeatable=method == "GET",
            )
        except Unreachable as exc:
            refusal = certificate_refusal(
                exc, address=str(self.url), shown=self._certificate
            )
            if refusal is None:
                raise
            raise refusal from exc
        if reply.status >= 400:
            raise _failure(reply)
        return reply


def _failure(reply: HttpReply) -> Exception:
    content_type = reply.headers.get("content-type", "")
    failure = read_failure(reply.status, content_type, Incoming.of(bytes(reply.body)))
    # For a command, the end of the run is a refusal like any other.
    return Refused(str(failure)) if isinstance(failure, RunEnded) else failure
