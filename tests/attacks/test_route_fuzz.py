"""Anything that can be asked, by a stranger and by a member that says anything.

The coordinator is a process of its own. Beside the attacker an honest island goes
through its rounds: each of them must count, and the anchor must be what rosters make of
the honest values, because every update that the attacker can have counted is zero.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from atoll.data import Ask, DataSpec
from atoll.errors import AtollError, LeaseLost
from atoll.exchange import CoordinatorExchange, Frame
from atoll.exchange.calls import (
    AgreedCall,
    Call,
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
from atoll.protocol import Heartbeat, HeldRound, JoinReply, JoinRequest, Stats
from atoll.routes import ROUTES
from atoll.security import Role
from atoll.testing.fixtures import (
    MODEL,
    OUTER,
    anchor_of,
    enter,
    plain_settings,
    update_of,
)
from atoll.weights import FragmentState
from atoll.wire import FrameKind, Header, TrainingProgress, Verdict, with_body
from tests.coordinator.apart import Apart, serving_apart
from tests.coordinator.nearly import Asking, nearly, of_call, of_operator, route_of
from tests.coordinator.serving import asking, bearer
from tests.http.loopback import PATIENCE_S, Dialogue

UNAVAILABLE = {503, 507}
"""All that a coordinator may answer of 500 and above."""

ROUND_EVERY = 8
"""The honest island makes a round after so many requests of the attacker."""

EXTREMES = (0, 1, 2, 7, 2**16, 2**31, 2**32, 2**40, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
NAMES = ("mallory", "honest", "ghost", "a" * 64)
MALLORY = "mallory"


@dataclass
class Honest:
    """An island that takes 2 from the anchor in every round, and counts itself."""

    served: Apart
    exchange: CoordinatorExchange
    joined: JoinReply
    round: int = 0
    expected: float = 0.0

    def make_round(self) -> None:
        """Bring 2.0 until a round counts it, and enter what that takes from the anchor.

        The attacker's zeros may have closed the round before: then the next is tried.
        """
        until_s, is_counted = time.monotonic() + PATIENCE_S, False
        while not is_counted:
            assert time.monotonic() < until_s, self.why_not()
            update = update_of(self.exchange, self.joined, 2.0, round=self.round + 1)
            self.exchange.publish(update)
            is_counted = self._take(until_s)

    def _take(self, until_s: float) -> bool:
        """Wait until the open round is over; return whether it counted this island."""
        outcome = None
        while outcome is None:
            assert time.monotonic() < until_s, self.why_not()
            outcome = self.exchange.outcome(0, self.round + 1, wait_s=1.0)
        self.round = outcome.position.rounds[0] - 1
        roster = outcome.agreed.header.roster
        assert roster is not None
        entry = roster.entry("honest")
        assert entry is not None
        assert entry.verdict is not Verdict.REFUSED, roster
        if entry.verdict is not Verdict.COUNTED:
            return False
        # the mean of one 2.0 and of zeros, by the same fp32 division
        mean = np.float32(2.0) / np.float32(len(roster.counted))
        self.expected = float(np.float32(self.expected) - mean)
        return True

    def why_not(self) -> str:
        """Return what the run says of a round that does not close or does not count."""
        heard = asking(self.served, "GET /status", role=Role.OPERATOR)
        return f"round {self.round + 1} does not count: {heard.body.decode()}"


@dataclass
class Mallory:
    """A member with the token and a key of its own, that comes back after leaving."""

    served: Apart
    exchange: CoordinatorExchange
    joined: JoinReply
    token: str = field(repr=False)
    stack: ExitStack = field(repr=False)

    def calls(self, round: int, state: Frame) -> list[Call]:
        """Return one right call of each kind, for the round that is open."""
        self._come_back()
        life = self.joined.incarnation
        beat = Heartbeat(
            island=MALLORY, incarnation=life, step=0, stats=Stats(version="1")
        )
        update = update_of(self.exchange, self.joined, 0.0, round=round)
        return [
            JoinCall(JoinRequest(model=MODEL, island="ghost"), b"ghost", b"nonce"),
            JoinCall(JoinRequest(model=MODEL, island=None), b"ghost", b"nonce"),
            HeartbeatCall(beat),
            LeaveCall(MALLORY, life),
            PublishCall(update, beat),
            OfferCall(update.header),
            AgreedCall(MALLORY, life, (update.header,)),
            OutcomeCall(0, round, 0.0, beat),
            StateCall(0),
            FoundCall(MALLORY, life, (state,)),
            RecoverCall(MALLORY, life, state, ()),
            KeepCall(MALLORY, life, "0" * 64, 0, b"part"),
            DataCall(MALLORY, life, DataSpec(rows=100)),
            ClaimCall(Ask(island=MALLORY, incarnation=life, number=1)),
        ]

    def _come_back(self) -> None:
        beat = Heartbeat(island=MALLORY, incarnation=self.joined.incarnation, step=0)
        try:
            self.exchange.heartbeat(beat, at_once=True)
        except LeaseLost:
            self.exchange, self.joined = member(self.served, MALLORY, self.stack)


@dataclass
class Scene:
    """A coordinator, an honest island and an attacker."""

    served: Apart
    honest: Honest
    mallory: Mallory
    calls: list[Call] = field(default_factory=list)
    """What the attacker may say rightly just now."""

    asked: int = 0

    def go_on(self) -> None:
        """Let the honest island go on when it is its turn, as if nothing happened."""
        self.asked += 1
        if self.asked % ROUND_EVERY == 0:
            self.honest.make_round()
            assert anchor_of(self.honest.exchange) == self.honest.expected
        self.prepare()

    def prepare(self) -> None:
        """Make the calls of the next request: nothing may fail while one is drawn."""
        state = self.honest.exchange.state(0)
        self.calls = self.mallory.calls(self.honest.round + 1, state)

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = (self.served.directory / "events.jsonl").read_text().splitlines()
        return [each for each in map(json.loads, lines) if each["event"] == name]


def member(
    served: Apart, name: str, stack: ExitStack
) -> tuple[CoordinatorExchange, JoinReply]:
    """Join as an island whose key is its name."""
    line = stack.enter_context(served.line())
    nonce = np.random.default_rng().bytes(16)
    exchange = CoordinatorExchange(line, key=name.encode(), nonce=nonce)
    return exchange, enter(exchange, name)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    directory = tmp_path_factory.mktemp("fuzz") / "run"
    given = plain_settings().to_dict()
    # Members that the attacker invents are waited for, but not for long.
    given["limits"] |= {"deadline_min_s": 0.05, "deadline_max_s": 0.1}
    with ExitStack() as stack:
        served = stack.enter_context(serving_apart(directory, given))
        honest = Honest(served, *member(served, "honest", stack))
        mallory = member(served, MALLORY, stack)
        token = bearer(directory)
        scene = Scene(served, honest, Mallory(served, *mallory, token, stack))
        scene.prepare()
        yield scene
        honest.make_round()
        assert anchor_of(honest.exchange) == honest.expected
        assert scene.events("fault") == []
        assert scene.events("disk_failed") == []


def answered(scene: Scene, request: Asking) -> tuple[int, bytes] | None:
    """Return status and body, or None if the connection ended without an answer."""
    with Dialogue(scene.served.address) as dialogue:
        with contextlib.suppress(ConnectionError):  # a refusal may come before the end
            dialogue.say(request.to_bytes())
            if request.declared != str(len(request.body)):
                dialogue.sock.shutdown(socket.SHUT_WR)
        try:
            status, headers = dialogue.hear_head()
            while status == 100:
                status, headers = dialogue.hear_head()
            is_empty = request.method == "HEAD" or status == 204
            size = 0 if is_empty else int(headers.get("content-length", "0"))
            return status, dialogue.hear_bytes(size)
        except (EOFError, ConnectionError):
            return None


def require_no_fault(request: Asking, heard: tuple[int, bytes] | None) -> None:
    if heard is None or heard[0] < 400:
        return
    status, body = heard
    assert status < 500 or status in UNAVAILABLE, (status, body)
    if request.method != "HEAD" and status != 416:
        said = json.loads(body)
        assert said["error"]
        assert said["message"]


def fuzzing(examples: int) -> Callable[[Any], Any]:
    """Return the settings of a test that asks so often."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),  # requests have changed the run: nothing repeats
        suppress_health_check=checks,
    )


