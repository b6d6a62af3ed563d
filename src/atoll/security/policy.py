"""Access rules: the role that each route needs, and safe addresses to listen at.

Rule 1: only `/health` is open, and the redemption of a code, which is its own proof.
Rule 2: a path that is not exactly one of ROUTES is for operators only, so a route that
is missing here is closed, and no spelling of a path opens another.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from atoll.errors import UsageError
from atoll.security.addresses import is_loopback
from atoll.security.tokens import Role


class Requirement(enum.Enum):
    """The proof that a request needs."""

    NO_PROOF = "nothing"
    CODE = "code"
    ISLAND = "island"
    OPERATOR = "operator"

    @property
    def role(self) -> Role | None:
        """The role that is needed, for `tokens.require`; None if none is."""
        return {
            Requirement.ISLAND: Role.ISLAND,
            Requirement.OPERATOR: Role.OPERATOR,
        }.get(self)


@dataclass(frozen=True)
class RouteRule:
    """One row of the table: a method, a path with {names} in it, and its need."""

    method: str
    path: str
    need: Requirement

    @property
    def name(self) -> str:
        """The route as one text, without anything that a caller wrote."""
        return f"{self.method} {self.path}"


ROUTES = (
    RouteRule("GET", "/health", Requirement.NO_PROOF),
    RouteRule("GET", "/info", Requirement.ISLAND),
    RouteRule("GET", "/status", Requirement.ISLAND),
    RouteRule("GET", "/metrics", Requirement.ISLAND),
    RouteRule("GET", "/events", Requirement.ISLAND),
    RouteRule("POST", "/islands", Requirement.ISLAND),
    RouteRule("POST", "/islands/{island}", Requirement.ISLAND),
    RouteRule("POST", "/islands/{island}/heartbeat", Requirement.ISLAND),
    RouteRule("DELETE", "/islands/{island}", Requirement.ISLAND),
    RouteRule("PUT", "/fragments/{f}/rounds/{n}/updates/{island}", Requirement.ISLAND),
    RouteRule("POST", "/fragments/{f}/rounds/{n}/offers/{island}", Requirement.ISLAND),
    RouteRule("POST", "/fragments/{f}/rounds/{n}/agreed", Requirement.ISLAND),
    RouteRule("GET", "/fragments/{f}/rounds/{n}/outcome", Requirement.ISLAND),
    RouteRule("GET", "/state/{fragment}", Requirement.ISLAND),
    RouteRule("POST", "/state/{fragment}", Requirement.ISLAND),
    RouteRule("GET", "/anchor", Requirement.ISLAND),
    RouteRule("POST", "/anchor", Requirement.ISLAND),
    RouteRule("GET", "/constants", Requirement.ISLAND),
    RouteRule("GET", "/constants/{digest}", Requirement.ISLAND),
    # Only from the founder of the run: the coordinator checks that.
    RouteRule("PUT", "/constants/{digest}", Requirement.ISLAND),
    RouteRule("GET", "/bundle", Requirement.ISLAND),
    RouteRule("GET", "/code", Requirement.OPERATOR),
    RouteRule("GET", "/code/{digest}", Requirement.ISLAND),
    # Every island runs that code: its author controls all islands.
    RouteRule("PUT", "/code/{digest}", Requirement.OPERATOR),
    RouteRule("POST", "/control/{action}", Requirement.OPERATOR),
    # Digests of islands' keys, and updates that no island can publish again.
    RouteRule("GET", "/belongings", Requirement.OPERATOR),
    RouteRule("GET", "/belongings/{f}/{n}/{island}", Requirement.OPERATOR),
    RouteRule("POST", "/invites", Requirement.OPERATOR),
    RouteRule("POST", "/invites/redeem", Requirement.CODE),
)

UNLISTED = RouteRule("*", "*", Requirement.OPERATOR)
"""The rule for every request without a row."""


def route_of(method: str, path: str) -> RouteRule:
    """Return the row for the raw path of a request, without its query."""
    effective_method = "GET" if method == "HEAD" else method
    for route, pattern in _PATTERNS:
        if route.method == effective_method and pattern.fullmatch(path):
            return route
    return UNLISTED


def needed_role(method: str, path: str) -> Role | None:
    """Return the role that a request needs; None if it needs no token."""
    return route_of(method, path).need.role


def require_safe_listening(host: str, *, has_tls: bool) -> None:
    """Return if a coordinator may listen at `host`; empty means every interface.

    Raises:
        UsageError: other machines could reach it, and tokens would be unencrypted.
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
