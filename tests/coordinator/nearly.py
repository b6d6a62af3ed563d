"""Requests that are nearly right: each route's own, and ways to spoil it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from atoll.exchange.api import EncodedRequest, to_request
from atoll.exchange.calls import Call
from atoll.http.request import parse_target
from atoll.routes import Route, find_route
from atoll.wire.digests import view_of
from tests.coordinator.serving import proof_of

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "get")
PARTS = (
    *("", ".", "..", "%2e%2e", "%2F", "%5c", "%00", "%zz", "%ff", "a%0d%0ab", "+", "*"),
    *("0", "1", "2", "7", "-1", "01", "1e3", "4294967296", "18446744073709551616"),
    *("a", "b", "ghost", "outcome", "stop", "pause", "x" * 300, "%C3%A9", "\u00e9"),
)
QUERIES = (
    *("", "wait_s=0", "wait_s=-1", "wait_s=nan", "wait_s=99", "wait_s=0&wait_s=0"),
    *("island=a", "incarnation=1", "island=a&incarnation=1", "incarnation=x"),
    *("first=0", "first=-1", "island=a&incarnation=1&first=0"),
    *("after=0", "after=x", "after=-1", "x=1", "=", "&", "%zz=1", "a=%ff", "?"),
    "&".join(f"k{number}=1" for number in range(40)),
)
HEADERS = {
    "authorization": ("", "Bearer", "Bearer x", "Basic eDp4", "Bearer " + "x" * 9000),
    "atoll-protocol": ("", "0", "1", "3", "2, 2", "\u00b2"),
    "atoll-island-proof": ("", "1", f"1 {'0' * 64}", f"2 {'0' * 64}", "x" * 9000),
    "atoll-run": ("", "another", "%zz", "%ff"),
    "atoll-beat": ("", "{}", "[" * 5000, "\u00ff", '{"island":"a"}', "x" * 20000),
    "content-type": (
        "",
        "text/html",
        "application/json",
        "application/vnd.atoll.frame",
    ),
    "content-length": ("", "-1", "x", "1", "99", "10737418240", "9" * 30, "1, 1"),
    "transfer-encoding": ("chunked", "gzip", "identity"),
    "expect": ("100-continue", "magic"),
    "range": ("bytes=0-", "bytes=5-2", "bytes=-3", "bytes=x", "lines=1-"),
    "if-range": ('"0"', "x"),
    "connection": ("close", "keep-alive", "upgrade"),
}
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**63, 2**64, 10**400, 0.5, 1e308, "", "a", "\ud800"),
    *([], [[]], {}, {"a": 1}, "x" * 2000),
)


@dataclass(frozen=True)
class Asking:
    """A request, as it is put on the line."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def target(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path

    @property
    def declared(self) -> str:
        """What the head says of the body's length."""
        said = [value for name, value in self.headers if name == "content-length"]
        return said[0] if said else str(len(self.body))

    def to_bytes(self) -> bytes:
        headers = dict(self.headers) | {"content-length": self.declared}
        lines = [
            f"{self.method} {self.target} HTTP/1.1",
            "host: here",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        head = "\r\n".join(lines) + "\r\n\r\n"
        return head.encode("latin-1", "replace") + self.body

    def saying(self, name: str, value: str | None) -> Asking:
        """Return it with a header set, or without it."""
        others = tuple(each for each in self.headers if each[0] != name)
        return replace(
            self, headers=others if value is None else (*others, (name, value))
        )


def of_call(call: Call, token: str, *, run: str) -> Asking:
    """Return what an island asks whose key is its name."""
    return of_sent(to_request(call, proof=proof_of(call, run)), token)


def of_sent(sent: EncodedRequest, token: str) -> Asking:
    path, _, query = sent.target.partition("?")
    headers = {name.lower(): value for name, value in sent.headers.items()}
    return Asking(
        method=sent.method,
        path=path,
        query=query,
        headers=(*headers.items(), ("authorization", token)),
        body=b"".join(view_of(part).tobytes() for part in sent.body),
    )


def of_operator(
    method: str, path: str, token: str, said: object = None, query: str = ""
) -> Asking:
    """Return what an operator asks."""
    return Asking(
        method=method,
        path=path,
        query=query,
        headers=(("authorization", token),),
        body=b"" if said is None else json.dumps(said).encode(),
    )


def route_of(asking: Asking) -> Route:
    """Return the row of the table that a request finds."""
    segments, _ = parse_target(asking.target, max_path_bytes=2048)
    return find_route(asking.method, segments).route


def nearly(samples: list[Asking]) -> st.SearchStrategy[Asking]:
    """Return requests that differ from a right one in a few things."""

    @st.composite
    def draw_one(draw: st.DrawFn) -> Asking:
        asking = draw(st.sampled_from(samples))
        for _ in range(draw(st.integers(0, 3))):
            asking = draw(st.sampled_from(SPOILING))(asking, draw)
        return asking

    return draw_one()


def _method(asking: Asking, draw: st.DrawFn) -> Asking:
    return replace(asking, method=draw(st.sampled_from(METHODS)))


def _part(asking: Asking, draw: st.DrawFn) -> Asking:
    parts = asking.path.split("/")
    parts[draw(st.integers(1, len(parts) - 1))] = draw(st.sampled_from(PARTS))
    return replace(asking, path="/".join(parts))


def _longer(asking: Asking, draw: st.DrawFn) -> Asking:
    part = draw(st.sampled_from(PARTS) | st.text("abc%./\\", max_size=8))
    return replace(asking, path=f"{asking.path}/{part}")


def _shorter(asking: Asking, draw: st.DrawFn) -> Asking:
    return replace(asking, path=asking.path.rpartition("/")[0] or "/")


def _query(asking: Asking, draw: st.DrawFn) -> Asking:
    return replace(asking, query=draw(st.sampled_from(QUERIES)))


def _header(asking: Asking, draw: st.DrawFn) -> Asking:
    name = draw(st.sampled_from(sorted(HEADERS)))
    return asking.saying(name, draw(st.none() | st.sampled_from(HEADERS[name])))


def _flip(asking: Asking, draw: st.DrawFn) -> Asking:
    if not asking.body:
        return asking
    body = bytearray(asking.body)
    body[draw(st.integers(0, len(body) - 1))] ^= draw(st.integers(1, 255))
    return replace(asking, body=bytes(body))


def _cut(asking: Asking, draw: st.DrawFn) -> Asking:
    return replace(asking, body=asking.body[: draw(st.integers(0, len(asking.body)))])


def _grow(asking: Asking, draw: st.DrawFn) -> Asking:
    return replace(asking, body=asking.body + draw(st.binary(min_size=1, max_size=40)))


def _other(asking: Asking, draw: st.DrawFn) -> Asking:
    texts = (b"{", b"[" * 3000, b"null", b"{}", b"NaN", b'{"a":1,"a":1}', b"\xff" * 9)
    return replace(asking, body=draw(st.sampled_from(texts) | st.binary(max_size=200)))


def _form(asking: Asking, draw: st.DrawFn) -> Asking:
    """Alter one value of a form, drop it, or add one."""
    try:
        said = json.loads(asking.body)
    except (ValueError, RecursionError):
        return asking
    if not isinstance(said, dict) or not said:
        return asking
    key = draw(st.sampled_from([*sorted(said), "unknown"]))
    if draw(st.booleans()):
        said[key] = draw(st.sampled_from(VALUES))
    else:
        said.pop(key, None)
    return replace(asking, body=json.dumps(said).encode())


SPOILING: tuple[Callable[[Asking, st.DrawFn], Asking], ...] = (
    *(_method, _part, _longer, _shorter, _query, _header, _header),
    *(_flip, _cut, _grow, _other, _form, _form),
)
