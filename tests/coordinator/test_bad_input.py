"""Who asks wrongly gets a defined answer with a remedy, and changes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atoll.exchange.calls import HeartbeatCall, LeaveCall, OutcomeCall, StateCall
from atoll.island.numpy_model import vector_model
from atoll.protocol import Heartbeat, HeldRound, Stats
from atoll.security import Role
from tests.coordinator.scene import SEE, Scene, Wrong, altered, require_refusal
from tests.coordinator.serving import asking, calling, picture
from tests.http.loopback import Heard

TOLD = Stats(seconds=1.0, wait_s=1.0, loss=9.0)
STRANGER = "x" * 43


def _control(scene: Scene, action: str, body: bytes = b"") -> Heard:
    line = f"POST /control/{action}"
    return asking(scene.coordinator, line, body, role=Role.OPERATOR)


def _beat(scene: Scene, beat: Heartbeat, **headers: Any) -> Heard:
    return calling(scene.coordinator, HeartbeatCall(beat), **headers)


def _zombie(scene: Scene) -> Heartbeat:
    return scene.beat(incarnation=scene.second.incarnation - 1, stats=TOLD)


def _far(scene: Scene) -> Heartbeat:
    holds = (HeldRound(0, scene.update().header.base),)
    return scene.beat(step=10**9, holds=holds)


CALLERS = {
    "no token": Wrong(
        lambda scene: asking(scene.coordinator, "GET /info", role=None),
        401,
        "refused",
        "Set ATOLL_TOKEN_FILE",
    ),
    "a wrong token": Wrong(
        lambda scene: asking(
            scene.coordinator, "GET /info", authorization=f"Bearer atoll_i_{STRANGER}"
        ),
        401,
        "refused",
        "Set ATOLL_TOKEN_FILE",
    ),
    "an island's token where an operator's is needed": Wrong(
        lambda scene: asking(scene.coordinator, "POST /control/stop"),
        403,
        "refused",
        "Ask the operator",
    ),
    "control with a wrong key": Wrong(
        lambda scene: asking(
            scene.coordinator,
            "POST /control/stop",
            authorization=f"Bearer atoll_o_{STRANGER}",
        ),
        401,
        "refused",
        "token of an operator",
    ),
    "another run": Wrong(
        lambda scene: _beat(scene, scene.beat(), atoll_run="another"),
        503,
        "unreachable",
        "Check the address",
    ),
    "another protocol": Wrong(
        lambda scene: _beat(scene, scene.beat(), atoll_protocol="1"),
        400,
        "usage",
        "protocol '1', and this coordinator 2. Run the same version",
    ),
}
COMMANDS = {
    "an unknown action": Wrong(
        lambda scene: _control(scene, "explode"), 400, "usage", "Known are: pause"
    ),
    "a setting that cannot change": Wrong(
        lambda scene: _control(scene, "set", b'{"values":{"wire.up":"int8"}}'),
        400,
        "usage",
        "Settings that can: limits.deadline_max_s",
    ),
    "a setting out of range": Wrong(
        lambda scene: _control(scene, "set", b'{"values":{"outer.lr":-1}}'),
        400,
        "settings",
        "must be a finite number above",
    ),
    "nothing to set": Wrong(
        lambda scene: _control(scene, "set", b'{"values":{}}'), 400, "usage", "Say what"
    ),
    "an eviction of nobody": Wrong(
        lambda scene: _control(scene, "evict", b'{"island":"z"}'),
        400,
        "usage",
        "Known are: a, b",
    ),
    "a command that is no table": Wrong(
        lambda scene: _control(scene, "pause", b"[]"), 400, "usage", SEE
    ),
    "a command nested beyond measure": Wrong(
        lambda scene: _control(scene, "pause", b"[" * 60000), 400, "usage", SEE
    ),
}
LIVES = {
    "a zombie's heartbeat": Wrong(
        lambda scene: _beat(scene, _zombie(scene)), 410, "lease_lost", "Join again"
    ),
    "a zombie's update": Wrong(
        lambda scene: scene.publish(altered(scene.update(), incarnation=0)),
        410,
        "lease_lost",
        "Join again",
    ),
    "a zombie's question": Wrong(
        lambda scene: calling(
            scene.coordinator, OutcomeCall(0, 1, beat=_zombie(scene))
        ),
        410,
        "lease_lost",
        "Join again",
    ),
    "a zombie's leaving": Wrong(
        lambda scene: calling(scene.coordinator, LeaveCall("b", 0)),
        410,
        "lease_lost",
        "Join again",
    ),
    "a stranger's question": Wrong(
        lambda scene: calling(
            scene.coordinator,
            OutcomeCall(0, 1, beat=scene.beat(island="z", stats=TOLD)),
        ),
        410,
        "lease_lost",
        "Join again",
    ),
    "a step that nobody can have made": Wrong(
        lambda scene: _beat(scene, _far(scene)), 409, "refused", "Join again"
    ),
    "a pace of no time": Wrong(
        lambda scene: _beat(scene, scene.beat(step_s=0.0)),
        400,
        "usage",
        r"beat\.step_s=0\.0 must be a finite number above 0\.0",
    ),
    "a pace that is negative, with a question": Wrong(
        lambda scene: calling(
            scene.coordinator, OutcomeCall(0, 1, beat=scene.beat(step_s=-0.5))
        ),
        400,
        "usage",
        r"beat\.step_s=-0\.5 must be a finite number above 0\.0",
    ),
    "a taken name": Wrong(
        lambda scene: scene.join("b", b"a stranger's"), 400, "usage", "another name"
    ),
    "a name whose earlier life is not known": Wrong(
        lambda scene: scene.join("b", b"b"), 409, "name_known", "Join again"
    ),
    "another model": Wrong(
        lambda scene: scene.join("c", b"c", model=vector_model({"w": (4,)})),
        409,
        "model",
        "'w' is .* shape 3 .* in the run, and .* shape 4 .* in this island. Build",
    ),
    "the state of a fragment that is not there": Wrong(
        lambda scene: calling(scene.coordinator, StateCall(7)),
        409,
        "refused",
        "the run has 1",
    ),
}
WRONG = CALLERS | COMMANDS | LIVES


@pytest.mark.parametrize("name", WRONG)
def test_who_asks_wrongly_is_answered_and_changes_nothing(
    name: str, scene: Scene
) -> None:
    """Status, code and remedy are defined; rounds, members and journal stay."""
    require_refusal(scene, WRONG[name])


TRICKS = (
    "/islands/..",
    "/islands/%2e%2e",
    "/islands/a%2f..%2fb",
    "/islands/a%5cb",
    "/islands/%00",
    "/islands/a%0d%0aX",
    "/islands/%ff",
    "/islands/" + "n" * 256,
    "/islands/../control/stop",
    "/state/..%2f..%2fisland.token",
    "//control/stop",
    "/control/../control/stop",
    "/" + "a" * 5000,
)


@pytest.mark.parametrize("path", TRICKS, ids=lambda path: path[:30])
def test_no_spelling_of_a_path_leads_elsewhere(path: str, scene: Scene) -> None:
    """It is refused before anybody looks a name up; no route opens another."""
    before = picture(scene.coordinator)
    for method in ("GET", "POST", "DELETE"):
        heard = asking(scene.coordinator, f"{method} {path}", b"{}")
        assert heard.status in (400, 403, 404, 405, 414), heard

    assert picture(scene.coordinator) == before


def test_an_invite_opens_once(scene: Scene) -> None:
    """The second who brings the code is refused, and told whom to ask."""
    made = asking(scene.coordinator, "POST /invites", role=Role.OPERATOR)
    code = json.dumps({"code": json.loads(made.body)["code"]}).encode()
    before = picture(scene.coordinator)
    first = asking(scene.coordinator, "POST /invites/redeem", code, role=None)
    second = asking(scene.coordinator, "POST /invites/redeem", code, role=None)

    assert first.status == 200
    assert json.loads(first.body)["token"].startswith("atoll_i_")
    assert (second.status, second.error) == (409, "refused")
    assert "Ask for a new invite" in json.loads(second.body)["message"]
    assert picture(scene.coordinator) == before
