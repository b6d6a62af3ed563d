"""An island with the shared token must not speak for another island.

The attacker knows all that `/status` shows, the victim's name and incarnation among it,
and has joined the run with a key of its own. It does not know the victim's key.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.data import Ask, DataSpec
from atoll.exchange import CoordinatorExchange, Exchange, Frame, Outcome
from atoll.exchange.api import Identity, proof_text, to_request
from atoll.exchange.calls import (
    AgreedCall,
    Call,
    ClaimCall,
    DataCall,
    FoundCall,
    HeartbeatCall,
    KeepCall,
    LeaveCall,
    OfferCall,
    OutcomeCall,
    PublishCall,
    RecoverCall,
)
from atoll.protocol import Heartbeat, HeldRound, JoinReply, JoinRequest
from atoll.protocol.membership import LEASE_S
from atoll.routes import ROUTES, ProofRule
from atoll.testing.fixtures import (
    MODEL,
    OUTER,
    anchor_of,
    enter,
    plain_settings,
    update_of,
)
from atoll.weights import FragmentState
from atoll.wire import blake3_digest
from atoll.wire.digests import view_of
from tests.attacks.conftest import Serve
from tests.coordinator.apart import Apart, serving_apart
from tests.coordinator.serving import asking, calling, line_to, serving
from tests.e2e.rounds_again import ended_well
from tests.e2e.stage import Stage, free_port, settings_for
from tests.http.loopback import Heard

VICTIM, KEY = "victim", b"known to the victim alone"
MALLORY, OWN = "mallory", b"mallory's own"
TIMES = {"seen_s": None, "lease_s": None}
"""What a status says of the time, and not of the island."""

Attack = Callable[[Identity, Frame, Frame], Call]
CALLS: dict[str, Attack] = {
    "heartbeat": lambda who, update, state: HeartbeatCall(beat_of(who)),
    "leave": lambda who, update, state: LeaveCall(who.island, who.incarnation),
    "publish": lambda who, update, state: PublishCall(update),
    "offer": lambda who, update, state: OfferCall(update.header),
    "agreed": lambda who, update, state: AgreedCall(
        who.island, who.incarnation, (update.header,)
    ),
    "outcome": lambda who, update, state: OutcomeCall(0, 1, 0.0, beat_of(who)),
    "found": lambda who, update, state: FoundCall(
        who.island, who.incarnation, (state,)
    ),
    "keep": lambda who, update, state: KeepCall(
        who.island, who.incarnation, "0" * 64, 0, b"part"
    ),
    "recover": lambda who, update, state: RecoverCall(
        who.island, who.incarnation, state, ()
    ),
    "open_data": lambda who, update, state: DataCall(
        who.island, who.incarnation, DataSpec(rows=100)
    ),
    "claim": lambda who, update, state: ClaimCall(
        Ask(island=who.island, incarnation=who.incarnation, number=1)
    ),
}
"""Every route by which an island speaks for itself."""

PROOFS: dict[str, Callable[[Identity, str], str | None]] = {
    "no proof": lambda who, run: None,
    "a proof of nothing": lambda who, run: f"{who.incarnation} {'0' * 64}",
    "another key": lambda who, run: proof_text(who, blake3_digest(OWN), run=run),
    "the key of another run": lambda who, run: proof_text(
        who, blake3_digest(KEY), run="another"
    ),
    "its own proof": lambda who, run: proof_text(
        Identity(MALLORY, who.incarnation), blake3_digest(OWN), run=run
    ),
}


def beat_of(who: Identity) -> Heartbeat:
    """Return a beat that claims rounds which nobody has seen."""
    holds = (HeldRound(2**40, b"invented weights"),)
    return Heartbeat(
        island=who.island, incarnation=who.incarnation, step=0, holds=holds
    )


@dataclass(frozen=True)
class Scene:
    """A run of which the victim and the attacker are members."""

    served: Apart
    victim: Exchange
    mallory: Exchange
    joined: JoinReply
    own: JoinReply

    @cached_property
    def identity(self) -> Identity:
        """What the status shows of the victim."""
        row = self.row(VICTIM)
        return Identity(row["island"], row["incarnation"])

    @property
    def own_identity(self) -> Identity:
        return Identity(MALLORY, self.own.incarnation)

    def row(self, island: str) -> dict[str, Any]:
        rows = json.loads(asking(self.served, "GET /status").body)["islands"]
        found: dict[str, Any] = next(each for each in rows if each["island"] == island)
        return found

    def attack(self, route: str, proof: str) -> Heard:
        """Speak for the victim by one route."""
        who = self.identity
        update = update_of(self.mallory, self.joined, 1000.0)
        call = CALLS[route](who, update, forged(who))
        shown = PROOFS[proof](who, self.served.run)
        return calling(self.served, call, atoll_island_proof=shown)


def forged(who: Identity) -> Frame:
    """Return a state that the attacker has made up."""
    state = FragmentState.found(np.full(3, 1000.0, np.float32), "sgd")
    header, body = state.to_frame(
        run="run",
        fragment=0,
        outer=OUTER,
        island=who.island,
        incarnation=who.incarnation,
    )
    return Frame(header, body)


@contextmanager
def acting(served: Apart) -> Iterator[Scene]:
    with served.line() as line, served.line() as other:
        victim = CoordinatorExchange(line, key=KEY, nonce=b"1")
        mallory = CoordinatorExchange(other, key=OWN, nonce=b"1")
        joined, own = enter(victim, VICTIM), enter(mallory, MALLORY)
        yield Scene(served, victim, mallory, joined, own)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A run whose first round waits for two islands: no attack changes it."""
    directory = tmp_path_factory.mktemp("impersonation") / "run"
    settings = plain_settings(start_islands=2, quorum=2).to_dict()
    with serving_apart(directory, settings) as served, acting(served) as scene:
        yield scene


