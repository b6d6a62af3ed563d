"""What an island refuses to adopt, and what a run does not let an island spoil."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import LeaseLost, SettingsError, Unreachable, UsageError
from atoll.exchange.api import Info, Limits, info_parts
from atoll.http import Request, Response, as_json
from atoll.island import Host
from atoll.island.connection import connect
from atoll.island.environment import CredentialPaths
from atoll.protocol import JoinRequest
from atoll.protocol.events import Leave
from atoll.runtime import SystemClock
from atoll.security import Role, make_token
from atoll.settings import RunSettings
from atoll.testing import VectorView
from atoll.testing.fixtures import (
    MODEL,
    anchor_of,
    enter,
    outcome_of,
    plain_settings,
    update_of,
)
from atoll.wire.digests import view_of
from tests.coordinator.scene import opened
from tests.coordinator.serving import Islands, picture, serving
from tests.http.loopback import listening

LEASE_S = 15.0


def info() -> dict[str, Any]:
    """Return what a coordinator of this version says of a run."""
    answer = info_parts(
        Info(
            run="lagoon",
            version="1.2.3",
            settings=RunSettings(),
            epoch=0,
            model_fingerprint="",
            lease_s=LEASE_S,
            heartbeat_s=3.0,
            limits=Limits(body_bytes=2**36),
        )
    )
    said: dict[str, Any] = json.loads(view_of(answer.body[0]).tobytes())
    return said


def surroundings(directory: Path, **more: Any) -> CredentialPaths:
    """Return those of a user who has a token."""
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text(make_token(Role.ISLAND).reveal())
    keys = directory / "keys"
    return CredentialPaths(credentials=directory, keys=keys, token_file=token, **more)


@contextmanager
def saying(said: object) -> Iterator[str]:
    """Answer every question with this, and return where."""

    def handle(request: Request) -> Response:
        return said if isinstance(said, Response) else as_json(said)

    with listening(handle) as listener:
        yield "http://{}:{}".format(*listener.address)


def _without(table: str, key: str) -> dict[str, Any]:
    said = info()
    del said["settings"][table][key]
    return said


def _with(table: str, key: str, value: object) -> dict[str, Any]:
    said = info()
    said["settings"][table][key] = value
    return said


ALTERED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "an older coordinator that lacks a setting": (
        lambda: _without("sync", "overlap_steps"),
        SettingsError,
        "sync.overlap_steps",
    ),
    "a newer coordinator with one more": (
        lambda: _with("sync", "overlap_more", 1),
        SettingsError,
        "sync.overlap_more",
    ),
    "a setting that means something else": (
        lambda: info() | {"fingerprint": "0" * 64},
        SettingsError,
        "fingerprint",
    ),
    "another protocol": (
        lambda: {"protocol": 1, "version": "0.1.0"},
        UsageError,
        r"protocol 1 .*0\.1\.0.* this island 2. Run the same version",
    ),
    "another program": (
        lambda: {"hello": "world"},
        UsageError,
        "no coordinator of Atoll. Check the address",
    ),
    "no JSON at all": (
        lambda: Response(body=b"<html>"),
        UsageError,
        "no JSON",
    ),
    "an error of something in between": (
        lambda: as_json({}, status=502),
        Unreachable,
        "502",
    ),
    "a lease that no heartbeat keeps": (
        lambda: info() | {"heartbeat_s": LEASE_S},
        UsageError,
        "heartbeat_s=15.0 .* info.lease_s=15.0. Run",
    ),
}


@pytest.mark.parametrize("name", ALTERED)
def test_an_island_adopts_nothing_that_it_does_not_know(
    name: str, tmp_path: Path
) -> None:
    """It is refused by name before the island has joined, and nothing is defaulted."""
    make, kind, message = ALTERED[name]
    with saying(make()) as url, pytest.raises(kind, match=message):
        connect(
            url,
            island="a",
            paths=surroundings(tmp_path),
            clock=SystemClock(),
            wait_s=0.0,
        )


@pytest.mark.parametrize("heartbeat_s", [20.0, 7.6, 0.0, float("nan")])
def test_a_heartbeat_that_does_not_keep_the_lease_is_refused(
    heartbeat_s: float, tmp_path: Path
) -> None:
    """The message has both values, and the longest that would do."""
    said = rf"ATOLL_HEARTBEAT_S={heartbeat_s:g} .* lease of 15 .* at most 7\.5"
    around = surroundings(tmp_path, heartbeat_s=heartbeat_s)
    with saying(info()) as url, pytest.raises(UsageError, match=said):
        connect(url, island="a", paths=around, clock=SystemClock())


class JumpingClock:
    """The machine's clock, which a test sets forward. Implements `Clock`."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        self._clock = SystemClock()

    def now_s(self) -> float:
        return self._clock.now_s() + self._ahead_s

    def jump(self, seconds: float) -> None:
        self._ahead_s += seconds


def test_a_clock_that_jumps_costs_nobody_its_place(tmp_path: Path) -> None:
    """Leases run out at once; who speaks again is live, and its update counts."""
    clock = JumpingClock()
    settings = plain_settings(start_islands=2, quorum=2)
    with opened(tmp_path / "run", settings, clock=clock) as scene:
        before = picture(scene.coordinator)
        clock.jump(86400.0)
        scene.a.heartbeat(scene.beat(), at_once=False)
        after = picture(scene.coordinator)
        scene.b.publish(scene.update())

        assert {**after, "status": ""} == {**before, "status": ""}
        assert anchor_of(scene.a) == -2.0
        assert scene.island("b")["state"] == "live"


def test_a_norm_beyond_the_median_is_refused_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    """From three on the round's median decides; status says why it did not count."""
    settings = plain_settings(start_islands=3)
    with ExitStack() as stack:
        coordinator = stack.enter_context(serving(tmp_path / "run", settings))
        attach = Islands(coordinator, stack)
        names = ("a", "b", "c")
        exchanges = [attach(key=name.encode()) for name in names]
        joined = [enter(*pair) for pair in zip(exchanges, names, strict=True)]
        for exchange, reply, value in zip(
            exchanges, joined, (1.0, 3.0, 31.0), strict=True
        ):
            exchange.publish(update_of(exchange, reply, value))

        assert anchor_of(exchanges[0]) == -2.0
        assert outcome_of(exchanges[2], 1).position.rounds == (2,)
        (row,) = (
            each for each in coordinator.status()["islands"] if each["island"] == "c"
        )
        assert (row["refused"], row["refused_because"][:5]) == (1, "norm:")


def test_an_evicted_island_is_told_by_whom_and_what_it_loses(tmp_path: Path) -> None:
    """Its next update ends it; the step that no round has is shown."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(serving(tmp_path / "run", plain_settings()))
        exchange = Islands(coordinator, stack)(key=b"a")
        request = JoinRequest(model=MODEL, island="a")
        host = Host(exchange, VectorView(), request)
        host.stepped()
        coordinator._threaded_service.change(Leave("a", 1, reason="evicted"))
        with pytest.raises(LeaseLost, match="'a' was evicted by an operator"):
            host.sync_now()
        host.leave()

    assert host.counters.metrics()["atoll/not_counted_steps"] == 1
