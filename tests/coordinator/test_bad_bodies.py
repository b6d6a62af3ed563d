"""What is sent wrongly gets a defined answer with a remedy, and changes nothing."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from atoll.exchange import Frame
from atoll.exchange.calls import OfferCall, PublishCall
from atoll.testing.fixtures import anchor_of, outcome_of, update_of
from atoll.wire import FrameKind, pack, with_body
from tests.coordinator.scene import (
    FRAME,
    SEE,
    UPDATES,
    Scene,
    Wrong,
    altered,
    packed,
    require_refusal,
)
from tests.coordinator.serving import address_of, asking, calling, picture, request
from tests.http.loopback import PATIENCE_S, Dialogue, Heard, head

TEN_GB = 10 * 2**30


def _raw(cut: Callable[[bytes], bytes]) -> Callable[[Scene], Heard]:
    """Return what brings an update whose bytes were altered on the way."""

    def ask(scene: Scene) -> Heard:
        frame = scene.update()
        data = cut(packed(frame))
        return calling(scene.coordinator, PublishCall(frame), body=data)

    return ask


def _declared(scene: Scene, line: str, kind: str, size: int) -> Heard:
    """Announce a body, and send none of it."""
    with Dialogue(address_of(scene.coordinator.url)) as dialogue:
        length = str(size)
        dialogue.say(
            request(scene.coordinator, line, content_type=kind, content_length=length)
        )
        return dialogue.hear()


def _in_bf16(frame: Frame) -> Frame:
    body = np.zeros(6, np.uint8)
    header = replace(frame.header, codec="bf16", body_bytes=len(body))
    return Frame(with_body(header, body), body)


def _not_finite(frame: Frame) -> Frame:
    body = np.array([1.0, np.nan, 1.0], np.float32).view(np.uint8)
    return Frame(with_body(frame.header, body), body)


UPDATED = {
    "of another run": Wrong(
        lambda scene: scene.publish(altered(scene.update(), run="another")),
        409,
        "refused",
        "Join this run first",
    ),
    "for a future round": Wrong(
        lambda scene: scene.publish(scene.update(round=2)),
        409,
        "refused",
        "Wait for its outcome",
    ),
    "departing, two rounds ahead": Wrong(
        lambda scene: scene.publish(scene.update(round=3, kind=FrameKind.DEPARTING)),
        409,
        "refused",
        "Wait for its outcome",
    ),
    "for a fragment that is not there": Wrong(
        lambda scene: scene.publish(altered(scene.update(), fragment=7)),
        409,
        "refused",
        "Take the settings from the run",
    ),
    "on another's path": Wrong(
        lambda scene: asking(
            scene.coordinator,
            "POST /fragments/1/rounds/1/offers/b",
            pack(scene.update().header),
            content_type="application/vnd.atoll.header",
        ),
        400,
        "usage",
        "Send it to its own path",
    ),
    "where another stands": Wrong(
        lambda scene: scene.publish(update_of(scene.a, scene.first, 9.0)),
        409,
        "refused",
        "Wait for its outcome",
    ),
    "in another codec": Wrong(
        lambda scene: scene.publish(_in_bf16(scene.update())),
        409,
        "refused",
        "Take the settings from the run",
    ),
    "with a norm that is a lie": Wrong(
        lambda scene: scene.publish(altered(scene.update(), norm=1.0)),
        409,
        "refused",
        "Seal it again",
    ),
}
BYTES = {
    "an altered body": Wrong(
        _raw(lambda data: data[:-1] + bytes([data[-1] ^ 1])), 400, "corrupt", "again"
    ),
    "an altered header": Wrong(
        _raw(lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:]),
        400,
        "corrupt",
        "again",
    ),
    "a body that is longer than its frame": Wrong(
        _raw(lambda data: data + b"and more"), 400, "corrupt", "again"
    ),
    "a body that is shorter than its frame": Wrong(
        _raw(lambda data: data[:-1]), 400, "corrupt", "again"
    ),
    "an update of 10 GB": Wrong(
        lambda scene: scene.publish(scene.update(), content_length=str(TEN_GB)),
        400,
        "corrupt",
        "again",
    ),
    "a joining of 10 GB": Wrong(
        lambda scene: _declared(scene, "POST /islands/c", "application/json", TEN_GB),
        400,
        "usage",
        SEE,
    ),
    "a body beyond all limits": Wrong(
        lambda scene: _declared(scene, UPDATES, FRAME, 2**40),
        413,
        "length",
        "are allowed",
    ),
    "garbage for JSON": Wrong(
        lambda scene: asking(scene.coordinator, "POST /islands/c", b"\xff\xfe{]"),
        400,
        "usage",
        SEE,
    ),
    "JSON of another form": Wrong(
        lambda scene: asking(
            scene.coordinator, "POST /islands/b/heartbeat", b'{"island":"b"}'
        ),
        400,
        "usage",
        SEE,
    ),
    "garbage for a frame": Wrong(
        lambda scene: asking(
            scene.coordinator, UPDATES, b"\0" * 500, content_type=FRAME
        ),
        400,
        "corrupt",
        "again",
    ),
}


@pytest.mark.parametrize("name", UPDATED)
def test_a_bad_update_is_answered_and_changes_nothing(name: str, scene: Scene) -> None:
    """Status, code and remedy are defined, and the right update may follow."""
    require_refusal(scene, UPDATED[name])


@pytest.mark.parametrize("name", BYTES)
def test_bad_bytes_are_answered_and_change_nothing(name: str, scene: Scene) -> None:
    """Nothing is read beyond what was declared, and nothing reserved for it."""
    require_refusal(scene, BYTES[name])


def test_a_stale_round_is_told_that_it_is_over(scene: Scene) -> None:
    """A late update is no error: its island learns the rest from the roster."""
    late = scene.update(9.0)
    scene.b.publish(scene.update())
    before = picture(scene.coordinator)
    heard = scene.publish(late)
    offered = calling(scene.coordinator, OfferCall(late.header))

    assert (heard.status, json.loads(heard.body)) == (200, {"reception": "committed"})
    assert offered.body == heard.body
    assert picture(scene.coordinator) == before


def test_a_connection_that_ends_within_a_body_changes_nothing(scene: Scene) -> None:
    """Half closed it is told so; cut, nobody is left to be told."""
    before = picture(scene.coordinator)
    head = request(
        scene.coordinator, UPDATES, content_type=FRAME, content_length="5000"
    )
    for is_cut in (False, True):
        with Dialogue(address_of(scene.coordinator.url)) as dialogue:
            dialogue.say(head + packed(scene.update())[:-3])
            if not is_cut:
                dialogue.sock.shutdown(socket.SHUT_WR)
                heard = dialogue.hear()
                assert (heard.status, heard.error) == (400, "short_body")

    assert picture(scene.coordinator) == before
    scene.b.publish(scene.update())
    assert anchor_of(scene.a) == -2.0


def test_bytes_after_a_body_are_no_part_of_it(scene: Scene) -> None:
    """They are read as the next request, which they are not."""
    before = picture(scene.coordinator)
    with Dialogue(address_of(scene.coordinator.url)) as dialogue:
        dialogue.say(request(scene.coordinator, "GET /info") + b"\0\1\2 more\r\n\r\n")
        assert dialogue.hear().status == 200
        heard = dialogue.hear()
        assert (heard.status, heard.error) == (400, "head")
        assert dialogue.hear_end() == b""

    assert picture(scene.coordinator) == before


@pytest.mark.parametrize("size", [500, 10**6])
def test_a_slow_upload_is_told_to_come_again(scene: Scene, size: int) -> None:
    """Small or large, it holds nobody up for longer than the limit."""
    before = picture(scene.coordinator)
    with Dialogue(address_of(scene.coordinator.url)) as dialogue:
        length = str(size)
        dialogue.say(
            request(
                scene.coordinator, UPDATES, content_type=FRAME, content_length=length
            )
        )
        dialogue.say(packed(scene.update())[:20])
        heard = dialogue.hear()

    assert (heard.status, heard.error) == (408, "slow_body")
    assert "again" in json.loads(heard.body)["message"]
    assert picture(scene.coordinator) == before


def test_values_that_are_not_finite_are_refused_and_shown(scene: Scene) -> None:
    """No round lists them, status says why, and the same island's next may count."""
    seen = threading.Event()
    scene.coordinator.events.subscribe(
        lambda event: seen.set() if event.name == "update_refused" else None,
        name="test",
    )
    heard = scene.publish(_not_finite(scene.update()))
    said = json.loads(heard.body)

    assert (heard.status, said["error"]) == (409, "refused")
    assert "the same bytes again are refused again" in said["message"]
    assert seen.wait(PATIENCE_S)
    assert scene.island("b")["refused_because"].startswith("values that are not finite")
    scene.b.publish(scene.update())
    assert anchor_of(scene.a) == -2.0


