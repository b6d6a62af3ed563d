"""The way from an island to a coordinator: whom to ask, what to show, how long."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from atoll.clock import Clock
from atoll.errors import Refused, Unreachable, UsageError
from atoll.exchange import CoordinatorExchange
from atoll.exchange.forms import Info, parse_info
from atoll.exchange.over_http import HttpLine
from atoll.http import Caller
from atoll.island.environment import Surroundings
from atoll.island.keys import island_key
from atoll.security import (
    Credentials,
    Role,
    RunUrl,
    authorization,
    calling_context,
    parse_run_url,
    read_token,
)

CONNECT_S, SILENCE_S = 10.0, 30.0
"""How long a coordinator may take to accept, and to say anything at all."""

LEAVE_S = 20.0
"""How long an island that leaves waits for a coordinator that does not answer: who has
sent SIGTERM often kills 30 s later, and a loop may take 5 s to heed it."""

log = logging.getLogger("atoll")


def is_coordinator(run: str) -> bool:
    """Return whether a run's name is the address of a coordinator."""
    return run.startswith(("http://", "https://"))


@dataclass(frozen=True)
class Way:
    """A line to a run, and the exchange that goes over it."""

    exchange: CoordinatorExchange
    info: Info
    _line: HttpLine

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Bound the time of a farewell, and close the line after it."""
        self._line.give_up_after(LEAVE_S)
        try:
            yield
        finally:
            self._line.close()


def reach(
    run: str, *, island: str | None, surroundings: Surroundings, clock: Clock
) -> Way:
    """Return the way to a coordinator, which has said what its run is.

    Raises:
        Unreachable: nobody answers there.
        Refused: it does not know the token, or shows another certificate.
        UsageError: the address, the token or the heartbeat interval is wrong.
    """
    url = parse_run_url(run)
    caller, headers = call_to(url, surroundings, role=Role.ISLAND)
    try:
        info = _info(caller, headers, url)
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
    key = secrets.token_bytes(32)
    if island is not None:
        key = island_key(surroundings.keys, run=info.run, island=island)
    exchange = CoordinatorExchange(
        line, key=key, nonce=secrets.token_bytes(16), heartbeat_s=heartbeat_s
    )
    return Way(exchange, info, line)


def _info(caller: Caller, headers: dict[str, str], url: RunUrl) -> Info:
    reply = caller.call("GET", "/info", headers=headers, is_repeatable=True)
    if reply.status in (401, 403):
        raise Refused(str(reply.json().get("message", "The token was refused.")))
    if reply.status != 200:
        raise Unreachable(f"{url} answers {reply.status}. Is a coordinator there?")
    return parse_info(reply.body)


def call_to(
    url: RunUrl, surroundings: Surroundings, *, role: Role
) -> tuple[Caller, dict[str, str]]:
    """Return a caller of a coordinator, and the headers that show who calls.

    Raises:
        UsageError: no token is known for it.
    """
    known = Credentials(surroundings.credentials).find(str(url))
    token = known.token(role) if known else None
    if surroundings.token_file is not None:
        token = read_token(surroundings.token_file)
    if token is None:
        raise UsageError(
            f"No token is known for {url}. Set ATOLL_TOKEN_FILE, or paste an "
            "invitation: `atoll join INVITATION -- COMMAND`."
        )
    pin = known.pin if known else None
    tls = calling_context(
        pin,
        certificate=surroundings.certificate,
        key=surroundings.certificate_key,
    )
    caller = Caller(
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
