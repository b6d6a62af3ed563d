"""Who may do what: where a coordinator may listen, and which role each route needs.

Rule 1: `/health` alone is open, and a code's exchange, which brings its own proof.
Rule 2: a path that is not exactly one of ROUTES is for operators only, so a route that
somebody forgets to list here is closed, and no spelling of a path opens another.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from atoll.errors import UsageError
from atoll.security.addresses import is_loopback
from atoll.security.tokens import Role


class Need(enum.Enum):
    """What a request must bring."""

    NOTHING = "nothing"
    CODE = "code"
    ISLAND = "island"
    OPERATOR = "operator"

    @property
    def role(self) -> Role | None:
        """The role that is needed, for `tokens.require`; None if none is."""
        return {Need.ISLAND: Role.ISLAND, Need.OPERATOR: Role.OPERATOR}.get(self)


@dataclass(frozen=True)
class Route:
    """One row of the table: a method, a path with {names} in it, and its need."""

    method: str
    path: str
    need: Need

    @property
    def name(self) -> str:
        """The route as one text, without anything that a caller wrote."""
        return f"{self.method} {self.path}"


ROUTES = (
    Route("GET", "/health", Need.NOTHING),
    Route("GET", "/info", Need.ISLAND),
    Route("GET", "/status", Need.ISLAND),
    Route("GET", "/metrics", Need.ISLAND),
    Route("GET", "/events", Need.ISLAND),
    Route("POST", "/islands", Need.ISLAND),
    Route("POST", "/islands/{island}", Need.ISLAND),
    Route("POST", "/islands/{island}/heartbeat", Need.ISLAND),
    Route("DELETE", "/islands/{island}", Need.ISLAND),
    Route("PUT", "/fragments/{f}/rounds/{n}/updates/{island}", Need.ISLAND),
    Route("POST", "/fragments/{f}/rounds/{n}/offers/{island}", Need.ISLAND),
    Route("POST", "/fragments/{f}/rounds/{n}/agreed", Need.ISLAND),
    Route("GET", "/fragments/{f}/rounds/{n}/outcome", Need.ISLAND),
    Route("GET", "/state/{fragment}", Need.ISLAND),
    Route("POST", "/state/{fragment}", Need.ISLAND),
    Route("GET", "/anchor", Need.ISLAND),
    Route("POST", "/anchor", Need.ISLAND),
    Route("GET", "/constants", Need.ISLAND),
    Route("GET", "/constants/{digest}", Need.ISLAND),
    # Only from who founds the run: the coordinator sees to that.
    Route("PUT", "/constants/{digest}", Need.ISLAND),
    Route("GET", "/bundle", Need.ISLAND),
    Route("GET", "/code", Need.OPERATOR),
    Route("GET", "/code/{digest}", Need.ISLAND),
    # Every island runs that code: who puts it there commands them all.
    Route("PUT", "/code/{digest}", Need.OPERATOR),
    Route("POST", "/control/{action}", Need.OPERATOR),
    # Digests of islands' keys, and what nobody is left to publish again.
    Route("GET", "/belongings", Need.OPERATOR),
    Route("GET", "/belongings/{f}/{n}/{island}", Need.OPERATOR),
    Route("POST", "/invites", Need.OPERATOR),
    Route("POST", "/invites/redeem", Need.CODE),
)

UNLISTED = Route("*", "*", Need.OPERATOR)
"""Stands for every request that no row describes."""


def route_of(method: str, path: str) -> Route:
    """Return the row for a request's path as it came, without its query."""
    asked = "GET" if method == "HEAD" else method
    for route, pattern in _PATTERNS:
        if route.method == asked and pattern.fullmatch(path):
            return route
    return UNLISTED


def needed_role(method: str, path: str) -> Role | None:
    """Return the role that a request needs; None if it needs no token."""
    return route_of(method, path).need.role


def require_safe_listening(host: str, *, has_tls: bool) -> None:
    """Return if a coordinator may listen at `host`; empty means every interface.

    Raises:
        UsageError: others could reach it, and tokens would travel in the open.
    """
    if has_tls or is_loopback(host):
        return
    raise UsageError(
        f"Listening at {host[:64] or 'every interface'!r} without TLS would let tokens "
        "travel in the open. Listen with TLS, or at 127.0.0.1 only."
    )


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{\w+\}", "[^/]+", path))


_PATTERNS = tuple((route, _pattern(route.path)) for route in ROUTES)
