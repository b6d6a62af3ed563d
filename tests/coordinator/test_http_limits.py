"""What was cut goes on where it stood, and what is too much waits its turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.coordinator.app import Coordinator
from atoll.exchange import CoordinatorExchange, Frame
from atoll.exchange.api import Incoming, to_request
from atoll.exchange.calls import JoinCall, PublishCall
from atoll.exchange.over_http import HttpTransport
from atoll.island.numpy_model import vector_model
from atoll.protocol import JoinReply, JoinRequest, Reception
from atoll.settings import RunSettings
from atoll.testing import Link
from atoll.wire import verify_body
from atoll.wire.digests import view_of
from tests.coordinator.large import found, update
from tests.coordinator.serving import (
    Islands,
    address_of,
    asking,
    line_to,
    request,
    serving,
)
from tests.http.loopback import Dialogue, Heard

ELEMENTS = 2**18
BODY_BYTES = 4 * ELEMENTS
MODEL = vector_model({"w": (ELEMENTS,)})
STATE = "GET /state/0"
OUTCOME = "GET /fragments/0/rounds/1/outcome"
CUT_BYTES = 300_000
LANE_WAIT_S = 2.0
SETTINGS = RunSettings.from_dict(
    {
        "run": {"start_islands": 2},
        "wire": {"up": "fp32", "down": "fp32"},
        "outer": {"optimizer": "sgd", "lr": 1.0},
    }
)


@dataclass(frozen=True)
class Scene:
    """A run of two islands with a megabyte to send."""

    coordinator: Coordinator
    islands: Islands
    line: HttpTransport
    calls: tuple[PublishCall, PublishCall]

    def close_round(self) -> None:
        for call in self.calls:
            self.line.call(call)
        self.islands.settle()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    limits: dict[str, Any] = {
        "max_body_bytes_in_flight": BODY_BYTES,
        "lane_wait_s": LANE_WAIT_S,
    }
    with ExitStack() as stack:
        served = serving(tmp_path / "run", SETTINGS, **limits)
        coordinator = stack.enter_context(served)
        islands = Islands(coordinator, stack)
        line = stack.enter_context(line_to(coordinator))
        a = CoordinatorExchange(line, key=b"a", nonce=b"1")
        first, base = found(a, "a", np.zeros(ELEMENTS, np.float32))
        joining = JoinRequest(model=MODEL, island="b")
        second = line.call(JoinCall(joining, b"b", b"1"))
        assert isinstance(second, JoinReply)
        values = np.random.default_rng(0).normal(size=ELEMENTS).astype(np.float32)
        one, two = (update(each, values, base=base) for each in (first, second))
        yield Scene(coordinator, islands, line, (PublishCall(one), PublishCall(two)))


def cut_short(scene: Scene, line: str) -> tuple[dict[str, str], bytes]:
    """Return the headers of an answer, and what came of it before the line broke."""
    with Link(address_of(scene.coordinator.url)) as link:
        link.close_after(CUT_BYTES, direction="down")
        with Dialogue(link.address) as dialogue:
            dialogue.say(request(scene.coordinator, line))
            _, headers = dialogue.hear_head()
            return headers, dialogue.hear_end()


def the_rest(scene: Scene, line: str, headers: dict[str, str], first: int) -> Heard:
    return asking(
        scene.coordinator, line, range=f"bytes={first}-", if_range=headers["etag"]
    )


def verified(data: bytes) -> Frame:
    """Return the frame that these bytes are, each piece of it checked."""
    incoming = Incoming.of(data)
    frame = incoming.frame()
    incoming.finish()
    verify_body(frame.header, frame.body)
    return frame


@pytest.mark.parametrize("line", [STATE, OUTCOME], ids=["state", "outcome"])
def test_what_was_cut_goes_on_where_it_stood(line: str, scene: Scene) -> None:
    """Only the rest travels, and the whole is the frame, to the digest."""
    scene.close_round()
    headers, came = cut_short(scene, line)
    heard = the_rest(scene, line, headers, len(came))
    total = int(headers["content-length"])
    frame = verified(came + heard.body)

    assert 0 < len(came) < CUT_BYTES
    assert heard.status == 206
    assert heard.headers["content-range"] == f"bytes {len(came)}-{total - 1}/{total}"
    assert heard.headers["content-type"] == "application/vnd.atoll.frame"
    assert frame.header.round == 1


def test_the_rest_of_another_state_is_never_taken_for_this_one(scene: Scene) -> None:
    """A state that has changed has another ETag, and comes whole."""
    headers, came = cut_short(scene, STATE)
    scene.close_round()
    heard = the_rest(scene, STATE, headers, len(came))

    assert heard.status == 200
    assert verified(heard.body).header.round == 1


def test_a_void_round_changes_the_tag_of_a_state(scene: Scene) -> None:
    """The weights are what they were, and the frame names another round."""
    before, _ = cut_short(scene, STATE)
    for call in scene.calls:
        header = replace(
            call.frame.header, elements=0, body_bytes=0, pieces=(), refused="not finite"
        )
        scene.line.call(PublishCall(Frame(header, np.empty(0, np.uint8))))
    scene.islands.settle()
    after, _ = cut_short(scene, STATE)

    assert before["etag"] != after["etag"]


def test_a_range_beyond_the_end_is_told_where_the_end_is(scene: Scene) -> None:
    """416, with the size that there is."""
    headers, _ = cut_short(scene, STATE)
    heard = the_rest(scene, STATE, headers, 2**40)

    assert heard.status == 416
    assert heard.headers["content-range"] == f"bytes */{headers['content-length']}"


class Upload:
    """An update on its way, held back where the test wants it."""

    def __init__(self, scene: Scene, call: PublishCall, dialogue: Dialogue) -> None:
        sent = to_request(call)
        self._data = b"".join(view_of(part).tobytes() for part in sent.body)
        self._dialogue = dialogue
        headers: dict[str, Any] = {"expect": "100-continue", **sent.headers}
        dialogue.say(
            request(
                scene.coordinator, f"{sent.method} {sent.target}", self._data, **headers
            )
        )

    def is_asked_for(self) -> bool:
        """Wait until the coordinator wants the body, or says that it does not."""
        status, _ = self._dialogue.hear_head()
        return status == 100

    def finish(self) -> Heard:
        self._dialogue.say(self._data)
        return self._dialogue.hear()


def test_more_than_the_bound_waits_unread(scene: Scene) -> None:
    """The second body is asked for when the first is here; heartbeats pass by both."""
    address = address_of(scene.coordinator.url)
    with Dialogue(address) as one, Dialogue(address) as two:
        first = Upload(scene, scene.calls[0], one)
        assert first.is_asked_for()
        second = Upload(scene, scene.calls[1], two)
        while not scene.coordinator._listener.counts.bulk_waiting:
            continue
        assert asking(scene.coordinator, "GET /info").status == 200
        received = json.loads(first.finish().body)
        assert received == {"reception": Reception.STAGED.value}
        assert second.is_asked_for()
        assert second.finish().status == 200


def test_who_waits_too_long_is_told_to_come_again(scene: Scene) -> None:
    """503 with Retry-After: nothing of the body was sent, and nothing is lost."""
    address = address_of(scene.coordinator.url)
    with Dialogue(address) as one, Dialogue(address) as two:
        first = Upload(scene, scene.calls[0], one)
        assert first.is_asked_for()
        Upload(scene, scene.calls[1], two)
        heard = two.hear()
        assert (heard.status, heard.error) == (503, "busy")
        assert int(heard.headers["retry-after"]) >= 1
        assert first.finish().status == 200
    scene.line.call(scene.calls[1])
    scene.islands.settle()

    assert scene.coordinator.status()["rounds"] == [2]
