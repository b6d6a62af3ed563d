"""One token, thousands of names: joined, left behind, and joined again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atoll.coordinator.routes import BURST
from atoll.coordinator.service import Service
from atoll.disk import SystemDisk
from atoll.errors import UsageError
from atoll.exchange import CoordinatorExchange, Frame
from atoll.exchange.calls import FoundCall, JoinCall, LeaveCall, PublishCall
from atoll.protocol import JoinReply, JoinRequest
from atoll.protocol.join_leave import MAX_IDLE_NAMES
from atoll.protocol.membership import LEASE_S
from atoll.settings.sections import DEFAULT_ISLANDS
from atoll.testing.fixtures import MODEL, OUTER, enter, plain_settings
from atoll.weights import FragmentState
from atoll.wire import FrameKind, Header, with_body
from tests.attacks.conftest import Serve
from tests.attacks.islands import islands_of, status_of
from tests.coordinator.apart import Apart, serving_apart
from tests.coordinator.serving import calling


def join_call(name: str) -> JoinCall:
    key = name.encode()
    return JoinCall(JoinRequest(model=MODEL, island=name), key, key)


def names_of(service: Service) -> set[str]:
    return set(service.state.members.known)


def test_a_run_without_max_islands_has_a_bound(serve: Serve) -> None:
    """The 65th live name is refused, and an honest member goes on."""
    coordinator = serve()
    with islands_of(coordinator, "honest") as (honest,):
        for number in range(DEFAULT_ISLANDS - 1):
            assert calling(coordinator, join_call(f"name-{number}")).status == 200
        heard = calling(coordinator, join_call("one more"))

        assert heard.status == 400
        assert b"max_islands=64" in heard.body
        assert len(status_of(coordinator)["islands"]) == DEFAULT_ISLANDS
        honest.exchange.leave("honest", 1)


def test_one_address_joins_at_a_bounded_rate(tmp_path: Path) -> None:
    """Names that join and leave at once stop at the burst; time stands still."""
    settings = plain_settings().to_dict()
    with serving_apart(tmp_path / "run", settings, is_still=True) as coordinator:
        with coordinator.line() as line:
            enter(CoordinatorExchange(line, key=b"a", nonce=b"a"), "a")
        joins = range(1, BURST + 20)
        statuses = [_join_and_leave(coordinator, f"name-{number}") for number in joins]

        assert statuses == [200] * (BURST - 1) + [503] * 20
        assert len(status_of(coordinator)["islands"]) <= BURST


def _join_and_leave(coordinator: Apart, name: str) -> int:
    heard = calling(coordinator, join_call(name))
    if heard.status == 200:
        assert calling(coordinator, LeaveCall(name, 1)).status == 204
    return heard.status


class Crowd:
    """A coordinator's service on a disk, in time that a test moves."""

    def __init__(self, directory: Path) -> None:
        self.disk = SystemDisk(directory)
        settings = plain_settings()
        self.service = Service.create(self.disk, settings, run="run", now_s=0.0)
        self.now_s = 0.0
        self.keeper = self.join("keeper")
        state = FragmentState.found(np.zeros(3, np.float32), "sgd")
        frame = Frame(*state.to_frame(run="run", fragment=0, outer=OUTER))
        self.service.handle(FoundCall("keeper", 1, (frame,)), self.now_s)

    def count(self) -> None:
        """Let an update of the keeper count."""
        body = np.ones(3, np.float32).view(np.uint8)
        header = Header(
            kind=FrameKind.UPDATE,
            run="run",
            fragment=0,
            round=1,
            island="keeper",
            incarnation=1,
            base=self.service.weights[0].digest,
            elements=3,
            norm=float(np.sqrt(3.0)),
        )
        frame = Frame(with_body(header, body), body)
        self.service.handle(PublishCall(frame), self.now_s)
        assert self.service.state.counted.of("keeper")

    def restart(self) -> None:
        self.service = Service.open(self.disk, now_s=self.now_s)

    def join(self, name: str) -> JoinReply:
        self.now_s += 1.0
        reply = self.service.handle(join_call(name), self.now_s)
        assert isinstance(reply, JoinReply)
        return reply

    def pass_by(self, name: str) -> None:
        """Join, and leave without an update."""
        joined = self.join(name)
        self.service.handle(LeaveCall(name, joined.incarnation), self.now_s)


def test_names_that_never_counted_are_forgotten(tmp_path: Path) -> None:
    """Of seven hundred names that came and went, some three hundred stay known.

    Who counted stays, with its slot; and a restart knows the same names.
    """
    crowd = Crowd(tmp_path / "journal")
    crowd.count()
    for number in range(700):
        crowd.pass_by(f"name-{number}")

    known = names_of(crowd.service)
    assert "keeper" in known
    assert len(known) <= MAX_IDLE_NAMES + DEFAULT_ISLANDS
    slots = [each.slot for each in crowd.service.state.members.known.values()]
    assert len(set(slots)) == len(slots)
    assert max(slots) <= len(known)

    crowd.restart()
    assert names_of(crowd.service) == known
    assert crowd.service.state.members.known["keeper"].slot == crowd.keeper.slot


def test_a_forgotten_name_may_come_back(tmp_path: Path) -> None:
    """As its first life, in whatever slot is free."""
    crowd = Crowd(tmp_path / "journal")
    crowd.pass_by("early")
    for number in range(2 * MAX_IDLE_NAMES):
        crowd.pass_by(f"name-{number}")
    assert "early" not in names_of(crowd.service)

    assert crowd.join("early").incarnation == 1


def test_silent_names_make_room_too(tmp_path: Path) -> None:
    """A name that never leaves and never speaks again is idle after its lease."""
    crowd = Crowd(tmp_path / "journal")
    for number in range(2 * MAX_IDLE_NAMES):
        crowd.now_s += LEASE_S  # the name before has fallen silent by then
        crowd.join(f"name-{number}")

    assert len(names_of(crowd.service)) <= MAX_IDLE_NAMES + DEFAULT_ISLANDS


def test_after_a_restart_gone_names_do_not_fill_the_run(tmp_path: Path) -> None:
    """They count as live for a lease, but newcomers are not refused for them."""
    crowd = Crowd(tmp_path / "journal")
    for number in range(2 * DEFAULT_ISLANDS):
        crowd.now_s += LEASE_S
        crowd.join(f"name-{number}")
    crowd.restart()

    assert crowd.join("newcomer").incarnation == 1


def test_a_full_run_names_the_setting(tmp_path: Path) -> None:
    """Each live name counts, whoever holds it."""
    crowd = Crowd(tmp_path / "journal")
    for number in range(DEFAULT_ISLANDS - 1):
        crowd.service.handle(join_call(f"name-{number}"), crowd.now_s)

    with pytest.raises(UsageError, match="max_islands=64"):
        crowd.service.handle(join_call("one more"), crowd.now_s)
