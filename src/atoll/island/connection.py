"""The connection of an island to a coordinator: address, credentials, timeouts.

A connection waits until the coordinator is up. Ranks of a collective share an exchange,
and each has its own connection to the coordinator.
"""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from atoll import security
from atoll.errors import AtollError, Refused, Unreachable, UsageError
from atoll.exchange import CollectiveRun, CoordinatorExchange
from atoll.exchange.api import Info, parse_info
from atoll.exchange.over_http import HttpTransport
from atoll.http import BUSY, HttpClient, HttpReply
from atoll.http.client import ConnectionBroken
from atoll.island.environment import CredentialPaths
from atoll.island.identity import connection_key
from atoll.island.progress import LinkMeter
from atoll.retry import LEAVE_S, NOT_UP, NOT_UP_S, retried
from atoll.runtime import Clock, Runtime, SystemRuntime

CONNECT_S, SILENCE_S = 10.0, 30.0
"""Timeouts for the TCP connection, and for the first byte of a reply."""

log = logging.getLogger("atoll")
T = TypeVar("T")


def is_coordinator(run: str) -> bool:
    """Return whether a run's name is the address of a coordinator."""
    return run.startswith(("http://", "https://"))


@dataclass(frozen=True)
class CoordinatorConnection:
    """An HTTP connection to a run, and the exchange that uses it."""

    exchange: CoordinatorExchange
    info: Info
    _line: HttpTransport
    costs: Callable[[], dict[str, float]]
    """Returns the measured link. Requests to a coordinator have no price."""

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Bound the time that leaving takes, and close the connection after it."""
        self._line.close_after(LEAVE_S)
        try:
            yield
        finally:
            self._line.close()

    def close(self) -> None:
        """Close the connection. Safe to repeat."""
        self._line.close()


def connect(
    run: str,
    *,
    island: str | None,
    paths: CredentialPaths,
    clock: Clock,
    wait_s: float = NOT_UP_S,
    key: bytes | None = None,
    nonce: bytes | None = None,
) -> CoordinatorConnection:
    """Return a connection to a coordinator, with the settings of its run.

    Attempts are repeated for `wait_s` while the coordinator is not up; a refusal is
    final. `key` and `nonce` are those of an incarnation that has begun at another
    address.

    Raises:
        Unreachable: no coordinator answers there.
        Refused: it does not know the token, or shows another certificate.
        UsageError: the address, the token or the heartbeat interval is wrong.
    """
    url = security.parse_run_url(run)
    caller, headers = call_to(url, paths, role=security.Role.ISLAND)
    runtime = SystemRuntime(clock)
    try:
        ask = partial(_info, caller, headers, url, paths.certificate)
        info = _within(wait_s, ask, url, runtime)
        heartbeat_s = _heartbeat_s(paths.heartbeat_s, info)
    except BaseException:
        caller.close()
        raise
    log.info(
        "adopted the settings of run %s: fingerprint %s, epoch %d, heartbeat %g s",
        info.run,
        info.settings.fingerprint[:12],
        info.epoch,
        heartbeat_s,
    )
    meter = LinkMeter(runtime)
    line = HttpTransport(
        caller, runtime=runtime, headers=headers, run=info.run, meter=meter
    )
    if key is None:
        key = connection_key(island, run=info.run, paths=paths)
    exchange = CoordinatorExchange(
        line,
        key=key,
        nonce=nonce or secrets.token_bytes(16),
        heartbeat_s=heartbeat_s,
    )
    return CoordinatorConnection(exchange, info, line, meter.metrics)


def connect_read_only(
    run: str, *, paths: CredentialPaths, clock: Clock, wait_s: float = NOT_UP_S
) -> tuple[HttpClient, dict[str, str], Info]:
    """Return an HTTP client for a coordinator, without joining its run.

    Raises what `connect` does.
    """
    url = security.parse_run_url(run)
    caller, headers = call_to(url, paths, role=security.Role.ISLAND)
    try:
        ask = partial(_info, caller, headers, url, paths.certificate)
        info = _within(wait_s, ask, url, SystemRuntime(clock))
        return caller, headers, info
    except BaseException:
        caller.close()
        raise


def wait_until_up(
    caller: HttpClient,
    url: security.RunUrl,
    *,
    certificate: Path | None,
    clock: Clock,
    wait_s: float = NOT_UP_S,
) -> None:
    """Return when a coordinator listens at `url`, before a call that is not repeatable.

    Raises what `connect` does.
    """
    ask = partial(_answer, caller, "/health", {}, url, certificate)
    _within(wait_s, ask, url, SystemRuntime(clock))


class _NotYet(Unreachable):
    """No coordinator is up, but one may come up; the cause is the transport error."""


def _within(
    wait_s: float, ask: Callable[[], T], url: security.RunUrl, runtime: Runtime
) -> T:
    """Repeat `ask` until a coordinator is up, for `wait_s` at most."""
    until_s = runtime.now_s() + wait_s

    def may_retry(fault: Exception, pause_s: float) -> bool:
        goes_on = isinstance(fault, _NotYet) and runtime.now_s() + pause_s <= until_s
        if goes_on and pause_s == NOT_UP.first_s:
            log.warning("retrying %s for %g s: %s", url, wait_s, fault)
        return goes_on

    try:
        return retried(ask, NOT_UP, sleep=runtime.sleep, may_retry=may_retry)
    except _NotYet as exc:
        message = f"{exc} Atoll has retried for {wait_s:g} s."
        raise Unreachable(message) from exc.__cause__


def _info(
    caller: HttpClient,
    headers: dict[str, str],
    url: security.RunUrl,
    certificate: Path | None,
) -> Info:
    return parse_info(_answer(caller, "/info", headers, url, certificate).body)


def _answer(
    caller: HttpClient,
    target: str,
    headers: dict[str, str],
    url: security.RunUrl,
    certificate: Path | None,
) -> HttpReply:
    """Return a reply of status 200; raise `_NotYet` if a coordinator may come up."""
    try:
        reply = caller.call("GET", target, headers=headers, is_repeatable=True)
    except Unreachable as exc:
        refusal = security.certificate_refusal(exc, address=str(url), shown=certificate)
        if refusal is not None:
            raise refusal from exc
        if _may_come_up(exc.__cause__):
            raise _NotYet(str(exc)) from exc
        raise
    if reply.status in (401, 403):
        raise Refused(str(reply.json().get("message", "The token was refused.")))
    if reply.status in BUSY:
        raise _NotYet(f"{url} answers {reply.status}. Is a coordinator there?")
    if reply.status != 200:
        raise Unreachable(f"{url} answers {reply.status}. Is a coordinator there?")
    return reply


def _may_come_up(error: BaseException | None) -> bool:
    """Return whether a retry can succeed once a coordinator is up.

    Not if the host name is unknown, the peer has no TLS, or the peer accepts and then
    sends nothing.
    """
    if isinstance(error, ConnectionBroken):
        return error.is_unanswered
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN
    if isinstance(error, ssl.SSLError):
        return isinstance(error, ssl.SSLEOFError)
    return isinstance(error, OSError) and not isinstance(error, TimeoutError)


def call_to(
    url: security.RunUrl, paths: CredentialPaths, *, role: security.Role
) -> tuple[HttpClient, dict[str, str]]:
    """Return an HTTP client for a coordinator, and the headers that authorise it.

    Raises:
        UsageError: no token is known for it.
    """
    entry = security.Credentials(paths.credentials).find(str(url))
    token = entry.token(role) if entry else None
    if paths.token_file is not None:
        token = security.read_token(paths.token_file, is_given=True)
    if token is None:
        raise UsageError(
            f"No token is known for {url}. Set ATOLL_TOKEN_FILE, or paste an "
            "invitation: `atoll join INVITATION -- COMMAND`."
        )
    pin = entry.pin if entry else None
    shown, key = paths.certificate, paths.certificate_key
    if shown is None and entry is not None:
        shown, key = entry.certificate, None
    tls = security.calling_context(pin, certificate=shown, key=key)
    caller = HttpClient(
        url.address.host,
        url.address.port,
        timeout_s=SILENCE_S,
        connect_timeout_s=CONNECT_S,
        tls=tls if url.has_tls else None,
        pin=pin if url.has_tls else None,
    )
    return caller, {"Authorization": security.authorization(token)}


def _heartbeat_s(given_s: float | None, info: Info) -> float:
    if given_s is None:
        return info.heartbeat_s
    if not 0.0 < given_s <= info.lease_s / 2:
        raise UsageError(
            f"ATOLL_HEARTBEAT_S={given_s:g} does not keep a lease of {info.lease_s:g} "
            f"s: two heartbeats must fit. Give at most {info.lease_s / 2:g}, or unset "
            "it."
        )
    return given_s


class CollectiveConnection:
    """A collective's exchange, and this rank's own connection to the coordinator.

    Raises:
        AtollError: the errors of `connect`. All other ranks raise then, too.
    """

    def __init__(
        self,
        run: CollectiveRun,
        *,
        island: str | None,
        paths: CredentialPaths,
        clock: Clock,
        key: bytes | None = None,
    ) -> None:
        self._run = run
        if key is None and island is None:
            # An island that is named by the run has no key on this machine.
            key = secrets.token_bytes(32)
        try:
            self._connection = connect(
                run.url,
                island=island,
                paths=paths,
                clock=clock,
                key=key,
            )
        except AtollError as exc:
            run.fail(f"A rank of the collective cannot reach the run: {exc}")
            raise
        self.exchange = run.attach(self._connection.exchange)

    def costs(self) -> dict[str, float]:
        """Return the traffic between the ranks and the link, as loggers see them."""
        return {**self._run.costs(), **self._connection.costs()}

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Bound the time that leaving takes, and close the connection after it."""
        with self._connection.leaving():
            yield
