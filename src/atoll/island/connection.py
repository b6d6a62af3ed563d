"""The connection of an island to a coordinator: address, credentials, timeouts.

A connection waits until the coordinator is up. Ranks of a collective share an exchange,
and each has its own connection to the coordinator.
"""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from atoll.clock import Clock
from atoll.errors import AtollError, Refused, Unreachable, UsageError
from atoll.exchange import CollectiveRun, CoordinatorExchange
from atoll.exchange.api import Info, parse_info
from atoll.exchange.over_http import HttpLine
from atoll.http import HttpClient, HttpReply
from atoll.http.client import ConnectionBroken
from atoll.island.environment import CredentialPaths
from atoll.island.identity import life_key
from atoll.security import (
    Credentials,
    Role,
    RunUrl,
    authorization,
    calling_context,
    certificate_refusal,
    parse_run_url,
    read_token,
)

CONNECT_S, SILENCE_S = 10.0, 30.0
"""How long a coordinator may take to accept, and to say anything at all."""

REACH_S = 60.0
"""How long a coordinator that is not there yet is asked again: it restarts, or comes up
after its islands."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""Between two attempts; doubled each time."""

NOT_YET = (502, 503, 504)
"""How something in between answers for a coordinator that is not there."""

LEAVE_S = 20.0
"""How long an island that leaves waits for a coordinator that does not answer: who has
sent SIGTERM often kills 30 s later, and a loop may take 5 s to heed it."""

log = logging.getLogger("atoll")
T = TypeVar("T")


def is_coordinator(run: str) -> bool:
    """Return whether a run's name is the address of a coordinator."""
    return run.startswith(("http://", "https://"))