def operators(token: str) -> list[Asking]:
    """Return what only an operator may ask, with the token of an island."""
    sets: dict[str, Any] = {"values": {"outer.lr": 0.5}}
    gets = ("health", "status", "metrics", "anchor", "bundle", "code", "belongings")
    return [
        *(of_operator("GET", f"/{each}", token) for each in gets),
        of_operator("GET", "/events", token, query="after=0"),
        of_operator("GET", "/history", token, query="rows=9"),
        of_operator("PUT", f"/code/{'0' * 64}", token, {}),
        of_operator("POST", "/control/set", token, sets),
        of_operator("POST", "/control/evict", token, {"island": "honest"}),
        *(of_operator("POST", f"/control/{each}", token) for each in ("pause", "stop")),
        of_operator("POST", "/invites", token),
        of_operator("POST", "/invites/redeem", token, {"code": "0" * 32}),
    ]


def requests(scene: Scene) -> list[Asking]:
    """Return one right request for every route, as the attacker would send it."""
    token = scene.mallory.token
    info = of_operator("GET", "/info", token)
    constants = [
        of_operator("GET", path, token).saying("atoll-protocol", "2")
        for path in ("/constants", f"/constants/{'0' * 64}")
    ]
    calls = [request_of(scene, call) for call in scene.calls]
    return [info, *constants, *calls, *operators(token)]


