"""Constants over HTTP: who may bring and take them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.app import Coordinator
from atoll.exchange import CoordinatorExchange
from atoll.exchange.base import PART_BYTES
from atoll.exchange.calls import KeepCall
from atoll.security import Role
from atoll.testing.fixtures import plain_settings
from tests.coordinator.serving import asking, calling, line_to, picture, serving
from tests.exchange.constant_samples import (
    BASE,
    MODEL,
    SPECS,
    TABLE,
    Held,
    begin,
    found,
    settle,
)

OCTETS = "application/octet-stream"
BASE_AT = f"/constants/{SPECS[0].digest}"


@contextmanager
def founding(directory: Path) -> Iterator[tuple[Coordinator, CoordinatorExchange]]:
    """Serve a run, and give an exchange for the one who founds it."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(serving(directory, plain_settings()))
        line = stack.enter_context(line_to(coordinator))
        yield coordinator, CoordinatorExchange(line, key=b"a", nonce=b"1")


def test_a_constant_is_served_whole_and_by_range(tmp_path: Path) -> None:
    """The list says which there are; bytes come from any place, under one ETag."""
    with founding(tmp_path / "run") as (coordinator, exchange):
        before = json.loads(asking(coordinator, "GET /constants").body)
        found(exchange, Held())
        said = json.loads(asking(coordinator, "GET /constants").body)
        whole = asking(coordinator, f"GET {BASE_AT}")
        part = asking(coordinator, f"GET {BASE_AT}", range="bytes=8-11")
        empty = asking(coordinator, f"GET /constants/{SPECS[2].digest}")

    assert before == {"constants": [], "kept": []}
    assert [row[0] for row in said["constants"]] == ["base", "table", "nothing"]
    assert set(said["kept"]) == {each.digest for each in SPECS}
    assert (whole.status, whole.body) == (200, BASE)
    assert (part.status, part.body) == (206, BASE[8:12])
    assert whole.headers["etag"] == part.headers["etag"] == f'"{SPECS[0].digest}"'
    assert (empty.status, empty.body) == (200, b"")


def test_a_restarted_coordinator_keeps_what_was_whole(tmp_path: Path) -> None:
    """A founder goes on; what is founded then is there after another restart."""
    with founding(tmp_path / "run") as (coordinator, exchange):
        joined = begin(exchange)
        who = joined.island, joined.incarnation
        whole = KeepCall(*who, SPECS[1].digest, 0, TABLE)
        draft = KeepCall(*who, SPECS[0].digest, 0, BASE[:8])
        answers = [calling(coordinator, each).body for each in (whole, draft)]
        assert [json.loads(each)["bytes"] for each in answers] == [len(TABLE), 8]
        assert asking(coordinator, f"GET {BASE_AT}").status == 409  # not founded
    files = tmp_path / "run" / "journal" / "constants"
    assert {each.name for each in files.iterdir()} == {e.digest for e in SPECS[:2]}
    with founding(tmp_path / "run") as (coordinator, exchange):
        assert {each.name for each in files.iterdir()} == {SPECS[1].digest}
        held = Held()
        found(exchange, held)
        assert held.asked == [("base", 0)]
    with serving(tmp_path / "run", None) as coordinator:
        assert asking(coordinator, f"GET {BASE_AT}").body == BASE
        assert coordinator.status()["damage"] == []


@pytest.mark.parametrize(
    ("call", "headers", "status", "fault"),
    [
        (KeepCall("b", 1, SPECS[0].digest, 0, BASE), {}, 410, "is no member"),
        (KeepCall("a", 2, SPECS[0].digest, 0, BASE), {}, 410, "is no member"),
        (KeepCall("a", 1, "0" * 64, 0, BASE), {}, 409, "is expected"),
        (KeepCall("a", 1, SPECS[2].digest, 0, b"1"), {}, 409, "is expected"),
        (KeepCall("a", 1, SPECS[0].digest, 0, BASE[::-1]), {}, 400, "digest"),
        (KeepCall("a", 1, SPECS[0].digest, 0, BASE + b"1"), {}, 400, "48 bytes"),
        (KeepCall("a", 1, SPECS[0].digest, 0, BASE), {"role": None}, 401, "token"),
        (
            KeepCall("a", 1, SPECS[0].digest, 0, BASE),
            {"content_type": "text/html"},
            400,
            "Content-Type",
        ),
    ],
)
def test_what_is_not_the_founders_constant_changes_nothing(
    tmp_path: Path, call: KeepCall, headers: dict[str, Any], status: int, fault: str
) -> None:
    """Another's name, an unknown digest, wrong and too many bytes are refused."""
    with founding(tmp_path / "run") as (coordinator, exchange):
        joined = begin(exchange)
        before = picture(coordinator)
        heard = calling(coordinator, call, **headers)

        assert (heard.status, fault in heard.body.decode()) == (status, True), heard
        assert picture(coordinator) == before
        exchange.keep(joined, MODEL, Held())
        settle(exchange, joined)


def test_a_part_is_bounded_and_a_digest_has_one_spelling(tmp_path: Path) -> None:
    """A length is judged before a byte is read; no path reaches another file."""
    with founding(tmp_path / "run") as (coordinator, exchange):
        joined = begin(exchange)
        query = f"?island=a&incarnation={joined.incarnation}&first=0"
        large = asking(
            coordinator,
            f"PUT {BASE_AT}{query}",
            content_type=OCTETS,
            content_length=PART_BYTES + 1,
        )
        upper = asking(coordinator, f"GET /constants/{SPECS[0].digest.upper()}")
        short = asking(coordinator, f"PUT /constants/ff{query}", content_type=OCTETS)
        outside = asking(coordinator, "GET /constants/..%2Flog%2F1")

    assert large.status == 400
    assert b"above the limit of 16777216" in large.body
    for heard in (upper, short):
        assert (heard.status, b"64 hex digits" in heard.body) == (400, True), heard
    assert outside.status == 400


def test_constants_need_the_role_of_an_island(tmp_path: Path) -> None:
    """Nobody without a token learns or takes them; operators may."""
    with founding(tmp_path / "run") as (coordinator, exchange):
        found(exchange, Held())
        for path in ("/constants", BASE_AT):
            heard = [
                asking(coordinator, f"GET {path}", role=role).status
                for role in (None, Role.ISLAND, Role.OPERATOR)
            ]
            assert heard == [401, 200, 200]
