"""A body that breaks off goes on: what has come is not sent again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise

import pytest

from atoll.errors import CorruptError, Unreachable
from atoll.http import (
    Download,
    HttpClient,
    HttpReply,
    Request,
    Response,
    download,
    ranged,
)
from atoll.http.client import at_most
from atoll.http.server import Handle
from atoll.retry import BROKEN_BODY
from atoll.testing import Link
from tests.http.certificates import Certificate, unchecked
from tests.http.loopback import PATIENCE_S, listening
from tests.http.test_client import caller_of, scripted

DATA = os.urandom(4_000_000)
HEADS_BYTES = 1000
"""More than all heads of a test take that come down."""

PART = b'HTTP/1.1 200 OK\r\netag: "a"\r\ncontent-length: 10\r\n\r\n0123'


def give(request: Request) -> Response:
    return ranged(request, [memoryview(DATA)], etag="a")


@contextmanager
def through_link(
    handle: Handle = give, certificate: Certificate | None = None
) -> Iterator[tuple[Link, HttpClient]]:
    """Call a listener through a link that can break."""
    shown = certificate.shown() if certificate else None
    pin = certificate.pin if certificate else None
    tls = unchecked() if certificate else None
    with (
        listening(handle, tls=shown) as listener,
        Link(listener.address) as link,
        closing(
            HttpClient(
                *link.address,
                timeout_s=PATIENCE_S,
                connect_timeout_s=PATIENCE_S,
                tls=tls,
                pin=pin,
            )
        ) as caller,
    ):
        yield link, caller


def get(caller: HttpClient, fetching: Download) -> HttpReply:
    return caller.call("GET", "/", fetching=fetching)


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "tls"])
def test_it_goes_on_where_it_broke(
    is_encrypted: bool, certificate: Certificate
) -> None:
    """The reply is as if nothing had happened, and only heads came twice.

    Encrypted, a record of 16 KiB may break in its middle; its first half is lost.
    """
    shown = certificate if is_encrypted else None
    with through_link(certificate=shown) as (link, caller):
        caller.call("GET", "/", headers={"range": "bytes=0-0"})  # shake hands before
        before = link.bytes_down  # at most too small by that answer
        link.close_after(2_500_000, direction="down")
        fetching = Download()
        with pytest.raises(Unreachable, match="early"):
            get(caller, fetching)
        came = fetching.filled_bytes
        reply = get(caller, fetching)
    sent = link.bytes_down - before  # known for sure when the link has ended

    assert 2_400_000 < came <= 2_500_000
    assert (reply.status, reply.headers["content-length"]) == (200, "4000000")
    assert bytes(reply.body) == DATA
    extra = 40_000 if is_encrypted else HEADS_BYTES
    assert len(DATA) < sent < len(DATA) + extra


def test_it_may_break_again_and_again() -> None:
    """Each part is asked for once, and progress is told of the whole, never back."""
    told: list[tuple[int, int]] = []
    paused: list[float] = []
    with through_link() as (link, caller):

        def pause(seconds: float) -> None:
            paused.append(seconds)
            if len(paused) < 5:
                link.close_after(500_000, direction="down")

        link.close_after(500_000, direction="down")
        fetching = Download(progress=lambda *said: told.append(said))
        reply = download(lambda: get(caller, fetching), fetching, sleep=pause)

    assert bytes(reply.body) == DATA
    assert paused == [0.2] * 5
    assert len(DATA) < link.bytes_down < len(DATA) + 6 * HEADS_BYTES
    assert {total for _, total in told} == {len(DATA)}
    assert all(before < after for (before, _), (after, _) in pairwise(told))
    assert told[-1][0] == len(DATA)


def test_tries_are_bounded_and_wait_longer_if_nothing_comes() -> None:
    """Nobody listens any more: what has come is kept, and the caller decides."""
    paused: list[float] = []
    fetching = Download()
    with scripted(PART) as (port, _):
        caller = caller_of(port)
        with pytest.raises(Unreachable):
            get(caller, fetching)
    with closing(caller), pytest.raises(Unreachable, match="did not answer"):
        download(lambda: get(caller, fetching), fetching, sleep=paused.append)

    assert fetching.filled_bytes == 4
    assert paused[:6] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0]
    assert len(paused) + 1 == BROKEN_BODY.max_tries


def test_another_body_comes_from_its_start() -> None:
    """What has become another since is not mixed with what came before."""
    bodies = iter([(DATA, "a"), (DATA[::-1], "b")])

    def change(request: Request) -> Response:
        body, etag = next(bodies)
        return ranged(request, [memoryview(body)], etag=etag)

    with through_link(change) as (link, caller):
        link.close_after(1_000_000, direction="down")
        fetching = Download()
        reply = download(lambda: get(caller, fetching), fetching, sleep=lambda _: None)

    assert reply.status == 200
    assert bytes(reply.body) == DATA[::-1]


@pytest.mark.parametrize("etag", [None, 'W/"a"'])
def test_a_body_that_has_no_name_is_not_gone_on_with(etag: str | None) -> None:
    """Without a strong ETag nobody knows whether the rest is of the same body."""
    said = f"etag: {etag}\r\n" if etag else ""
    answer = f"HTTP/1.1 200 OK\r\n{said}content-length: 10\r\n\r\n0123".encode()
    fetching = Download()
    with scripted(answer, answer) as (port, seen), closing(caller_of(port)) as caller:
        for _ in range(2):
            with pytest.raises(Unreachable):
                download(lambda: get(caller, fetching), fetching, sleep=lambda _: None)

    assert not fetching.can_resume
    assert all(b"range" not in seen.get() for _ in range(2))


def test_an_answer_of_its_own_leaves_what_has_come() -> None:
    """An error in between is returned, and the body goes on after it."""
    busy = (
        b"HTTP/1.1 503 Busy\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: 2\r\n\r\n{}"
    )
    rest = (
        b'HTTP/1.1 206 Partial Content\r\netag: "a"\r\ncontent-length: 6\r\n'
        b"content-range: bytes 4-9/10\r\n\r\n456789"
    )
    fetching = Download()
    with (
        scripted(PART, busy, rest) as (port, seen),
        closing(caller_of(port)) as caller,
    ):
        with pytest.raises(Unreachable):
            get(caller, fetching)
        refusal = get(caller, fetching)
        reply = get(caller, fetching)
    heads = [seen.get() for _ in range(3)]

    assert (refusal.status, refusal.json()) == (503, {})
    assert (reply.status, bytes(reply.body)) == (200, b"0123456789")
    assert b"range" not in heads[0]
    assert b'range: bytes=4-\r\nif-range: "a"' in heads[2]


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ('content-range: bytes 3-9/10\r\netag: "a"', b"3456789"),
        ('content-range: bytes 4-9/11\r\netag: "a"', b"456789"),
        ('content-range: bytes 4-9/10\r\netag: "b"', b"456789"),
        ('content-range: bytes 4-8/10\r\netag: "a"', b"45678"),
        ('etag: "a"', b"456789"),
    ],
)
def test_another_part_than_the_rest_is_corrupt(headers: str, body: bytes) -> None:
    """It is not put behind what came; the next call asks for all of it."""
    part = f"HTTP/1.1 206 Partial\r\n{headers}\r\ncontent-length: {len(body)}\r\n\r\n"
    fetching = Download()
    with (
        scripted(PART, part.encode() + body, PART) as (port, seen),
        closing(caller_of(port)) as caller,
    ):
        with pytest.raises(Unreachable):
            get(caller, fetching)
        with pytest.raises(CorruptError, match="bytes 4-9/10"):
            get(caller, fetching)
        with pytest.raises(Unreachable):
            get(caller, fetching)
    heads = [seen.get() for _ in range(3)]

    assert b"range" not in heads[2]


def test_a_body_that_is_too_large_is_not_taken() -> None:
    """Nothing is set aside for it, and both sizes are named."""
    fetching = Download(at_most(4, "the bundle"))

    assert len(fetching.begin(200, {}, 4)) == 4
    with pytest.raises(
        CorruptError, match="5 bytes would be sent of the bundle, and at most 4"
    ):
        fetching.begin(200, {}, 5)
