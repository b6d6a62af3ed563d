"""One island with a valid token must not be able to replace the weights of a run.

0.1.0 took any state that an island reported to hold, at any round, without a restart.
"""

from __future__ import annotations

import json
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atoll.errors import Refused
from atoll.exchange import Frame
from atoll.exchange.calls import (
    Call,
    HeartbeatCall,
    OutcomeCall,
    PublishCall,
    RecoverCall,
)
from atoll.protocol import HeldRound, Position
from atoll.testing.fixtures import OUTER, plain_settings, update_of
from atoll.weights import FragmentState
from tests.attacks.actors import Actor, acting, events_of, redirected, status_of
from tests.attacks.conftest import Serve
from tests.coordinator.apart import serving_apart
from tests.coordinator.serving import asking, journal_digest

FAR = 2**40
SETTINGS = plain_settings(start_islands=2, quorum=1).to_dict()


def state_of(actor: Actor, value: float, round: int) -> Frame:
    """Return a state of three equal values, whether or not the run ever had it."""
    state = FragmentState(np.full(3, value, np.float32), [], round=round)
    header, body = state.to_frame(
        run=actor.joined.run,
        fragment=0,
        outer=OUTER,
        island=actor.island,
        incarnation=actor.joined.incarnation,
    )
    return Frame(header, body)


def held(state: Frame, receipt: bytes = b"") -> HeldRound:
    """Return the holding of a state."""
    return HeldRound(state.header.round, state.header.base, receipt)


def claims(actor: Actor, state: Frame) -> list[Call]:
    """Return every call that says that an island holds a state, or brings it."""
    beat = actor.beat(held(state))
    forged = replace(state, receipt=bytes(16))
    return [
        HeartbeatCall(beat),
        OutcomeCall(0, 1, beat=beat),
        PublishCall(update_of(actor.exchange, actor.joined, 1.0), beat),
        HeartbeatCall(actor.beat(held(state, bytes(16)))),
        RecoverCall(actor.island, actor.joined.incarnation, state, ()),
        RecoverCall(actor.island, actor.joined.incarnation, forged, ()),
    ]


def test_an_invented_state_is_refused_by_every_call(serve: Serve) -> None:
    """A coordinator that has lost nothing takes nothing, and its rounds close."""
    served = serve(start_islands=2, quorum=1)
    with acting(served, "a", "m") as (a, m):
        before = journal_digest(served.directory)
        for round in (1, 2, 50, FAR, 2**64 - 1):
            for call in claims(m, state_of(m, 666.0, round)):
                with pytest.raises(Refused, match=rf"'m'.* round {round} .*receipt"):
                    m.line.call(call)
        assert journal_digest(served.directory) == before
        m.publish(1.0, round=1)
        a.publish(3.0, round=1)

        assert a.outcome(1).agreed.header.round == 1
        assert a.exchange.state(0).body.view(np.float32).tolist() == [-2.0] * 3


def test_a_receipt_proves_nothing_but_what_it_was_given_for(serve: Serve) -> None:
    """That of round 1 does not prove round 2, nor another state of round 1."""
    served = serve(start_islands=2, quorum=1)
    with acting(served, "a", "m") as (a, m):
        a.publish(3.0, round=1)
        m.publish(1.0, round=1)
        receipt = m.outcome(1).receipt

        assert receipt
        for state in (state_of(m, -2.0, 2), state_of(m, 666.0, 2)):
            with pytest.raises(Refused, match="receipt"):
                m.line.call(HeartbeatCall(m.beat(held(state, receipt))))
        assert m.line.call(HeartbeatCall(m.beat(held(state_of(m, 666.0, 1), receipt))))
        assert status_of(served)["rounds"] == [2]