@dataclass(frozen=True)
class CoordinatorConnection:
    """A line to a run, and the exchange that goes over it."""

    exchange: CoordinatorExchange
    info: Info
    _line: HttpLine

    @property
    def costs(self) -> Callable[[], dict[str, float]]:
        """Nobody asks a price for requests to a coordinator."""
        return dict

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Bound the time of a farewell, and close the line after it."""
        self._line.give_up_after(LEAVE_S)
        try:
            yield
        finally:
            self._line.close()

    def close(self) -> None:
        """Say nothing more here. Safe to repeat."""
        self._line.close()


def connect(
    run: str,
    *,
    island: str | None,
    surroundings: CredentialPaths,
    clock: Clock,
    wait_s: float = REACH_S,
    key: bytes | None = None,
    nonce: bytes | None = None,
) -> CoordinatorConnection:
    """Return the way to a coordinator, which has said what its run is.

    One that is not there yet is asked again for `wait_s`; one that is there and
    refuses is not. `key` and `nonce` are those of a life that has begun elsewhere.

    Raises:
        Unreachable: nobody answers there.
        Refused: it does not know the token, or shows another certificate.
        UsageError: the address, the token or the heartbeat interval is wrong.
    """
    url = parse_run_url(run)
    caller, headers = call_to(url, surroundings, role=Role.ISLAND)
    try:
        ask = partial(_info, caller, headers, url, surroundings.certificate)
        info = _within(wait_s, ask, url, clock)
        heartbeat_s = _heartbeat_s(surroundings.heartbeat_s, info)
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
    line = HttpLine(caller, clock=clock, headers=headers, run=info.run)
    if key is None:
        key = life_key(island, run=info.run, surroundings=surroundings)
    exchange = CoordinatorExchange(
        line,
        key=key,
        nonce=nonce or secrets.token_bytes(16),
        heartbeat_s=heartbeat_s,
    )
    return CoordinatorConnection(exchange, info, line)


def connect_read_only(
    run: str, *, surroundings: CredentialPaths, clock: Clock, wait_s: float = REACH_S
) -> tuple[HttpClient, dict[str, str], Info]:
    """Return a caller of a coordinator, for who does not join its run.

    Raises what `connect` does.
    """
    url = parse_run_url(run)
    caller, headers = call_to(url, surroundings, role=Role.ISLAND)
    try:
        ask = partial(_info, caller, headers, url, surroundings.certificate)
        info = _within(wait_s, ask, url, clock)
        return caller, headers, info
    except BaseException:
        caller.close()
        raise


def wait_until_up(
    caller: HttpClient,
    url: RunUrl,
    *,
    certificate: Path | None,
    clock: Clock,
    wait_s: float = REACH_S,
) -> None:
    """Return when a coordinator listens at `url`, before a call that is not repeatable.

    Raises what `connect` does.
    """
    ask = partial(_answer, caller, "/health", {}, url, certificate)
    _within(wait_s, ask, url, clock)


class _NotYet(Exception):
    """A coordinator may come up where none is; its cause says what was met."""


def _within(wait_s: float, ask: Callable[[], T], url: RunUrl, clock: Clock) -> T:
    """Ask again and again while no coordinator is there yet."""
    until_s, pause_s = clock.now_s() + wait_s, FIRST_PAUSE_S
    while True:
        try:
            return ask()
        except _NotYet as exc:
            if clock.now_s() + pause_s > until_s:
                said = f"{exc} It was asked for {wait_s:g} s."
                raise Unreachable(said) from exc.__cause__
            if pause_s == FIRST_PAUSE_S:
                log.warning("%s is asked again for %g s: %s", url, wait_s, exc)
        threading.Event().wait(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _info(
    caller: HttpClient, headers: dict[str, str], url: RunUrl, certificate: Path | None
) -> Info:
    return parse_info(_answer(caller, "/info", headers, url, certificate).body)


def _answer(
    caller: HttpClient,
    target: str,
    headers: dict[str, str],
    url: RunUrl,
    certificate: Path | None,
) -> HttpReply:
    """Return a good answer; `_NotYet` says that a coordinator may come up there."""
    try:
        reply = caller.call("GET", target, headers=headers, is_repeatable=True)
    except Unreachable as exc:
        refusal = certificate_refusal(exc, where=str(url), shown=certificate)
        if refusal is not None:
            raise refusal from exc
        if _may_come_up(exc.__cause__):
            raise _NotYet(str(exc)) from exc
        raise
    if reply.status in (401, 403):
        raise Refused(str(reply.json().get("message", "The token was refused.")))
    if reply.status in NOT_YET:
        raise _NotYet(f"{url} answers {reply.status}. Is a coordinator there?")
    if reply.status != 200:
        raise Unreachable(f"{url} answers {reply.status}. Is a coordinator there?")
    return reply


def _may_come_up(met: BaseException | None) -> bool:
    """Return whether a coordinator that starts would answer where this was met.

    Not where a name is unknown, TLS is not spoken, or something else is: who accepts
    and says nothing is not asked again either.
    """
    if isinstance(met, ConnectionBroken):
        return met.is_unanswered
    if isinstance(met, socket.gaierror):
        return met.errno == socket.EAI_AGAIN
    if isinstance(met, ssl.SSLError):
        return isinstance(met, ssl.SSLEOFError)
    return isinstance(met, OSError) and not isinstance(met, TimeoutError)


def call_to(
    url: RunUrl, surroundings: CredentialPaths, *, role: Role
) -> tuple[HttpClient, dict[str, str]]:
    """Return a caller of a coordinator, and the headers that show who calls.

    Raises:
        UsageError: no token is known for it.
    """
    known = Credentials(surroundings.credentials).find(str(url))
    token = known.token(role) if known else None
    if surroundings.token_file is not None:
        token = read_token(surroundings.token_file, is_given=True)
    if token is None:
        raise UsageError(
            f"No token is known for {url}. Set ATOLL_TOKEN_FILE, or paste an "
            "invitation: `atoll join INVITATION -- COMMAND`."
        )
    pin = known.pin if known else None
    shown, key = surroundings.certificate, surroundings.certificate_key
    if shown is None and known is not None:
        shown, key = known.certificate, None
    tls = calling_context(pin, certificate=shown, key=key)
    caller = HttpClient(
        url.address.host,
        url.address.port,
        timeout_s=SILENCE_S,
        connect_timeout_s=CONNECT_S,
        tls=tls if url.has_tls else None,
        pin=pin if url.has_tls else None,
    )
    return caller, {"Authorization": authorization(token)}


def _heartbeat_s(given_s: float | None, info: Info) -> float:
    if given_s is None:
        return info.heartbeat_s
    if not 0.0 < given_s <= info.lease_s / 2:
        raise UsageError(
            f"ATOLL_HEARTBEAT_S={given_s:g} does not keep a lease of {info.lease_s:g} "
            f"s: two heartbeats must fit. Give at most {info.lease_s / 2:g}, or leave "
            "it to the run."
        )
    return given_s


class CollectiveConnection:
    """A collective's exchange, and this rank's own line to the coordinator.

    Raises:
        AtollError: what `connect` raises. The other ranks are told, and raise too.
    """

    def __init__(
        self,
        run: CollectiveRun,
        *,
        island: str | None,
        surroundings: CredentialPaths,
        clock: Clock,
        key: bytes | None = None,
    ) -> None:
        self._run = run
        if key is None and island is None:
            # Whoever is named by the run has no key of its own on this machine.
            key = secrets.token_bytes(32)
        try:
            self._way = connect(
                run.url,
                island=island,
                surroundings=surroundings,
                clock=clock,
                key=key,
            )
        except AtollError as exc:
            run.fail(f"A rank of the collective cannot reach the run: {exc}")
            raise
        self.exchange = run.attach(self._way.exchange)

    def costs(self) -> dict[str, float]:
        """Return what went between the ranks, under the names that loggers see."""
        return self._run.costs()

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Bound the time of a farewell, and close the line after it."""
        with self._way.leaving():
            yield
