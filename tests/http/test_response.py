"""What handlers give back reaches the other side byte for byte."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.errors import UsageError
from atoll.http import FilePart, Problem, Request, Response, ranged
from atoll.http.response import ResponseBody
from tests.http.certificates import Certificate
from tests.http.loopback import PATIENCE_S, head, talking

DATA = os.urandom(3_000_000)


def views(data: bytes) -> list[memoryview]:
    """Cut into 700 views, more than one system call takes."""
    whole, step = memoryview(data), len(data) // 700 + 1
    return [whole[at : at + step] for at in range(0, len(data), step)]


@pytest.fixture(params=["bytes", "views", "path", "descriptor"])
def body(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ResponseBody]:
    file = tmp_path / "body"
    file.write_bytes(b"before" + DATA + b"after")
    with file.open("rb") as opened:
        fd = opened.fileno()
        kinds: dict[str, ResponseBody] = {
            "bytes": DATA,
            "views": views(DATA),
            "path": FilePart(file=file, first=6, length=len(DATA)),
            "descriptor": FilePart(file=fd, first=6, length=len(DATA)),
        }
        yield kinds[request.param]


@pytest.mark.parametrize("encrypted", [False, True])
def test_every_kind_of_body_arrives(
    body: ResponseBody, encrypted: bool, certificate: Certificate
) -> None:
    """Bytes, views and files are sent alike, with and without TLS, and again."""
    shown = certificate if encrypted else None
    with talking(lambda _: Response(body=body), certificate=shown) as dialogue:
        assert dialogue.ask("GET /").body == DATA
        assert dialogue.ask("GET /").body == DATA


@pytest.mark.parametrize(
    ("asked", "status", "first", "last"),
    [
        ("bytes=0-0", 206, 0, 1),
        ("bytes=5-1000004", 206, 5, 1_000_005),
        ("bytes=2999999-", 206, 2_999_999, 3_000_000),
        ("bytes=10-99999999", 206, 10, 3_000_000),
        ("bytes=-7", 206, 2_999_993, 3_000_000),
        ("bytes=-99999999", 206, 0, 3_000_000),
        ("bytes=3000000-", 416, 0, 0),
        ("bytes=-0", 416, 0, 0),
        ("bytes=7-5", 200, 0, 3_000_000),
        ("bytes=0-1,4-5", 200, 0, 3_000_000),
        ("bytes=-", 200, 0, 3_000_000),
        ("lines=1-2", 200, 0, 3_000_000),
    ],
)
def test_a_range_of_every_kind_of_body(
    body: ResponseBody, asked: str, status: int, first: int, last: int
) -> None:
    """One range is cut out of memory and files; what is no single range is ignored."""

    def handle(request: Request) -> Response:
        return ranged(request, body, etag="v1")

    with talking(handle) as dialogue:
        heard = dialogue.ask("GET /", Range=asked)

    said = {206: f"bytes {first}-{last - 1}/3000000", 416: "bytes */3000000"}
    assert heard.status == status
    assert heard.headers.get("content-range") == said.get(status)
    assert heard.body == DATA[first:last]


def test_a_range_of_another_version_is_not_given() -> None:
    """If-Range with another tag gets the whole body: half of each would be neither."""

    def handle(request: Request) -> Response:
        return ranged(request, DATA, etag="v2")

    with talking(handle) as dialogue:
        same = dialogue.ask("GET /", Range="bytes=0-9", If_Range='"v2"')
        other = dialogue.ask("GET /", Range="bytes=0-9", If_Range='"v1"')

    assert (same.status, same.headers["etag"]) == (206, '"v2"')
    assert (other.status, other.body) == (200, DATA)


def test_a_trailer_is_sent_after_all_the_rest() -> None:
    """The last bytes are made once the others have arrived."""
    arrived = threading.Event()

    def trailer() -> bytes:
        assert arrived.wait(PATIENCE_S)
        return b"end"

    response = Response(body=b"begin", trailer=trailer, trailer_bytes=3)
    with talking(lambda _: response) as dialogue:
        dialogue.say(head("GET /"))
        status, headers = dialogue.hear_head()

        assert (status, headers["content-length"]) == (200, "8")
        assert dialogue.hear_bytes(5) == b"begin"
        arrived.set()
        assert dialogue.hear_bytes(3) == b"end"


@pytest.mark.parametrize("trailer", [lambda: b"longer", lambda: 1 / 0])
def test_a_trailer_that_fails_leaves_the_body_short(trailer: object) -> None:
    """Without its trailer a body never looks complete."""
    response = Response(body=b"begin", trailer=trailer, trailer_bytes=3)  # type: ignore[arg-type]
    with talking(lambda _: response) as dialogue:
        dialogue.say(head("GET /"))
        dialogue.hear_head()

        assert dialogue.hear_end() == b"begin"


def test_a_file_that_is_not_there_is_a_fault() -> None:
    """A file that cannot be opened is answered 500."""
    part = FilePart(file="/nowhere/at/all", length=5)
    with talking(lambda _: Response(body=part)) as dialogue:
        assert dialogue.ask("GET /").status == 500


def test_a_file_that_shrank_cuts_the_body(tmp_path: Path) -> None:
    """What was announced and is not there any more is not replaced by anything."""
    (tmp_path / "file").write_bytes(b"short")
    part = FilePart(file=tmp_path / "file", length=100_000)
    with talking(lambda _: Response(body=part)) as dialogue:
        dialogue.say(head("GET /"))
        dialogue.hear_head()

        assert dialogue.hear_end() == b"short"


def test_a_small_file_that_shrank_is_a_fault(tmp_path: Path) -> None:
    """A small file is read before anything is sent, so that the answer can say 500."""
    (tmp_path / "file").write_bytes(b"short")
    part = FilePart(file=tmp_path / "file", length=10)
    with talking(lambda _: Response(body=part)) as dialogue:
        assert dialogue.ask("GET /").status == 500


def test_head_and_no_content_have_no_body() -> None:
    """HEAD tells the length and sends nothing; 204 not even that."""

    def handle(request: Request) -> Response:
        return Response(status=204) if request.segments else Response(body=b"four")

    with talking(handle) as dialogue:
        dialogue.say(head("HEAD /") + head("GET /none") + head("GET /"))

        assert dialogue.hear_head()[1] == {"content-length": "4"}
        assert dialogue.hear_head() == (204, {})
        assert dialogue.hear().body == b"four"


def test_done_is_called_once_for_each_request() -> None:
    """Whoever lends memory to a response learns when it is free again."""
    freed: list[int] = []
    response = Response(body=DATA, done=lambda: freed.append(1))
    with talking(lambda _: response) as dialogue:
        dialogue.ask("GET /")
        dialogue.ask("GET /")
        dialogue.ask("GET /")

    assert freed == [1, 1, 1]


def test_a_problem_is_an_answer() -> None:
    """What a handler raises on purpose is answered with its code and its sentence."""

    def handle(request: Request) -> Response:
        raise Problem(403, "role", "Only operators may.", headers={"x-why": "role"})

    with talking(handle) as dialogue:
        heard = dialogue.ask("GET /")

    assert heard.status == 403
    assert heard.body == b'{"error":"role","message":"Only operators may."}'
    assert heard.headers["x-why"] == "role"


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "\0"])
def test_a_header_holds_one_line(value: str) -> None:
    """A header that would start another one is refused where it is made."""
    with pytest.raises(UsageError, match="cannot be a header"):
        Response(headers={"x": value})


def test_a_trailer_says_how_long_it_is() -> None:
    """A length that is not known before cannot be announced."""
    with pytest.raises(UsageError, match="trailer_bytes=0 must be the length"):
        Response(trailer=lambda: b"")
