"""Where each call goes: methods, paths and queries, both ways.

A path is cut at its slashes before its parts are decoded, so that no name can reach
another route.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, StrEnum
from urllib.parse import quote, unquote_to_bytes

from atoll.errors import UsageError
from atoll.exchange.forms.fields import require_target_name
from atoll.exchange.forms.text import SEE
from atoll.settings.rules import shown

MAX_TARGET_BYTES = 2048
_BAD_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")


class Takes(StrEnum):
    """What the body of a request is."""

    NOTHING = "nothing"
    JSON = "application/json"
    HEADER = "application/vnd.atoll.header"
    FRAME = "application/vnd.atoll.frame"
    FRAMES = "application/vnd.atoll.frames"
    BYTES = "application/octet-stream"


class Proof(Enum):
    """When a request must prove that it comes from the island that it names."""

    NEVER = "never"
    """It reads only, or brings the key itself."""

    ALWAYS = "always"
    WITH_BEAT = "with a beat"


@dataclass(frozen=True, kw_only=True)
class Route:
    """One thing that can be asked for."""

    name: str
    method: str
    path: tuple[str, ...]
    """Parts; one in braces stands for any value."""

    proof: Proof
    query: frozenset[str] = frozenset()
    takes: Takes = Takes.NOTHING

    def places(self, parts: tuple[str, ...]) -> dict[str, str] | None:
        """Return the values of the parts in braces, or None for another path."""
        if len(parts) != len(self.path):
            return None
        pairs = list(zip(self.path, parts, strict=True))
        if any(each != part for each, part in pairs if each[0] != "{"):
            return None
        return {each[1:-1]: part for each, part in pairs if each[0] == "{"}


def _route(
    name: str,
    method: str,
    path: str,
    *query: str,
    proof: Proof,
    takes: Takes = Takes.NOTHING,
) -> Route:
    return Route(
        name=name,
        method=method,
        path=tuple(path[1:].split("/")),
        proof=proof,
        query=frozenset(query),
        takes=takes,
    )


_ROUND = "/fragments/{fragment}/rounds/{round}"
ROUTES = (
    _route("info", "GET", "/info", proof=Proof.NEVER),
    _route("join", "POST", "/islands/{island}", takes=Takes.JSON, proof=Proof.NEVER),
    _route("join_unnamed", "POST", "/islands", takes=Takes.JSON, proof=Proof.NEVER),
    _route(
        "heartbeat",
        "POST",
        "/islands/{island}/heartbeat",
        takes=Takes.JSON,
        proof=Proof.ALWAYS,
    ),
    _route("leave", "DELETE", "/islands/{island}", "incarnation", proof=Proof.ALWAYS),
    _route(
        "publish",
        "PUT",
        f"{_ROUND}/updates/{{island}}",
        takes=Takes.FRAME,
        proof=Proof.ALWAYS,
    ),
    _route(
        "offer",
        "POST",
        f"{_ROUND}/offers/{{island}}",
        takes=Takes.HEADER,
        proof=Proof.ALWAYS,
    ),
    _route(
        "agreed",
        "POST",
        f"{_ROUND}/agreed",
        "island",
        "incarnation",
        takes=Takes.FRAMES,
        proof=Proof.ALWAYS,
    ),
    _route("outcome", "GET", f"{_ROUND}/outcome", "wait_s", proof=Proof.WITH_BEAT),
    _route("state", "GET", "/state/{fragment}", proof=Proof.NEVER),
    _route(
        "found",
        "POST",
        "/anchor",
        "island",
        "incarnation",
        takes=Takes.FRAMES,
        proof=Proof.ALWAYS,
    ),
    _route("constants", "GET", "/constants", proof=Proof.NEVER),
    _route("constant", "GET", "/constants/{digest}", proof=Proof.NEVER),
    _route(
        "keep",
        "PUT",
        "/constants/{digest}",
        "island",
        "incarnation",
        "first",
        takes=Takes.BYTES,
        proof=Proof.ALWAYS,
    ),
    _route(
        "recover",
        "POST",
        "/state/{fragment}",
        "island",
        "incarnation",
        takes=Takes.FRAMES,
        proof=Proof.ALWAYS,
    ),
)
_BY_NAME = {route.name: route for route in ROUTES}


def methods_of(target: str) -> tuple[str, ...]:
    """Return the methods that a path knows: none, if there is no such path."""
    parts, _ = split_target(target)
    return tuple(
        sorted({each.method for each in ROUTES if each.places(parts) is not None})
    )


def target_of(name: str, *places: str | int, **query: str | float) -> str:
    """Return path and query of a route, its places filled in order.

    Raises:
        UsageError: an island's name is none.
    """
    values = iter(places)
    parts = [
        _encoded(next(values)) if part[0] == "{" else part
        for part in _BY_NAME[name].path
    ]
    said = "&".join(f"{key}={_encoded(value)}" for key, value in query.items())
    return "/" + "/".join(parts) + (f"?{said}" if said else "")


def _encoded(value: str | float) -> str:
    """Return a number, or a name: the only text there is in a target."""
    if isinstance(value, str):
        return quote(require_target_name(value, "island"), safe="")
    return str(value)


def method_of(name: str) -> str:
    """Return the method of a route."""
    return _BY_NAME[name].method


def split_target(target: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the decoded parts of a path, and its query.

    Raises:
        UsageError: it is too long, or not what a target may be.
    """
    if len(target) > MAX_TARGET_BYTES or not target.isascii() or target[:1] != "/":
        raise UsageError(
            f"{shown(target)} is no target: it must start with '/' and be ASCII of at "
            f"most {MAX_TARGET_BYTES} bytes. {SEE}"
        )
    path, _, said = target.partition("?")
    query: dict[str, str] = {}
    for pair in said.split("&") if said else ():
        key, equals, value = pair.partition("=")
        if not equals or key in query:
            raise UsageError(
                f"{shown(pair)} in a query must be key=value, each key once. {SEE}"
            )
        query[key] = decoded(value)
    return tuple(decoded(part) for part in path[1:].split("/")), query


def decoded(part: str) -> str:
    """Return a part of a target as the text it stands for."""
    try:
        if _BAD_ESCAPE.search(part):
            raise ValueError
        return unquote_to_bytes(part).decode()
    except ValueError as exc:
        raise UsageError(
            f"{shown(part)} in a target must be UTF-8 under percent signs. {SEE}"
        ) from exc
