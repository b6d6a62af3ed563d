"""Islands of an asynchronous run at a coordinator, over real connections too."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from atoll import RunSettings
from atoll.coordinator import Service
from atoll.errors import OutcomeLost
from atoll.exchange import CoordinatorExchange, Outcome
from atoll.exchange.calls import Call, HeartbeatCall, OutcomeCall, Reply
from atoll.island import Host
from atoll.protocol import Heartbeat, HeldRound, JoinReply, JoinRequest, Reception
from atoll.runtime import SystemRuntime
from atoll.simulate import SimDisk
from atoll.testing import VectorView, vector_model
from atoll.testing.fixtures import MODEL, plain_settings
from tests.coordinator.desk import join, update
from tests.coordinator.serving import line_to, serving

TOKENS, TIMEOUT_S = 600, 60.0
SETTINGS = RunSettings.from_dict(
    {
        "run": {"start_islands": 3, "end_tokens": TOKENS},
        "sync": {"mode": "async", "sync_every": 8, "overlap_steps": 3},
        "async": {"grace_s": 0.0},
        "wire": {"up": "e3m0", "down": "bf16"},
    }
)


@dataclass
class Ended:
    """An island at the end of its run."""

    digest: str
    losses: int
    counted: int
    tokens: int


def live(coordinator: object, name: str, ended: dict[str, Ended]) -> None:
    """Train to the end of the run; the islands i0, i1, i2 do more work each."""
    number = int(name[1:])
    rng, view = np.random.default_rng(number), VectorView()
    with ExitStack() as stack:
        line = stack.enter_context(line_to(coordinator))  # type: ignore[arg-type]
        exchange = CoordinatorExchange(line, key=name.encode(), nonce=b"1")
        request = JoinRequest(model=vector_model({"w": (3000,)}), island=name)
        host = Host(exchange, view, request)
        while not host.has_ended:
            for _ in range(1 + 20 * number):
                noise = rng.normal(size=3000).astype(np.float32)
            view.local[0] += noise - view.local[0] / 8
            host.count_tokens(1)
            host.stepped()
        host.leave()
    counters = host.counters
    losses = counters.carried + counters.dropped + counters.refused
    ended[name] = Ended(host.digest, losses, counters.counted, host.position.tokens)


def test_islands_of_an_asynchronous_run_end_on_one_state(tmp_path: Path) -> None:
    """Nothing is carried, dropped or refused; the run ends soon after its tokens."""
    ended: dict[str, Ended] = {}
    with serving(tmp_path / "run", SETTINGS) as coordinator:
        threads = [
            threading.Thread(target=live, args=(coordinator, f"i{number}", ended))
            for number in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)

    assert sorted(ended) == ["i0", "i1", "i2"]
    assert len({island.digest for island in ended.values()}) == 1
    for island in ended.values():
        assert island.losses == 0
        assert island.counted >= 2
        assert TOKENS <= island.tokens <= TOKENS + 2 * 3 * 8


GRACE_S = 2.0


class LineTo:
    """A line to a coordinator in this process, which may be restarted."""

    def __init__(self, service: Service) -> None:
        self.service, self.now_s = service, 0.0
        self.runtime = SystemRuntime()
        self.loses_outcomes = False

    def call(self, call: Call) -> Reply:
        if self.loses_outcomes and isinstance(call, OutcomeCall):
            raise OutcomeLost(f"Round {call.round} is over, and its outcome is lost.")
        return self.service.handle(call, self.now_s)


def joined() -> tuple[SimDisk, LineTo, CoordinatorExchange, JoinReply, JoinReply]:
    """Return a run that b has founded, and the exchange with which a has joined."""
    settings = plain_settings(start_islands=2).with_values(
        {"sync.mode": "async", "async.grace_s": GRACE_S}
    )
    disk = SimDisk()
    service = Service.create(disk, settings, run="run", now_s=0.0)
    b, line = join(service, "b"), LineTo(service)
    exchange = CoordinatorExchange(line, key=b"a", nonce=b"1", heartbeat_s=1e6)
    a = exchange.join(JoinRequest(model=MODEL, island="a"))
    return disk, line, exchange, a, b


def close_round(line: LineTo, *islands: JoinReply) -> None:
    """Publish for islands, and let the grace pass."""
    for island in islands:
        line.service.handle(update(line.service, island, 1.0), line.now_s)
    line.now_s += GRACE_S
    line.service.tick(line.now_s)


def restart(disk: SimDisk, line: LineTo, *islands: JoinReply) -> None:
    """Crash the coordinator; the islands report their states."""
    disk.crash()
    line.service = Service.open(disk, now_s=line.now_s)
    state = line.service.weights[0]
    for island in islands:
        beat = Heartbeat(
            island=island.island,
            incarnation=island.incarnation,
            step=0,
            holds=(HeldRound(state.round, state.digest),),
        )
        line.service.handle(HeartbeatCall(beat), line.now_s)


def test_an_update_is_offered_again_until_a_roster_lists_it() -> None:
    """Sealed for round 1, staged in round 2, lost by a restart, and counted there."""
    disk, line, exchange, a, b = joined()
    flight = update(line.service, a, 4.0).frame
    close_round(line, b)
    assert exchange.publish(flight) is Reception.STAGED
    passed = exchange.outcome(0, 1, wait_s=0.0)
    assert isinstance(passed, Outcome)
    assert list(exchange.unconfirmed) == [(0, 1)]

    restart(disk, line, a, b)
    assert not line.service.staged
    assert exchange.outcome(0, 2, wait_s=0.0) is None
    assert set(line.service.state.rounds[0].staged) == {"a"}
    close_round(line)
    listed = exchange.outcome(0, 2, wait_s=0.0, has_body=False)

    assert listed
    assert listed.agreed.header.roster
    assert [entry.age for entry in listed.agreed.header.roster.counted] == [1]
    assert exchange.unconfirmed == {}


def test_an_update_that_a_lost_round_may_have_listed_is_forgotten() -> None:
    """It must not count twice, and its bytes will be overwritten."""
    _, line, exchange, a, b = joined()
    flight = update(line.service, a, 4.0).frame
    close_round(line, b)
    exchange.publish(flight)
    line.loses_outcomes = True
    with pytest.raises(OutcomeLost, match="Round 1 is over"):
        exchange.outcome(0, 1, wait_s=0.0)

    assert exchange.unconfirmed == {}
