"""A stop that is said while a roster is on its way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from atoll.errors import RunEnded
from atoll.exchange import Frame
from atoll.exchange.bucket import BucketReader, StoreExchange, keys
from atoll.protocol import JoinReply, JoinRequest
from atoll.settings import RunSettings
from atoll.testing import vector_model
from atoll.testing.fixtures import OUTER
from atoll.weights import FragmentState, lay_out
from atoll.wire import FrameKind, Header, with_body
from tests.exchange.bucket.test_attacks import URL, Beach, Hooked, once

MODEL = vector_model({"h.0.w": (3,), "h.1.w": (3,)})
SETTINGS = RunSettings.from_dict(
    {
        "run": {"start_islands": 2},
        "sync": {"num_fragments": 2},
        "wire": {"up": "fp32", "down": "fp32"},
        "outer": {"optimizer": "sgd", "lr": 1.0},
    }
)


@dataclass
class Member:
    """An island of a run with two fragments."""

    exchange: StoreExchange
    store: Hooked
    joined: JoinReply

    def publish(self, fragment: int, round: int) -> None:
        body = np.ones(3, np.float32).view(np.uint8)
        header = Header(
            kind=FrameKind.UPDATE,
            run=self.joined.run,
            fragment=fragment,
            round=round,
            island=self.joined.island,
            incarnation=1,
            base=self.exchange.state(fragment).header.base,
            elements=3,
            norm=float(np.sqrt(3.0)),
        )
        self.exchange.publish(Frame(with_body(header, body), body))

    def takes(self, fragment: int, round: int) -> int | None:
        """Wait for an outcome, and return the last round as it is known then."""
        for _ in range(40):
            outcome = self.exchange.outcome(fragment, round, wait_s=1.0)
            if outcome is not None:
                return outcome.position.last_round
        raise AssertionError(f"round {round} of fragment {fragment} is not closed")


def join(beach: Beach, name: str) -> Member:
    store = Hooked(beach.store)
    reader = BucketReader.open(store, beach.time, url=URL)
    exchange = StoreExchange(reader, key=name.encode(), nonce=name.encode())
    joined = exchange.join(JoinRequest(model=MODEL, island=name))
    if joined.is_founder:
        for fragment, layout in enumerate(lay_out(MODEL, SETTINGS)):
            first = FragmentState.found(np.zeros(layout.elements, np.float32), "sgd")
            frame = first.to_frame(run=joined.run, fragment=fragment, outer=OUTER)
            exchange.publish(Frame(*frame))
    return Member(exchange, store, joined)


def test_a_stop_that_a_roster_overtakes_is_for_that_round() -> None:
    """Every fragment ends with the round that was closed in the moment between."""
    beach = Beach(SETTINGS)
    a, b = join(beach, "a"), join(beach, "b")
    a.publish(0, 1)
    b.store.before = once(
        "put_new", keys.roster(0, 1), lambda: beach.say("stop", last_round=0)
    )
    b.publish(0, 1)
    beach.time.sleep(7.0)  # a heartbeat reads the stop

    assert a.takes(0, 1) == b.takes(0, 1) == 1
    a.publish(1, 1)
    b.publish(1, 1)
    assert a.takes(1, 1) == b.takes(1, 1) == 1
    with pytest.raises(RunEnded):
        a.exchange.outcome(0, 2, wait_s=0.0)
    late = BucketReader.open(beach.store, beach.time, url=URL)
    late.read_rosters(0)
    assert late.view.state.last_round == 1


def test_who_has_ended_by_a_stop_does_not_hold_up_the_others() -> None:
    """One has heeded the stop and left; who closed the round beyond it goes on."""
    beach = Beach(SETTINGS)
    a, b = join(beach, "a"), join(beach, "b")
    a.publish(0, 1)

    def stops() -> None:
        beach.say("stop", last_round=0)
        a.exchange._lease.beat()
        with pytest.raises(RunEnded):
            a.exchange.outcome(1, 1, wait_s=0.0)
        a.exchange.leave("a", 1)

    b.store.before = once("put_new", keys.roster(0, 1), stops)
    b.publish(0, 1)
    b.publish(1, 1)

    assert b.takes(1, 1) == 1