def request_of(scene: Scene, call: Call) -> Asking:
    return of_call(call, scene.mallory.token, run=scene.served.run)


def test_every_route_of_an_island_is_asked(scene: Scene) -> None:
    """The samples that are spoilt below leave out none of an island's routes."""
    found = {route_of(each) for each in requests(scene)}

    assert {route for route in ROUTES if route.is_call} <= found


@given(data=st.data())
@fuzzing(600)
def test_spoilt_requests_are_no_faults(scene: Scene, data: st.DataObject) -> None:
    """With token and proof or without, an answer comes, and the honest island goes on.

    Requests are right but for a few bytes in method, target, headers or body.
    """
    request = data.draw(nearly(requests(scene)))
    if data.draw(st.booleans()):
        request = request.saying("authorization", None)
    note(repr(request))
    heard = answered(scene, request)

    require_no_fault(request, heard)
    scene.go_on()


@st.composite
def claims(draw: st.DrawFn, calls: list[Call]) -> Call:
    """Draw a call that is well formed and says what cannot be."""
    number = st.sampled_from(EXTREMES)
    call = draw(st.sampled_from(calls))
    match call:
        case HeartbeatCall(beat) | OutcomeCall(beat=Heartbeat() as beat):
            beat = replace(
                beat,
                step=draw(number),
                waits_for=draw(st.none() | st.tuples(st.just(0), number)),
                holds=(
                    HeldRound(draw(number), draw(st.binary(min_size=16, max_size=16))),
                ),
            )
            return replace(call, beat=beat)
        case PublishCall(frame, _):
            header = draw(_headers(frame.header))
            return PublishCall(Frame(header, frame.body))
        case OfferCall(header):
            return OfferCall(draw(_headers(header)))
        case AgreedCall():
            return replace(call, updates=(draw(_headers(call.updates[0])),))
        case RecoverCall() | FoundCall():
            return _with_state(call, draw(number), draw(st.sampled_from((0.0, 1e9))))
        case LeaveCall() | KeepCall():
            return replace(call, incarnation=draw(number))
        case JoinCall(request):
            name = draw(st.sampled_from(NAMES))
            request = replace(
                request,
                island=name,
                incarnation=draw(st.none() | number),
                after=draw(number),
            )
            return replace(call, request=request, nonce=draw(st.binary(max_size=40)))
        case _:
            return call


@st.composite
def _headers(draw: st.DrawFn, header: Header) -> Header:
    """Draw the header of an update of zeros, signed, with numbers that cannot be."""
    number = st.sampled_from(EXTREMES)
    changes: dict[str, Any] = {
        "round": number,
        "incarnation": number,
        "weight": number.filter(bool),
        "epoch": number.filter(lambda n: n < 2**32),
        "progress": st.builds(TrainingProgress, inner_steps=number, tokens=number),
        "norm": st.sampled_from((0.0, 1e-300, 1e300)),
        "kind": st.sampled_from((FrameKind.UPDATE, FrameKind.DEPARTING)),
        "base": st.binary(min_size=16, max_size=16),
    }
    keys = draw(st.sets(st.sampled_from(sorted(changes)), min_size=1, max_size=3))
    return replace(header, **{key: draw(changes[key]) for key in sorted(keys)})


def _with_state(
    call: RecoverCall | FoundCall, round: int, value: float
) -> RecoverCall | FoundCall:
    """Return a call that brings invented weights as those after a round."""
    state = FragmentState.found(np.full(3, value, np.float32), "sgd")
    header, body = state.to_frame(
        run=_header_of(call).run,
        fragment=0,
        outer=OUTER,
        island=call.island,
        incarnation=call.incarnation,
    )
    frame = Frame(with_body(replace(header, round=min(round, 2**63)), body), body)
    if isinstance(call, FoundCall):
        return replace(call, states=(frame,))
    return replace(call, state=frame)


def _header_of(call: RecoverCall | FoundCall) -> Header:
    state = call.state if isinstance(call, RecoverCall) else call.states[0]
    return state.header


@given(data=st.data())
@fuzzing(500)
def test_claims_that_cannot_be_change_nothing(
    scene: Scene, data: st.DataObject
) -> None:
    """A member that proves who it is and says anything has no say about the weights."""
    call = data.draw(claims(scene.calls))
    note(repr(call))
    try:
        request = request_of(scene, call)
    except AtollError:
        return  # our own forms cannot say it
    heard = answered(scene, request)

    require_no_fault(request, heard)
    scene.go_on()