def test_every_route_of_an_island_is_attacked() -> None:
    """A new route that needs a proof is a new line of `CALLS`."""
    assert CALLS.keys() == {
        each.name for each in ROUTES if each.proof != ProofRule.NEVER
    }


@pytest.mark.parametrize("proof", PROOFS)
@pytest.mark.parametrize("route", CALLS)
def test_nobody_speaks_for_another_island(scene: Scene, route: str, proof: str) -> None:
    """Each call is refused, and the victim is the same member as before."""
    before = scene.row(VICTIM)
    heard = scene.attack(route, proof)
    after = scene.row(VICTIM)

    expected = (400, "usage") if proof == "no proof" else (409, "refused")
    assert (heard.status, heard.error) == expected, heard
    remedy = r"An island speaks only for itself|Atoll-Island-Proof is missing"
    assert re.search(remedy, heard.body.decode())
    assert after | TIMES == before | TIMES


@pytest.mark.parametrize("route", ["heartbeat", "publish", "offer"])
def test_a_body_with_anothers_name_is_refused_whatever_is_proven(
    scene: Scene, route: str
) -> None:
    """The attacker calls its own path with its own proof, and names the victim."""
    who, own = scene.identity, scene.own_identity
    update = update_of(scene.mallory, scene.joined, 1000.0)
    shown = proof_text(own, blake3_digest(OWN), run=scene.served.run)
    sent = to_request(CALLS[route](who, update, forged(who)), proof=shown)
    target = sent.target.replace(VICTIM, MALLORY)
    body = b"".join(view_of(part).tobytes() for part in sent.body)
    before = scene.row(VICTIM)
    headers: dict[str, Any] = {**sent.headers}
    heard = asking(scene.served, f"{sent.method} {target}", body, **headers)

    assert (heard.status, heard.error) == (400, "usage"), heard
    assert scene.row(VICTIM) | TIMES == before | TIMES


