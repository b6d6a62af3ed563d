"""Windows last as long as their run: over restarts, moves, and new readers."""

from __future__ import annotations

from atoll.coordinator import Service
from atoll.coordinator.move import receive
from atoll.exchange import Exchange
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.move import MoveOut
from atoll.exchange.calls import HeartbeatCall, OutcomeCall
from atoll.protocol import Heartbeat, HeldRound, JoinReply
from atoll.run_client.store import StatusView, StoreObserver
from atoll.settings import RunSettings
from atoll.simulate import SimDisk
from atoll.store import MemoryStore
from atoll.testing.fixtures import enter, plain_settings, roster_of, update_of
from atoll.wire import TrainingProgress
from tests.coordinator.desk import join, update
from tests.exchange.bucket.test_attacks import URL, Beach
from tests.exchange.test_relocation import Journey

TARGET, NONCE = "https://harbour:7700", "0f" * 16
PACES_S = {"a": 0.5, "b": 2.0}
WINDOWS = {"a": 0, "b": 25}
"""100 * 0.5 s / 2 s inner steps; 0 stands for 100."""


TOKENS = {"a": 30, "b": 10}


def settings() -> RunSettings:
    """Return averaging by tokens of two islands, with dynamic local updates."""
    return plain_settings(start_islands=2).with_values(
        {"sync.dynamic_local_updates": True, "outer.weight": "tokens"}
    )


def paced(joined: JoinReply, *holds: HeldRound) -> Heartbeat:
    """Return the heartbeat by which an island reports its pace."""
    return Heartbeat(
        island=joined.island,
        incarnation=joined.incarnation,
        step=4,
        holds=holds,
        step_s=PACES_S[joined.island],
    )


def one_round(a: Exchange, b: Exchange) -> None:
    """Let two islands join, report their paces and close a round."""
    islands = [(a, enter(a, "a")), (b, enter(b, "b"))]
    for exchange, joined in islands * 2:  # in a bucket, the second one reads the first
        exchange.heartbeat(paced(joined), at_once=True)
    for exchange, joined in reversed(islands):
        tokens = TOKENS[joined.island]
        progress = TrainingProgress(inner_steps=5, tokens=tokens)
        update = update_of(exchange, joined, 1.0, progress=progress, weight=tokens)
        exchange.publish(update)
    assert roster_of(a, 1).windows == WINDOWS


def a_coordinator() -> tuple[Service, SimDisk]:
    """Return a coordinator that has closed a round of two islands, and its disk."""
    disk = SimDisk()
    service = Service.create(disk, settings(), run="run", now_s=0.0)
    joined = [join(service, name) for name in PACES_S]
    for reply in joined:
        service.handle(HeartbeatCall(paced(reply)), 0.0)
    for reply in joined:
        service.handle(update(service, reply, 1.0), 0.0)
    return service, disk


def test_a_restarted_coordinator_has_the_windows_of_its_rosters() -> None:
    """The journal's rosters say them; the state is that of before the restart."""
    service, disk = a_coordinator()
    disk.crash()
    again = Service.open(disk, now_s=1.0)

    assert again.state.windows == service.state.windows
    assert again.state.windows.of("b") == WINDOWS["b"]
    assert join(again, "b", nonce=b"2").window == WINDOWS["b"]


def test_a_restarted_coordinator_keeps_windows_until_paces_are_known() -> None:
    """Islands that have not been timed again make as many inner steps as before."""
    _, disk = a_coordinator()
    disk.crash()
    service = Service.open(disk, now_s=1.0)
    joined = {name: join(service, name) for name in PACES_S}
    held = HeldRound(1, service.weights[0].digest)
    for name in ("a", "b"):
        beat = Heartbeat(island=name, incarnation=1, step=100, holds=(held,))
        service.handle(HeartbeatCall(beat), 1.0)
        service.handle(update(service, joined[name], 1.0, round=2), 1.0)
    outcome = service.handle(OutcomeCall(0, 2), 1.0)

    assert outcome.agreed.header.roster.windows == WINDOWS  # type: ignore[union-attr]


def test_a_state_in_a_bucket_has_the_windows_of_the_rosters_before_it() -> None:
    """A reader that begins at a state applies no earlier roster."""
    beach = Beach(settings())
    (a, _), (b, _) = beach.attach("a"), beach.attach("b")
    one_round(a, b)
    a.publish(a.state(0))
    state = documents.fetch(beach.store, documents.STATE, keys.state_complete(0, 1))
    again, _ = beach.attach("b")
    b.leave("b", 1)

    assert {row.island: row.window for row in state.counted} == WINDOWS
    assert enter(again, "b").window == WINDOWS["b"]


def test_the_status_of_a_bucket_has_paces_windows_and_shares() -> None:
    """An observer has them from documents and rosters, as a coordinator does."""
    beach = Beach(settings())
    one_round(beach.attach("a")[0], beach.attach("b")[0])
    with StoreObserver("memory://lagoon", store=beach.store) as observer:
        rows = StatusView(observer).document()["islands"]

    # 30 and 10 of 40 tokens.
    assert [(row["step_s"], row["window"], row["share"]) for row in rows] == [
        (0.5, 100, 0.75),
        (2.0, 25, 0.25),
    ]


def test_windows_move_into_a_bucket() -> None:
    """They are in the state's rows; the last rosters come along as well."""
    service, _ = a_coordinator()
    journey = Journey(service, MemoryStore())
    journey.move()

    assert enter(journey.meet(b"b", b"2"), "b").window == WINDOWS["b"]


def test_windows_move_to_a_coordinator() -> None:
    """They are records of its journal, as a restart reads them."""
    beach = Beach(settings())
    one_round(beach.attach("a")[0], beach.attach("b")[0])
    move, disk = MoveOut.open(beach.store, beach.time, url=URL), SimDisk()
    move.begin(TARGET, NONCE)
    receive(disk, move)
    service = Service.open(disk, now_s=0.0)

    assert service.state.windows.of("a") == WINDOWS["a"]
    assert join(service, "b", nonce=b"2").window == WINDOWS["b"]
