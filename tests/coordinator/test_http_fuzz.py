"""The whole surface, asked nearly rightly: never a fault, a hang or a changed run."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from atoll.bundle import defined_by
from atoll.coordinator.app import Coordinator
from atoll.coordinator.directory import store_bundle
from atoll.data import Ask, DataSpec
from atoll.exchange import Frame
from atoll.exchange.api import PROTOCOL
from atoll.exchange.calls import (
    AgreedCall,
    ClaimCall,
    DataCall,
    FoundCall,
    HeartbeatCall,
    JoinCall,
    KeepCall,
    LeaveCall,
    OfferCall,
    OutcomeCall,
    PublishCall,
    RecoverCall,
    StateCall,
)
from atoll.protocol import Heartbeat, JoinRequest, Stats
from atoll.routes import ROUTES
from atoll.security import Role
from atoll.testing.fixtures import MODEL, enter, plain_settings, update_of
from tests.bundle.samples import a_bundle
from tests.coordinator.nearly import Asking, nearly, of_call, of_operator, route_of
from tests.coordinator.serving import (
    Islands,
    address_of,
    bearer,
    calling,
    picture,
    serving,
)
from tests.http.loopback import Dialogue

UNAVAILABLE = {503, 507}
"""All that a coordinator may answer of 500 and above."""


@dataclass(frozen=True)
class Surface:
    """A run, everything that can be asked of it, and an island that nobody names."""

    coordinator: Coordinator
    samples: list[Asking] = field(repr=False)
    beat: Heartbeat


@pytest.fixture(scope="module")
def surface(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surface]:
    with ExitStack() as stack:
        directory = tmp_path_factory.mktemp("fuzz") / "run"
        run = plain_settings(start_islands=3, quorum=3)
        bundle = a_bundle()
        store_bundle(directory, bundle)
        run = defined_by(bundle, run)
        coordinator = stack.enter_context(serving(directory, run, linger_s=0.1))
        attach = Islands(coordinator, stack)
        a, good = attach(key=b"a"), attach(key=b"good")
        first = enter(a, "a")
        joined = enter(good, "good")
        state, update = a.state(0), update_of(a, first, 1.0)
        a.leave("a", first.incarnation)
        beat = Heartbeat(island="good", incarnation=joined.incarnation, step=0)
        samples = _islands(coordinator, state, update) + _operators(coordinator)
        yield Surface(coordinator, samples, beat)


def _islands(coordinator: Coordinator, state: Frame, update: Frame) -> list[Asking]:
    told = Stats(version="1", seconds=1.0, loss=1.0)
    beat = Heartbeat(island="a", incarnation=1, step=0, stats=told)
    unnamed = JoinRequest(model=MODEL, island=None)
    calls = (
        JoinCall(JoinRequest(model=MODEL, island="b"), b"key", b"nonce"),
        JoinCall(unnamed, b"key", b"nonce"),
        HeartbeatCall(beat),
        LeaveCall("a", 1),
        PublishCall(update, beat),
        OfferCall(update.header),
        AgreedCall("a", 1, (update.header,)),
        OutcomeCall(0, 1, 0.0, beat),
        StateCall(0),
        FoundCall("a", 1, (state,)),
        RecoverCall("a", 1, state, ()),
        KeepCall("a", 1, "0" * 64, 0, b"part"),
        DataCall("a", 1, DataSpec(rows=100, fingerprint="c0ffee")),
        ClaimCall(Ask(island="a", incarnation=1, number=1)),
    )
    token = bearer(coordinator.directory)
    info = of_operator("GET", "/info", token)
    kept = [
        of_operator("GET", path, token).saying("atoll-protocol", str(PROTOCOL))
        for path in ("/constants", f"/constants/{'0' * 64}")
    ]
    return [info, *kept, *(of_call(call, token, run=coordinator.run) for call in calls)]


def _operators(coordinator: Coordinator) -> list[Asking]:
    token = bearer(coordinator.directory, Role.OPERATOR)
    sets: dict[str, Any] = {"values": {"outer.lr": 0.5}}
    return [
        *(of_operator("GET", f"/{each}", token) for each in ("health", "status")),
        *(of_operator("GET", f"/{each}", token) for each in ("metrics", "anchor")),
        of_operator("GET", "/bundle", token),
        of_operator("GET", "/data/ledger", token),
        of_operator("GET", "/code", token),
        of_operator("GET", f"/code/{'0' * 64}", token),
        of_operator("PUT", f"/code/{'0' * 64}", token, {}),
        of_operator("GET", "/events", token, query="after=0"),
        of_operator("GET", "/history", token, query="rows=9"),
        of_operator("POST", "/control/set", token, sets),
        of_operator("POST", "/control/evict", token, {"island": "a"}),
        *(of_operator("POST", f"/control/{each}", token) for each in ("pause", "stop")),
        of_operator("GET", "/belongings", token),
        of_operator("POST", "/invites", token),
        of_operator("POST", "/invites/redeem", token, {"code": "0" * 32}),
    ]


def test_the_samples_are_all_that_can_be_asked(surface: Surface) -> None:
    """Every route of the table is among them."""
    assert {route_of(each) for each in surface.samples} == set(ROUTES)


def answered(surface: Surface, asking: Asking) -> tuple[int, bytes] | None:
    """Return status and body, or None if the connection ended without a word."""
    with Dialogue(address_of(surface.coordinator.url)) as dialogue:
        with contextlib.suppress(ConnectionError):  # a refusal may come before the end
            dialogue.say(asking.to_bytes())
            if asking.declared != str(len(asking.body)):
                dialogue.sock.shutdown(socket.SHUT_WR)
        try:
            return _heard(dialogue, asking.method)
        except (EOFError, ConnectionError):
            return None


def _heard(dialogue: Dialogue, method: str) -> tuple[int, bytes]:
    status, headers = dialogue.hear_head()
    while status == 100:
        status, headers = dialogue.hear_head()
    size = 0 if method == "HEAD" else int(headers.get("content-length", "0"))
    return status, dialogue.hear_bytes(size)


def steady(coordinator: Coordinator) -> dict[str, Any]:
    """Return a picture of the run without what time alone changes."""
    seen = picture(coordinator)
    for key in ("state", "why", "waits_for"):
        del seen["status"][key]
    for row in seen["status"]["islands"]:
        del row["state"]
    return seen


@given(data=st.data())
@settings(
    max_examples=400,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_nothing_that_is_asked_is_a_fault(
    surface: Surface, data: st.DataObject
) -> None:
    """An answer or an end comes at once; what is refused has changed nothing."""
    asking = data.draw(nearly(surface.samples))
    note(repr(asking))
    before = steady(surface.coordinator)
    heard = answered(surface, asking)

    assert surface.coordinator.fault is None
    if heard is None or heard[0] >= 400:
        assert steady(surface.coordinator) == before
    if heard is not None and heard[0] >= 400:
        _require_error(asking, *heard)
    good = calling(surface.coordinator, HeartbeatCall(surface.beat))
    assert good.status == 200


def _require_error(asking: Asking, status: int, body: bytes) -> None:
    assert status < 500 or status in UNAVAILABLE, (status, body)
    if asking.method != "HEAD" and status != 416:
        said = json.loads(body)
        assert said["error"]
        assert said["message"]