def test_anothers_beat_does_not_ride_on_an_own_update(scene: Scene) -> None:
    """The header, the beat and the proof of one request are of one life."""
    update = update_of(scene.mallory, scene.own, 3.0)
    shown = proof_text(scene.own_identity, blake3_digest(OWN), run=scene.served.run)
    before = scene.row(VICTIM)
    for named in (scene.identity, replace(scene.own_identity, incarnation=7)):
        call = PublishCall(update, beat_of(named))
        heard = calling(scene.served, call, atoll_island_proof=shown)

        assert (heard.status, heard.error) == (400, "usage"), heard
    assert scene.row(VICTIM) | TIMES == before | TIMES


def test_a_life_that_is_to_come_cannot_be_claimed_before_it_comes(
    scene: Scene,
) -> None:
    """A body that arrives slowly must not be taken for the victim's next life."""
    who = scene.identity
    later = replace(who, incarnation=who.incarnation + 1)
    for route, attack in CALLS.items():
        update = update_of(scene.mallory, scene.joined, 9.0)
        header = replace(update.header, incarnation=later.incarnation)
        call = attack(later, Frame(header, update.body), forged(later))
        heard = calling(scene.served, call, key=OWN)

        assert (heard.status, heard.error) == (410, "lease_lost"), (route, heard)


def test_an_attack_is_audited_with_its_address_and_the_islands_name(
    scene: Scene,
) -> None:
    """The operator learns that somebody speaks for the victim, and from where."""
    scene.attack("leave", "another key")
    heard = asking(scene.served, "GET /events?after=0")
    events = json.loads(heard.body)
    audits = [each for each in events if each.get("answer") == "wrong_proof"]

    assert audits
    assert {(each["address"], each["island"]) for each in audits} == {
        ("127.0.0.1", VICTIM)
    }
    assert {each["role"] for each in audits} == {"island"}
    text = json.dumps(audits)
    assert (
        proof_text(scene.identity, blake3_digest(OWN), run=scene.served.run).split()[1]
        not in text
    )


def test_an_honest_round_counts_what_it_should_under_all_attacks(serve: Serve) -> None:
    """After every attack by every route the round is that of the two updates."""
    with acting(serve(start_islands=2, quorum=2)) as scene:
        for route, proof in itertools.product(CALLS, PROOFS):
            scene.attack(route, proof)
        scene.victim.publish(update_of(scene.victim, scene.joined, 1.0))
        scene.mallory.publish(update_of(scene.mallory, scene.own, 3.0))
        outcome = awaited(scene.victim, 1)

        # Updates of 1 and 3 take the anchor from 0 to -2.
        assert outcome.agreed.header.roster is not None
        assert len(outcome.agreed.header.roster.counted) == 2
        assert anchor_of(scene.victim) == -2.0


def test_a_restarted_coordinator_knows_the_proof_again(tmp_path: Path) -> None:
    """The digest of the key is in the journal: nothing has to be joined again."""
    port, settings = free_port(), plain_settings(start_islands=1)
    with ExitStack() as stack:
        with serving(tmp_path / "run", settings, port=port) as coordinator:
            line = stack.enter_context(line_to(coordinator))
            a = CoordinatorExchange(line, key=KEY, nonce=b"1")
            joined = enter(a, VICTIM)
        with serving(tmp_path / "run", settings, port=port) as coordinator:
            call = HeartbeatCall(Heartbeat(island=VICTIM, incarnation=1, step=0))

            assert line.call(call) is not None
            assert calling(coordinator, call, key=OWN).status == 409
            a.publish(update_of(a, joined, 1.0))
            assert awaited(a, 1).agreed.header.roster is not None