def test_an_update_on_another_base_does_not_count(scene: Scene) -> None:
    """The round goes on without it, and status says why."""
    scene.b.publish(scene.update(9.0, base=b"\1" * 16))

    assert anchor_of(scene.a) == -1.0
    assert scene.island("b")["refused"] == 1
    assert scene.island("b")["refused_because"].startswith("base")


def test_what_an_island_refuses_itself_does_not_count(scene: Scene) -> None:
    """It says so with a header alone, and the others' round goes on."""
    header = replace(
        scene.update().header, elements=0, body_bytes=0, pieces=(), refused="not finite"
    )
    scene.b.publish(Frame(header, np.empty(0, np.uint8)))

    assert anchor_of(scene.a) == -1.0
    assert outcome_of(scene.a, 1).agreed.header.round == 1
    assert scene.island("b")["refused_because"] == "not finite"


@pytest.mark.parametrize(
    ("line", "size", "status"),
    [("POST /invites/redeem", 60_000, 413), ("PUT /updates/0/1/b", TEN_GB, 401)],
)
def test_who_has_no_token_is_told_before_a_body_is_waited_for(
    scene: Scene, line: str, size: int, status: int
) -> None:
    """Nobody is kept out by who may not send: the head alone is answered."""
    with Dialogue(address_of(scene.coordinator.url)) as dialogue:
        dialogue.say(head(line, content_length=str(size), expect="100-continue"))

        assert dialogue.hear_head()[0] == status
