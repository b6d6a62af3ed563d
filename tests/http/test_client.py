"""A caller keeps connections, copies nothing, and says what failed and where."""

from __future__ import annotations

import os
import queue
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.errors import CorruptError, Refused, Unreachable, UsageError
from atoll.http import Download, HttpClient, Request, Response, as_json
from tests.http.certificates import Certificate, make, unchecked
from tests.http.loopback import PATIENCE_S, calling, hello, listening

DATA = os.urandom(1_000_000)
PARTS = [memoryview(DATA)[at : at + 1500] for at in range(0, len(DATA), 1500)]


def echo(request: Request) -> Response:
    return Response(body=request.body.read(2**30))


@contextmanager
def scripted(*answers: bytes | None) -> Iterator[tuple[int, queue.Queue[bytes]]]:
    """Accept connections; on each, take one request and give one answer, then close.

    Without an answer the connection is closed at once.
    """
    seen: queue.Queue[bytes] = queue.Queue()
    door = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        for answer in answers:
            sock, _ = door.accept()
            with sock:
                seen.put(sock.recv(65536) if answer is not None else b"")
                sock.sendall(answer or b"")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield door.getsockname()[1], seen
    finally:
        thread.join(PATIENCE_S)
        door.close()


def caller_of(port: int, **options: float) -> HttpClient:
    patience = {"timeout_s": PATIENCE_S, "connect_timeout_s": PATIENCE_S} | options
    return HttpClient("127.0.0.1", port, **patience)  # type: ignore[arg-type]


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("size", [0, 100, 300_000, len(DATA)])
def test_a_body_goes_and_comes_back(
    size: int, encrypted: bool, certificate: Certificate
) -> None:
    """Bytes or many views are sent; the reply is put where it is wanted."""
    place = bytearray(len(DATA) + 5)
    options = {"tls": unchecked(), "pin": certificate.pin} if encrypted else {}
    shown = certificate.shown() if encrypted else None
    with (
        listening(echo, tls=shown) as listener,
        calling(listener, **options) as caller,
    ):
        whole = caller.call("PUT", "/a", body=DATA[:size])
        reply = caller.call(
            "PUT",
            "/a?b=c",
            body=PARTS,
            fetching=Download(lambda size: memoryview(place)[:size]),
        )

    assert bytes(whole.body) == DATA[:size]
    assert (reply.status, reply.headers["content-length"]) == (200, "1000000")
    assert bytes(reply.body) == place[:-5] == DATA


def test_one_connection_serves_many_calls() -> None:
    """Calls after each other use one connection, large bodies included."""
    with listening(echo) as listener, calling(listener) as caller:
        for _ in range(3):
            caller.call("PUT", "/", body=DATA)
            caller.call("GET", "/")
        assert listener.counts.connections == 1
    counts = listener.counts

    assert caller.bytes_sent == counts.bytes_in > 3 * len(DATA)
    assert caller.bytes_received == counts.bytes_out > 3 * len(DATA)


def test_threads_share_a_caller() -> None:
    """Calls at the same time get their own replies."""
    wrong: queue.Queue[int] = queue.Queue()

    def ask(number: int) -> None:
        for _ in range(20):
            body = str(number).encode() * 1000
            if bytes(caller.call("PUT", "/", body=body).body) != body:
                wrong.put(number)

    with listening(echo) as listener, calling(listener) as caller:
        threads = [threading.Thread(target=ask, args=[n]) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert listener.counts.connections <= 8
    assert wrong.empty()


def test_a_refusal_comes_before_a_large_body_is_sent() -> None:
    """What is refused by its head costs no upload."""

    def refuse(request: Request) -> Response:
        return as_json({"error": "stale"}, status=409)

    with listening(refuse) as listener, calling(listener) as caller:
        place = bytearray(10)
        fetching = Download(lambda _: memoryview(place))
        reply = caller.call("PUT", "/", body=DATA, fetching=fetching)

        assert (reply.status, reply.json()) == (409, {"error": "stale"})
        assert caller.bytes_sent < 1000
        assert place == bytes(10)  # JSON is read, not placed
        assert caller.call("GET", "/").status == 409


def test_progress_is_told() -> None:
    """Received bytes grow to their total."""
    told: list[tuple[int, int]] = []
    with listening(echo) as listener, calling(listener) as caller:
        fetching = Download(progress=lambda *said: told.append(said))
        caller.call("PUT", "/", body=DATA, fetching=fetching)

    total = len(DATA)
    assert told.count((total, total)) == 1
    assert all(moved <= total == of for moved, of in told)


def test_a_kept_connection_that_died_is_replaced() -> None:
    """A listener that has closed a silent connection is simply called again."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    with scripted(answer, answer) as (port, seen):
        caller = caller_of(port)
        assert bytes(caller.call("GET", "/1").body) == b"ok"
        assert (
            bytes(caller.call("PUT", "/2", body=b"x", is_repeatable=True).body) == b"ok"
        )
        caller.close()

    assert [seen.get()[:6], seen.get()[:6]] == [b"GET /1", b"PUT /2"]


@pytest.mark.parametrize("is_repeatable", [True, False])
def test_a_kept_connection_that_dies_under_a_call(is_repeatable: bool) -> None:
    """The call is made again, once, if it may be; else nobody knows what it did."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    door = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        sock, _ = door.accept()
        with sock:
            sock.recv(65536)
            sock.sendall(answer)
            sock.recv(65536)  # the second request, which gets no answer
        if is_repeatable:
            sock, _ = door.accept()
            with sock:
                sock.recv(65536)
                sock.sendall(answer)

    thread = threading.Thread(target=run)
    thread.start()
    caller = caller_of(door.getsockname()[1])
    caller.call("GET", "/")
    if is_repeatable:
        assert caller.call("GET", "/", is_repeatable=True).status == 200
    else:
        with pytest.raises(Unreachable, match="the connection was closed"):
            caller.call("GET", "/")
    caller.close()
    thread.join(PATIENCE_S)
    door.close()


def test_a_call_that_may_have_been_processed_is_not_made_again() -> None:
    """On a new connection nothing is repeated: only the one who asks may do that."""
    with scripted(b"") as (port, seen):
        caller = caller_of(port)
        with pytest.raises(Unreachable, match=rf"127\.0\.0\.1:{port} did not answer"):
            caller.call("PUT", "/", body=b"x", is_repeatable=True)
        caller.close()

    assert seen.qsize() == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000,
    ],
)
def test_what_is_no_whole_reply_is_unreachable(answer: bytes) -> None:
    """Garbage and replies that end early are failures below HTTP."""
    with scripted(answer) as (port, _):
        caller = caller_of(port)
        with pytest.raises(Unreachable, match="Check that it runs"):
            caller.call("GET", "/")
        caller.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nab",
    ],
)
def test_a_reply_without_a_length_is_read(answer: bytes) -> None:
    """Chunks, and a body that ends with its connection, are read as well."""
    with scripted(answer) as (port, _):
        caller = caller_of(port)
        assert bytes(caller.call("GET", "/").body) == b"ab"
        caller.close()


