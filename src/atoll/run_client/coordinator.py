"""A run at its coordinator, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from atoll import security
from atoll.errors import Refused, RunEnded, Unreachable
from atoll.exchange.api import Incoming, Info, parse_info
from atoll.exchange.api.replies import read_failure
from atoll.http import Download, HttpClient, HttpReply
from atoll.island.connection import call_to
from atoll.island.environment import CredentialPaths, credentials_from_environment
from atoll.retry import BUSY_COORDINATOR, retried
from atoll.routes import ROUTE
from atoll.run_client import base
from atoll.runtime import SystemRuntime
from atoll.settings import RunSettings
from atoll.telemetry import Event, EventPage
from atoll.telemetry.event_files import MAX_PAGE

EVENTS_S = 40.0
"""Timeout of a long poll, which the coordinator answers within 20 s."""

EXPORT_S = 600.0
"""Timeout of a reply: a coordinator writes a large file before it sends any of it."""


def credential_paths_for(url: security.RunUrl) -> CredentialPaths:
    """Return this user's credential paths, with the certificate for this run.

    It is the certificate of ATOLL_CERTIFICATE, or else the remembered one.
    """
    paths = credentials_from_environment()
    if paths.certificate is not None:
        return paths
    credential = security.Credentials(paths.credentials).find(str(url))
    if credential is None or credential.certificate is None:
        return paths
    return replace(paths, certificate=credential.certificate, certificate_key=None)


class CoordinatorClient:
    """A connection to the coordinator of a run; a context manager, or call `close`."""

    def __init__(
        self,
        url: security.RunUrl,
        http_client: HttpClient,
        headers: Mapping[str, str] | None = None,
        *,
        certificate: Path | None = None,
    ) -> None:
        self.url, self._http_client = url, http_client
        self._headers, self._certificate = dict(headers or {}), certificate

    @classmethod
    def of(
        cls, url: security.RunUrl, *, role: security.Role = security.Role.ISLAND
    ) -> CoordinatorClient:
        """Return a client with this user's credentials.

        Raises:
            UsageError: there is no token for the run.
        """
        paths = credential_paths_for(url)
        http_client, headers = call_to(url, paths, role=role)
        return cls(url, http_client, headers, certificate=paths.certificate)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Safe to repeat."""
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
            refusal = security.certificate_refusal(
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


class CoordinatorRunClient:
    """A run at its coordinator. Implements `RunClient`."""

    poll_s = 2.0

    def __init__(self, url: security.RunUrl) -> None:
        self.url = url

    def close(self) -> None:
        """Close the connection. Safe to repeat."""
        if "_client" in self.__dict__:
            self._client.close()

    @cached_property
    def _client(self) -> CoordinatorClient:
        return CoordinatorClient.of(self.url)

    def status(self, *, watch: bool = False) -> base.RunStatus:
        """Return the status; the coordinator knows which islands are live."""
        return base.RunStatus.of(self._client.get("/status"))

    def settings(self) -> RunSettings:
        """Return the settings in force."""
        return self.info().settings

    def info(self) -> Info:
        """Return the description of the run that islands read."""
        return parse_info(self._client.call("GET", "/info").body)

    def events(
        self, *, after: Event | None = None, is_waiting: bool = False
    ) -> list[Event]:
        """Return the last events, or those that followed one in its process."""
        if after is None and not is_waiting:
            return self.older_events(limit=MAX_PAGE).events
        query: dict[str, str | float] = {"wait": 1} if is_waiting else {}
        if after is not None:
            query |= {"after": after.number, "process": after.process}
        target = ROUTE["events"].target(**query)
        rows = self._client.get(target, timeout_s=EVENTS_S if is_waiting else None)
        return [Event.of(row) for row in rows]

    def older_events(
        self, before: str = "", *, limit: int = 200, kind: str = "", island: str = ""
    ) -> EventPage:
        """Return a page of events from the coordinator's files."""
        target = ROUTE["events"].target(
            before=before, limit=limit, kind=kind, island=island
        )
        answer = self._client.get(target)
        return EventPage([Event.of(row) for row in answer["events"]], answer["before"])

    def history(self, **query: str | int) -> dict[str, Any]:
        """Return the past as the coordinator has folded it."""
        answer: dict[str, Any] = self._client.get(ROUTE["history"].target(**query))
        return answer

    def control(self, command: base.Command) -> base.ControlReply:
        """Perform a command with the operator's token."""
        with CoordinatorClient.of(self.url, role=security.Role.OPERATOR) as client:
            reply = client.post(f"/control/{command.action.value}", command.parameters)
        status = base.RunStatus.of(reply)
        return base.ControlReply(f"{status.state}. {status.reason}".rstrip(), status)

    def export(
        self,
        file: Path,
        *,
        round: int | None = None,
        progress: base.Progress | None = None,
    ) -> base.ExportedWeights:
        """Download the weights; a download that breaks off continues."""
        self._client.get("/health")  # fail now if it is away, without retries
        target = "/anchor" if round is None else f"/anchor?round={round}"

        def open_buffer(size: int) -> memoryview:
            # Download into the file's mapping, so that no second copy is in memory.
            return memoryview(np.memmap(file, np.uint8, "w+", shape=(size,)).data)

        download = Download(open_buffer, progress)
        # A download that breaks off continues.
        reply = retried(
            lambda: self._client.call(
                "GET", target, download=download, timeout_s=EXPORT_S
            ),
            BUSY_COORDINATOR,
            sleep=SystemRuntime().sleep,
        )
        return base.ExportedWeights.of_file(file, int(reply.headers["content-length"]))

    def export_ledger(self, file: Path) -> int:
        """Download the ledger."""
        self._client.get("/health")  # fail now if it is away, without retries
        reply = retried(
            lambda: self._client.call("GET", "/data/ledger", timeout_s=EXPORT_S),
            BUSY_COORDINATOR,
            sleep=SystemRuntime().sleep,
        )
        return file.write_bytes(reply.body)

    def checks(self) -> Iterator[base.Check]:
        """Check credential, network, coordinator and speed."""
        from atoll.run_client.checks import CoordinatorCheck  # it needs this module

        return CoordinatorCheck(self.url).checks()
