"""A run with an open round, for which island a has published and b has not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.coordinator.app import Coordinator
from atoll.exchange import Exchange, Frame
from atoll.exchange.calls import JoinCall, PublishCall
from atoll.protocol import Heartbeat, JoinReply, JoinRequest
from atoll.settings import RunSettings
from atoll.testing.fixtures import MODEL, anchor_of, enter, update_of
from atoll.wire import pack
from tests.coordinator.serving import Islands, calling, picture, serving
from tests.http.loopback import Heard

FRAME = "application/vnd.atoll.frame"
UPDATES = "PUT /fragments/0/rounds/1/updates/b"
"""Where the run waits for island b's update."""

SEE = "docs/http.md"


@dataclass(frozen=True)
class Scene:
    """A run, and those who take part in it."""

    coordinator: Coordinator
    a: Exchange
    b: Exchange
    first: JoinReply
    second: JoinReply

    def update(self, value: float = 3.0, **fields: Any) -> Frame:
        """Return an update of island b, which the run waits for."""
        return update_of(self.b, self.second, value, **fields)

    def beat(self, **fields: Any) -> Heartbeat:
        """Return what island b says of itself, altered."""
        beat = Heartbeat(island="b", incarnation=self.second.incarnation, step=0)
        return replace(beat, **fields)

    def publish(self, frame: Frame, **headers: Any) -> Heard:
        """Bring an update by hand."""
        return calling(self.coordinator, PublishCall(frame), **headers)

    def join(self, name: str, key: bytes, **fields: Any) -> Heard:
        """Join by hand."""
        joining = replace(JoinRequest(model=MODEL, island=name), **fields)
        return calling(self.coordinator, JoinCall(joining, key, b"another"))

    def island(self, name: str) -> dict[str, Any]:
        """Return an island's row of the status."""
        rows = self.coordinator.status()["islands"]
        return next(each for each in rows if each["island"] == name)


@contextmanager
def opened(directory: Path, settings: RunSettings, **options: Any) -> Iterator[Scene]:
    """Serve a run of two islands, the first of which has published."""
    with ExitStack() as stack:
        served = serving(directory, settings, **options)
        coordinator = stack.enter_context(served)
        attach = Islands(coordinator, stack)
        a, b = attach(key=b"a"), attach(key=b"b")
        first, second = enter(a, "a"), enter(b, "b")
        a.publish(update_of(a, first, 1.0))
        yield Scene(coordinator, a, b, first, second)


@dataclass(frozen=True)
class Wrong:
    """A bad request, and how it is answered."""

    ask: Callable[[Scene], Heard]
    status: int
    error: str
    remedy: str
    """What its message has, as a pattern."""


def require_refusal(scene: Scene, wrong: Wrong) -> None:
    """Ask, and return if the answer is as defined and the run as it was."""
    before = picture(scene.coordinator)
    heard = wrong.ask(scene)
    said = json.loads(heard.body)

    assert (heard.status, said["error"]) == (wrong.status, wrong.error), said
    assert re.search(wrong.remedy, said["message"]), said
    assert picture(scene.coordinator) == before
    scene.b.publish(scene.update())
    assert anchor_of(scene.a) == -2.0


def altered(frame: Frame, **fields: Any) -> Frame:
    """Return a frame with another header over the same body."""
    return Frame(replace(frame.header, **fields), frame.body)


def packed(frame: Frame) -> bytes:
    """Return a frame as it travels."""
    return pack(frame.header) + frame.body.tobytes()
