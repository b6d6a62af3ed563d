"""The routes of a coordinator: one table for its clients, its server and its policy.

Rule 1: a row has everything that is decided about a route before its handler runs; the
        handler is the coordinator's method of the row's name.
Rule 2: a path is split at its slashes before its parts are decoded, and is looked up
        once: the row that gives the role is the row that gives the handler.
Rule 3: only `/health` is open, and the redemption of a code, which is its own proof.
Rule 4: a request without a row is for operators only, so that a forgotten route is
        closed.
Rule 5: a call in the name of an island needs a proof of the island's key.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import quote


class BodyKind(enum.StrEnum):
    """The content type of a body."""

    EMPTY = "nothing"
    JSON = "application/json"
    HEADER = "application/vnd.atoll.header"
    FRAME = "application/vnd.atoll.frame"
    FRAMES = "application/vnd.atoll.frames"
    BYTES = "application/octet-stream"
    ARCHIVE = "application/x-tar"


class ProofRule(enum.Enum):
    """When a request must prove that it comes from the island that it names."""

    NEVER = "never"
    """It only reads, or contains the key itself."""

    ALWAYS = "always"
    WITH_BEAT = "with a beat"


class Role(enum.Enum):
    """The rights of the holder of a token."""

    ISLAND = "island"
    OPERATOR = "operator"

    def includes(self, needed: Role) -> bool:
        """Return whether this role has the rights of `needed`."""
        return self is needed or self is Role.OPERATOR


@dataclass(frozen=True)
class Route:
    """One method and path of a coordinator."""

    name: str
    method: str
    path: str
    """A part in braces matches any value."""

    role: Role | None
    """The role that a request needs; None: no token."""

    proof: ProofRule
    body: BodyKind
    query: frozenset[str]
    """The keys that its query may have."""

    is_call: bool
    """Whether it is a call of an island, whose protocol and content type are checked;
    else it is for the tools of people."""

    @property
    def title(self) -> str:
        """The route as one text, without anything that a caller wrote."""
        return f"{self.method} {self.path}"

    @cached_property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.path[1:].split("/"))

    def target(self, *values: str | int, **query: str | float) -> str:
        """Return path and query; `values` replace the parts in braces, in order."""
        remaining = iter(values)
        parts = [
            quote(str(next(remaining)), safe="") if part[0] == "{" else part
            for part in self.parts
        ]
        pairs = "&".join(
            f"{key}={quote(str(value), safe='')}" for key, value in query.items()
        )
        return "/" + "/".join(parts) + (f"?{pairs}" if pairs else "")


def _call(
    name: str,
    method: str,
    path: str,
    proof: ProofRule,
    body: BodyKind = BodyKind.EMPTY,
    query: str = "",
) -> Route:
    keys = frozenset(query.split())
    return Route(name, method, path, Role.ISLAND, proof, body, keys, is_call=True)


def _tool(
    name: str,
    method: str,
    path: str,
    role: Role | None,
    *,
    body: BodyKind = BodyKind.EMPTY,
    query: str = "",
) -> Route:
    keys, never = frozenset(query.split()), ProofRule.NEVER
    return Route(name, method, path, role, never, body, keys, is_call=False)


_NEVER, _ALWAYS, _WITH_BEAT = ProofRule.NEVER, ProofRule.ALWAYS, ProofRule.WITH_BEAT
_JSON, _FRAMES, _ARCHIVE = BodyKind.JSON, BodyKind.FRAMES, BodyKind.ARCHIVE
_ROUND = "/fragments/{fragment}/rounds/{round}"
_SENDER = "island incarnation"

ROUTES = (
    _call("join", "POST", "/islands/{island}", _NEVER, _JSON),
    _call("join_unnamed", "POST", "/islands", _NEVER, _JSON),
    _call("heartbeat", "POST", "/islands/{island}/heartbeat", _ALWAYS, _JSON),
    _call("leave", "DELETE", "/islands/{island}", _ALWAYS, query="incarnation"),
    _call("publish", "PUT", f"{_ROUND}/updates/{{island}}", _ALWAYS, BodyKind.FRAME),
    _call("offer", "POST", f"{_ROUND}/offers/{{island}}", _ALWAYS, BodyKind.HEADER),
    _call("agreed", "POST", f"{_ROUND}/agreed", _ALWAYS, _FRAMES, _SENDER),
    _call("outcome", "GET", f"{_ROUND}/outcome", _WITH_BEAT, query="wait_s body"),
    _call("state", "GET", "/state/{fragment}", _NEVER),
    _call("constants", "GET", "/constants", _NEVER),
    _call("constant", "GET", "/constants/{digest}", _NEVER),
    # Only from the founder of the run: the coordinator checks that.
    _call(
        "keep",
        "PUT",
        "/constants/{digest}",
        _ALWAYS,
        BodyKind.BYTES,
        f"{_SENDER} first",
    ),
    _call("open_data", "POST", "/data", _ALWAYS, _JSON, _SENDER),
    _call("claim", "POST", "/data/claims", _ALWAYS, _JSON, _SENDER),
    _call("found", "POST", "/anchor", _ALWAYS, _FRAMES, _SENDER),
    _call("recover", "POST", "/state/{fragment}", _ALWAYS, _FRAMES, _SENDER),
    # Compares the protocol itself, so that it is readable in every version.
    _tool("info", "GET", "/info", Role.ISLAND),
    _tool("health", "GET", "/health", None),
    _tool("status", "GET", "/status", Role.ISLAND),
    _tool("metrics", "GET", "/metrics", Role.ISLAND),
    _tool(
        "events",
        "GET",
        "/events",
        Role.ISLAND,
        query="after wait process before limit kind island",
    ),
    _tool("history", "GET", "/history", Role.ISLAND, query="after parts columns rows"),
    _tool("anchor", "GET", "/anchor", Role.ISLAND, query="round"),
    _tool("ledger", "GET", "/data/ledger", Role.ISLAND),
    _tool("bundle", "GET", "/bundle", Role.ISLAND),
    _tool("code", "GET", "/code", Role.OPERATOR),
    _tool("fetch_code", "GET", "/code/{digest}", Role.ISLAND),
    # Every island runs that code: its author controls all islands.
    _tool("store_code", "PUT", "/code/{digest}", Role.OPERATOR, body=_ARCHIVE),
    _tool("control", "POST", "/control/{action}", Role.OPERATOR, body=_JSON),
    # Digests of islands' keys.
    _tool("belongings", "GET", "/belongings", Role.OPERATOR),
    _tool("make_invite", "POST", "/invites", Role.OPERATOR),
    _tool("redeem_invite", "POST", "/invites/redeem", None, body=_JSON),
)
ROUTE = {route.name: route for route in ROUTES}

UNLISTED = _tool("unlisted", "*", "*", Role.OPERATOR)
"""The row of every request without one."""


@dataclass(frozen=True)
class RouteMatch:
    """The row of a request, and the values of the parts in braces."""

    route: Route
    values: Mapping[str, str]


def find_route(method: str, segments: tuple[str, ...]) -> RouteMatch:
    """Return the row of a method and the decoded segments of a path, or `UNLISTED`.

    HEAD finds the row of GET, which has its role.
    """
    effective_method = "GET" if method == "HEAD" else method
    for route in _BY_LENGTH.get(len(segments), ()):
        values = _values(route, segments)
        if values is not None and route.method == effective_method:
            return RouteMatch(route, values)
    return RouteMatch(UNLISTED, {})


def methods_of(segments: tuple[str, ...]) -> tuple[str, ...]:
    """Return the methods of a path; none, if it does not exist."""
    routes = _BY_LENGTH.get(len(segments), ())
    return tuple(sorted(r.method for r in routes if _values(r, segments) is not None))


def _values(route: Route, segments: tuple[str, ...]) -> dict[str, str] | None:
    pairs = list(zip(route.parts, segments, strict=True))
    if any(part[0] != "{" and part != segment for part, segment in pairs):
        return None
    return {part[1:-1]: segment for part, segment in pairs if part[0] == "{"}


_BY_LENGTH = {
    length: tuple(route for route in ROUTES if len(route.parts) == length)
    for length in {len(route.parts) for route in ROUTES}
}