def test_a_rolled_back_journal_takes_only_what_the_run_had(tmp_path: Path) -> None:
    """The honest island brings round 2 back; an invented one is refused meanwhile.

    The copy is from before the round. Who brought the state is in the events.
    """
    directory = tmp_path / "run"
    with serving_apart(directory, SETTINGS) as served, acting(served, "a", "m") as both:
        commit(*both, round=1)
    shutil.copytree(directory / "journal", tmp_path / "copy")
    with serving_apart(directory, SETTINGS) as served, redirected(served, *both):
        commit(*both, round=2)
        lost = both[0].exchange.state(0)
    shutil.rmtree(directory / "journal")
    shutil.copytree(tmp_path / "copy", directory / "journal")
    a, m = both
    with serving_apart(directory, SETTINGS) as served, redirected(served, *both):
        waits = a.beat(held(lost), waits_for=(0, 3))
        with pytest.raises(Refused, match=r"'m'.* round 3 .*receipt"):
            m.line.call(HeartbeatCall(m.beat(held(state_of(m, 666.0, 3)))))
        m.line.call(HeartbeatCall(m.beat()))
        position = a.exchange.heartbeat(waits, at_once=True)

        assert position.lost == (0,)
        assert "lost rounds 2 to 2 of fragment 0" in status_of(served)["why"]
        assert "waits for a to bring" in status_of(served)["why"]
        with pytest.raises(Refused, match="receipt"):
            m.exchange.publish(state_of(m, 666.0, 2))
        a.exchange.publish(replace(state_of(a, -4.0, 2), receipt=b""))

        assert status_of(served)["rounds"] == [3]
        assert a.exchange.state(0).body.tobytes() == lost.body.tobytes()
    brought = [(e["island"], e["round"]) for e in events_of(served, "state_recovered")]
    refused = {(e["island"], e["round"]) for e in events_of(served, "holding_refused")}
    assert brought == [("a", 2)]
    assert refused == {("m", 3), ("m", 2)}


def commit(a: Actor, m: Actor, *, round: int) -> None:
    """Let both islands publish, and take the outcome."""
    for actor in (a, m):
        actor.exchange.heartbeat(actor.beat(), at_once=True)
        actor.publish(2.0, round=round)
    for actor in (a, m):
        actor.outcome(round)


def test_invented_rosters_do_not_come_back_with_a_state(tmp_path: Path) -> None:
    """An outcome without the run's receipt is refused: rosters say who counted."""
    directory = tmp_path / "run"
    with serving_apart(directory, SETTINGS) as served, acting(served, "a", "m") as both:
        copied = tmp_path / "copy"
        shutil.copytree(directory / "journal", copied)
        commit(*both, round=1)
        outcome = both[1].exchange.outcome(0, 1, wait_s=1.0)
        state = both[1].exchange.state(0)
    assert outcome is not None
    shutil.rmtree(directory / "journal")
    shutil.copytree(copied, directory / "journal")
    m = both[1]
    roster = outcome.agreed.header.roster
    assert roster is not None
    entries = tuple(replace(entry, tokens=2**60) for entry in roster.entries)
    forged = replace(outcome.agreed.header, roster=replace(roster, entries=entries))
    with serving_apart(directory, SETTINGS) as served, redirected(served, *both):
        both[0].line.call(HeartbeatCall(both[0].beat()))
        m.exchange.heartbeat(m.beat(held(state), waits_for=(0, 2)), at_once=True)
        call = RecoverCall("m", m.joined.incarnation, state, (forged,))
        for receipts in ((), (bytes(16),), (outcome.agreed.receipt,)):
            with pytest.raises(Refused, match=r"'m' brings the .*receipt"):
                m.line.call(replace(call, receipts=receipts))
        honest = replace(
            call,
            outcomes=(outcome.agreed.header,),
            receipts=(outcome.agreed.receipt,),
        )

        assert isinstance(m.line.call(honest), Position)
        assert status_of(served)["rounds"] == [2]
        assert status_of(served)["tokens"] == 0


def test_the_key_of_receipts_stays_with_its_coordinator(serve: Serve) -> None:
    """Only the owner can read the file, and no route and no record gives it away."""
    served = serve(start_islands=1)
    path = served.directory / "journal" / "receipts.key"
    key = path.read_bytes()[:32]

    assert len(set(key)) > 8
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with acting(served, "a"):
        pass
    others = [p for p in served.directory.rglob("*") if p.is_file() and p != path]
    assert not any(key in p.read_bytes() for p in others)
    state = asking(served, "GET /state/0")
    assert state.status == 200
    assert key not in state.body + json.dumps(status_of(served)).encode()
