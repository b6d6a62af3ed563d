"""What a listener makes of heads: it takes plain ones and refuses the rest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.http import Listener, Request, Response, as_json
from tests.http.loopback import Dialogue, head, listening, talking


def mirror(request: Request) -> Response:
    said = {
        "method": request.method,
        "segments": request.segments,
        "query": dict(request.query),
        "token": request.headers.get("authorization"),
        "length": request.body.length_bytes,
        "has_certificate": request.certificate is not None,
    }
    return as_json(said)


def test_a_request_is_taken_apart() -> None:
    """Method, decoded segments, query and headers reach the handler."""
    with talking(mirror) as dialogue:
        heard = dialogue.ask(
            "PUT /islands/tokyo%201?wait_s=3&x=a+b", b"{}", Authorization="Bearer t"
        )

    assert heard.status == 200
    assert heard.body == (
        b'{"method":"PUT","segments":["islands","tokyo 1"],'
        b'"query":{"wait_s":"3","x":"a b"},"token":"Bearer t","length":2,'
        b'"has_certificate":false}'
    )


@pytest.mark.parametrize(
    "path",
    [
        "/a/../b",
        "/a/%2e%2e/b",
        "/a/./b",
        "/a//b",
        "/a/",
        "/a%2fb",
        "/a%5cb",
        "/a%00b",
        "/a%0ab",
        "/a%zz",
        "/%ff",
        "/" + "a" * 256,
        "/a?x=1&x=2",
        "/a?x=%",
        "*",
        "http://here/a",
    ],
)
def test_a_path_that_is_not_plain_is_refused(path: str) -> None:
    """A path that could lead elsewhere is answered 400 and reaches no handler."""
    with talking(never) as dialogue:
        assert dialogue.ask(f"GET {path}").status == 400


def test_a_path_that_is_too_long_is_refused() -> None:
    """A path beyond its limit is answered 414."""
    with talking(never) as dialogue:
        assert dialogue.ask("GET " + "/abc" * 1000).status == 414


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\r\n\r\n", 400),
        (b"hello\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\n\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no host
        (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", 400),
        (head("GET /", content_length="x"), 400),
        (head("GET /", content_length="-1"), 400),
        (b"PUT / HTTP/1.1\r\nhost: a\r\n" + b"content-length: 1\r\n" * 2, 0),
        (b"PUT / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n"
         b"content-length: 2\r\n\r\n", 400),
        (head("PUT /", transfer_encoding="chunked") + b"1\r\na\r\n0\r\n\r\n", 411),
        (head("PUT /", transfer_encoding="gzip"), 411),
        (head("PUT /", content_length="5", expect="magic"), 417),
        (head("PUT /", content_length=str(10 * 2**30)), 413),
        (head("GET /", x="a" * 33_000), 431),
        (b"GET /" + b"a" * 40_000, 431),
        (head("GET /", authorization="a")[:-2] + b"Authorization: b\r\n\r\n", 400),
    ],
)  # fmt: skip
def test_a_head_that_is_no_request_is_answered_and_the_connection_closed(
    said: bytes, status: int
) -> None:
    """Garbage has a defined answer, after which nothing is read."""
    limits: dict[str, Any] = {
        "head_s": 10.0 if status else 0.3,
        "max_body_bytes": 2**30,
    }
    with talking(never, **limits) as dialogue:
        dialogue.say(said)
        heard = dialogue.hear()

        assert heard.status == (status or 408)  # 0: the head has no end
        assert heard.headers["connection"] == "close"
        assert dialogue.hear_end() == b""


def test_a_head_must_arrive_in_time() -> None:
    """A head that trickles in is answered 408; a silent connection is closed."""
    with (
        listening(never, head_s=0.1) as listener,
        Dialogue(listener.address) as slow,
        Dialogue(listener.address) as silent,
    ):
        slow.say(b"GET / HT")

        assert slow.hear().error == "slow_head"
        assert silent.hear_end() == b""


def test_a_head_may_come_byte_by_byte() -> None:
    """Where a head is cut does not matter."""
    with talking() as dialogue:
        for byte in head("GET /"):
            dialogue.say(bytes([byte]))

        assert dialogue.hear().body == b"hello"


def test_pipelined_requests_are_answered_in_order() -> None:
    """Requests that arrive together are answered one after the other."""

    def path(request: Request) -> Response:
        return Response(body=request.path.encode())

    with talking(path) as dialogue:
        dialogue.say(b"".join(head(f"GET /{number}") for number in range(200)))

        assert [dialogue.hear().body for _ in range(200)] == [
            f"/{number}".encode() for number in range(200)
        ]


def test_http_1_0_is_answered_and_closed() -> None:
    """An old request is served; its connection is not kept."""
    with talking() as dialogue:
        dialogue.say(b"GET / HTTP/1.0\r\n\r\n")

        assert dialogue.hear().body == b"hello"
        assert dialogue.hear_end() == b""


def never(request: Request) -> Response:
    raise AssertionError("this request must not reach a handler")


HEADS = st.one_of(
    st.binary(max_size=300),
    st.binary(max_size=300).map(lambda data: data + b"\r\n\r\n"),
    st.lists(
        st.sampled_from(
            [b"GET", b"PUT", b" ", b"/", b"/a", b"?", b"%", b"%2f", b"..", b"\0",
             b" HTTP/1.1", b" HTTP/1.0", b"\r\n", b"\n", b"host: a", b":", b"\xff",
             b"content-length: 3", b"content-length: 99999999999999999999",
             b"transfer-encoding: chunked", b"expect: 100-continue", b"range: bytes=-"]
        ),
        max_size=30,
    ).map(b"".join),
)  # fmt: skip


@pytest.fixture(scope="module")
def fuzzed() -> object:
    with listening(mirror, head_s=5.0) as listener:
        yield listener


@settings(max_examples=300)
@given(said=HEADS)
def test_no_bytes_are_a_fault_of_ours(fuzzed: Listener, said: bytes) -> None:
    """Whatever is said, the answer is below 500, and the next one is served."""
    with Dialogue(fuzzed.address) as dialogue:
        dialogue.say(said)
        dialogue.sock.shutdown(1)
        answer = dialogue.hear_end()

    statuses = [
        line.split()[1] for line in answer.split(b"\r\n") if line[:5] == b"HTTP/"
    ]
    assert all(status < b"500" for status in statuses)
    with Dialogue(fuzzed.address) as dialogue:
        assert dialogue.ask("GET /ok").status == 200