def test_a_member_that_the_journal_has_lost_joins_again(tmp_path: Path) -> None:
    """A coordinator with an older journal cannot judge the proof, and says so."""
    port, settings = free_port(), plain_settings(start_islands=2, quorum=2)
    run, copy = tmp_path / "run", tmp_path / "copy"
    with ExitStack() as stack:
        with serving(run, settings, port=port) as coordinator:
            a = CoordinatorExchange(
                stack.enter_context(line_to(coordinator)), key=OWN, nonce=b"1"
            )
            first = enter(a, "a")
        shutil.copytree(run, copy)
        with serving(run, settings, port=port) as coordinator:
            b = CoordinatorExchange(
                stack.enter_context(line_to(coordinator)), key=KEY, nonce=b"1"
            )
            second = enter(b, VICTIM)
        shutil.rmtree(run)
        copy.rename(run)
        with serving(run, settings, port=port) as coordinator:
            a.publish(update_of(a, first, 1.0))
            b.publish(update_of(b, second, 3.0))

            awaited(b, 1)
            assert anchor_of(a) == -2.0
            call = LeaveCall(VICTIM, second.incarnation)
            assert calling(coordinator, call, key=OWN).status == 409


def test_an_island_without_a_name_proves_the_one_it_was_given(serve: Serve) -> None:
    """Its name comes with the answer to its joining, and others cannot use it."""
    served = serve(start_islands=1)
    with served.line() as line:
        exchange = CoordinatorExchange(line, key=KEY, nonce=b"1")
        joined = exchange.join(JoinRequest(model=MODEL))
        beat = Heartbeat(island=joined.island, incarnation=joined.incarnation, step=0)

        assert exchange.heartbeat(beat, at_once=True).rounds == ()
        assert calling(served, HeartbeatCall(beat), key=OWN).status == 409


def test_a_name_taken_over_without_its_key_is_told(tmp_path: Path) -> None:
    """A silent island's name may be taken; its operator sees that it was."""
    clock = StepClock()
    settings = plain_settings(start_islands=1)
    with serving(tmp_path / "run", settings, clock=clock) as coordinator:
        with line_to(coordinator) as line:
            enter(CoordinatorExchange(line, key=KEY, nonce=b"1"), VICTIM)
            clock.time_s += 2 * LEASE_S
            enter(CoordinatorExchange(line, key=OWN, nonce=b"2"), VICTIM)
            clock.time_s += 2 * LEASE_S
            enter(CoordinatorExchange(line, key=OWN, nonce=b"3"), VICTIM)
        events = coordinator.events.after(0)

    told = [each for each in events if each.name == "island_taken_over"]
    assert [each.fields for each in told] == [{"island": VICTIM, "incarnation": 2}]


def test_a_training_island_is_not_disturbed(tmp_path: Path) -> None:
    """Somebody speaks for it all the time; it ends the run, and all its work counts."""
    stage = Stage(tmp_path, settings_for(2, 8))
    try:
        stage.serve()
        a, b = stage.island("a", step_s=0.01), stage.island(VICTIM, step_s=0.01)
        stage.until_committed(1)
        answers = set()
        while b.process.poll() is None:
            answers |= {heard.status for heard in spoken_for(stage, VICTIM)}
        again, _ = ended_well(stage, a, b)
    finally:
        stage.close()

    assert answers == {400, 409}
    assert again.rounds == [8, 8]
    assert again.counted["a"] == again.counted[VICTIM] == 16
    assert stage.events("island_left", island=VICTIM, incarnation=1)


def awaited(exchange: Exchange, round: int) -> Outcome:
    """Return a round's outcome, when it is there."""
    while True:
        outcome = exchange.outcome(0, round, wait_s=2.0)
        if outcome is not None:
            return outcome


def spoken_for(stage: Stage, island: str) -> Iterator[Heard]:
    """Speak for an island by routes that would end it, as its status shows it."""
    who = Identity(island, 1)
    run = stage.ask("GET", "/info").json()["run"]
    served = Known(stage.url, stage.directory, run)
    for call in (LeaveCall(*astuple(who)), HeartbeatCall(beat_of(who))):
        for proof in PROOFS.values():
            shown = proof(who, run)
            with suppress(ConnectionError):  # the run has ended meanwhile
                yield calling(served, call, atoll_island_proof=shown)


@dataclass(frozen=True)
class Known:
    """A coordinator whose address and token somebody has."""

    url: str
    directory: Path
    run: str


class StepClock:
    """Time that a test moves. Implements `Clock`."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s
