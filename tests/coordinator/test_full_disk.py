"""A coordinator whose disk is full says so, changes nothing, and goes on later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from atoll.errors import DiskFull
from atoll.exchange import CoordinatorExchange, Frame, Outcome
from atoll.exchange.calls import JoinCall, OutcomeCall, PublishCall, StateCall
from atoll.exchange.over_http import HttpTransport
from atoll.island.numpy_model import vector_model
from atoll.protocol import JoinReply, JoinRequest, Reception
from tests.coordinator.apart import Apart, serving_apart
from tests.coordinator.large import found, update
from tests.coordinator.serving import journal_digest

ELEMENTS = 2**18
BODY_BYTES = 4 * ELEMENTS
MODEL = vector_model({"w": (ELEMENTS,)})
SETTINGS = {
    "run": {"start_islands": 2},
    "wire": {"up": "fp32", "down": "fp32"},
    "outer": {"optimizer": "sgd", "lr": 1.0},
}


@dataclass(frozen=True)
class Scene:
    """A run of two islands on a disk that can be made full."""

    apart: Apart
    line: HttpTransport
    first: JoinReply
    second: JoinReply

    @property
    def digest(self) -> str:
        return journal_digest(self.apart.directory)

    def publishing(self, joined: JoinReply, value: float) -> PublishCall:
        values = np.full(ELEMENTS, value, np.float32)
        state = self.line.call(StateCall(0))
        assert isinstance(state, Frame)
        return PublishCall(update(joined, values, base=state.header.base))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        apart = stack.enter_context(serving_apart(tmp_path / "run", SETTINGS))
        line = stack.enter_context(apart.line())
        a = CoordinatorExchange(line, key=b"a", nonce=b"1")
        b = CoordinatorExchange(line, key=b"b", nonce=b"1")
        first, _ = found(a, "a", np.zeros(ELEMENTS, np.float32))
        second = b.join(JoinRequest(model=MODEL, island="b"))
        yield Scene(apart, line, first, second)


def test_an_update_that_finds_no_room_changes_nothing(scene: Scene) -> None:
    """It is answered with 507 and a remedy; its repeat is staged once there is room."""
    call, before = scene.publishing(scene.first, 1.0), scene.digest
    scene.apart.limit_files(BODY_BYTES // 2)
    with pytest.raises(DiskFull, match=r"no room .* Free some space"):
        scene.line.call(call)
    assert scene.digest == before
    scene.apart.limit_files(None)

    assert scene.line.call(call) is Reception.STAGED


def test_a_joining_that_cannot_be_journalled_is_none(scene: Scene) -> None:
    """A membership that is not durable is not given; asked again it is the same."""
    request = JoinRequest(model=MODEL, island="c")
    before = scene.digest
    scene.apart.limit_files(1)
    with pytest.raises(DiskFull, match=r"No room for .* Free some space"):
        scene.line.call(JoinCall(request, b"c", b"1"))
    scene.apart.limit_files(None)
    assert scene.digest == before
    reply = scene.line.call(JoinCall(request, b"c", b"1"))

    assert isinstance(reply, JoinReply)
    assert (reply.incarnation, reply.slot) == (1, 2)


def test_an_outcome_that_cannot_be_journalled_is_told_to_nobody(scene: Scene) -> None:
    """The round closes by itself when there is room, with the same updates."""
    calls = [
        scene.publishing(joined, value)
        for joined, value in ((scene.first, 1.0), (scene.second, 3.0))
    ]
    # An update fits in exactly, and the agreed frame, with its header, does not.
    scene.apart.limit_files(BODY_BYTES)
    for call in calls:
        assert scene.line.call(call) in (Reception.STAGED, Reception.CLOSING)
    assert not isinstance(scene.line.call(OutcomeCall(0, 1, 0.5)), Outcome)
    scene.apart.limit_files(None)
    outcome = None
    while not isinstance(outcome, Outcome):
        outcome = scene.line.call(OutcomeCall(0, 1, 2.0))
    state = scene.line.call(StateCall(0))

    assert isinstance(state, Frame)
    assert state.body.view(np.float32)[0] == -2.0