def test_a_reply_that_is_too_long_is_not_read() -> None:
    """The bound holds before memory is taken."""
    with (
        listening(lambda _: Response(body=DATA)) as listener,
        calling(listener, max_reply_bytes=999_999) as caller,
        pytest.raises(CorruptError, match="1000000 bytes; 999999 are allowed"),
    ):
        caller.call("GET", "/")


def test_nobody_there_is_unreachable() -> None:
    """A port that nobody listens on is named, with what to do."""
    with listening() as listener:
        port = listener.address[1]
    with pytest.raises(Unreachable, match=rf":{port} did not answer: .*refused.*Check"):
        caller_of(port).call("GET", "/")


def test_silence_is_unreachable() -> None:
    """A listener that does not answer in time is given up."""
    leave = threading.Event()

    def slow(request: Request) -> Response:
        leave.wait(PATIENCE_S)
        return hello(request)

    with listening(slow) as listener, calling(listener) as caller:
        with pytest.raises(Unreachable, match=r"nothing moved for 0\.1 s"):
            caller.call("GET", "/", timeout_s=0.1)
        leave.set()


def test_closing_ends_a_call_that_waits() -> None:
    """An island that leaves does not wait for an answer."""
    entered, leave = threading.Event(), threading.Event()
    failed: queue.Queue[str] = queue.Queue()

    def slow(request: Request) -> Response:
        entered.set()
        leave.wait(PATIENCE_S)
        return hello(request)

    def ask() -> None:
        try:
            caller.call("GET", "/")
        except Unreachable as exc:
            failed.put(str(exc))

    with listening(slow) as listener, calling(listener) as caller:
        thread = threading.Thread(target=ask)
        thread.start()
        assert entered.wait(PATIENCE_S)
        caller.close()
        assert "closed" in failed.get(timeout=PATIENCE_S)
        with pytest.raises(Unreachable, match="was closed"):
            caller.call("GET", "/")
        leave.set()
        thread.join()


def test_another_certificate_is_refused_before_anything_is_said(
    certificate: Certificate, tmp_path: Path
) -> None:
    """A pin that does not match names both, and no request leaves."""
    pin = make(tmp_path).pin
    asked: queue.Queue[Request] = queue.Queue()

    def note(request: Request) -> Response:
        asked.put(request)
        return hello(request)

    with (
        listening(note, tls=certificate.shown()) as listener,
        calling(listener, tls=unchecked(), pin=pin) as caller,
        pytest.raises(
            Refused, match=f"SHA-256 {certificate.pin}, not the pinned {pin}"
        ),
    ):
        caller.call("PUT", "/", body=b"secret")

    assert asked.empty()


def test_a_pin_may_have_colons(certificate: Certificate) -> None:
    """Fingerprints are accepted as other tools print them."""
    pin = ":".join(certificate.pin.upper()[at : at + 2] for at in range(0, 64, 2))
    with (
        listening(tls=certificate.shown()) as listener,
        calling(listener, tls=unchecked(), pin=pin) as caller,
    ):
        assert bytes(caller.call("GET", "/").body) == b"hello"


def test_a_certificate_of_nobody_is_refused(certificate: Certificate) -> None:
    """Without a pin, the context's own check holds."""
    trusted = unchecked()
    trusted.verify_mode = ssl.CERT_REQUIRED
    with (
        listening(tls=certificate.shown()) as listener,
        calling(listener, tls=trusted) as caller,
        pytest.raises(Refused, match="does not verify: self-signed certificate"),
    ):
        caller.call("GET", "/")


def test_what_cannot_be_asked_is_the_callers_fault() -> None:
    """A target or a header that would break the head is refused."""
    with listening() as listener, calling(listener) as caller:
        with pytest.raises(UsageError, match="cannot be sent"):
            caller.call("GET", "/a b")
        with pytest.raises(UsageError, match="cannot be sent"):
            caller.call("GET", "/", headers={"x": "a\r\nb: c"})
        small = Download(lambda _: memoryview(bytearray(2)))
        with pytest.raises(UsageError, match="2 bytes of memory were given for 5"):
            caller.call("GET", "/", fetching=small)

        assert bytes(caller.call("GET", "/").body) == b"hello"


def test_a_pin_needs_tls() -> None:
    """A pin that nobody would check is an error."""
    with pytest.raises(UsageError, match="needs TLS"):
        HttpClient("here", 1, timeout_s=1, connect_timeout_s=1, pin="00")
