"""A collective when ranks join, leave, die, hang or restart."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from atoll.errors import ModelError, SettingsError, Unreachable, UsageError
from atoll.exchange import CollectiveRun, Frame, MemoryRun
from atoll.exchange.calls import AgreedCall, Call, LeaveCall, PublishCall
from atoll.exchange.collective import CollectiveExchange, MemoryWorld
from atoll.island import Host
from atoll.protocol import Heartbeat, JoinReply, JoinRequest
from atoll.protocol.events import PauseRequested
from atoll.settings import RunSettings
from atoll.testing import vector_model
from atoll.testing.fixtures import OUTER, anchor_of, enter, plain_settings, update_of
from atoll.weights import FragmentState
from tests.exchange.collective.ranks import (
    URL,
    Bureau,
    attached,
    collective,
    runs_of,
    train,
)

MODEL = vector_model({"h.0.w": (3000,), "h.1.w": (2000,)})


def settings(islands: int, rounds: int = 4, **run: object) -> RunSettings:
    """Return two fragments, sent beside the training."""
    said = {"start_islands": islands, "end_rounds": rounds} | run
    return RunSettings.from_dict(
        {
            "run": said,
            "sync": {"sync_every": 4, "num_fragments": 2, "overlap_steps": 1},
            "wire": {"up": "fp32", "down": "fp32"},
        }
    )


@contextmanager
def met_once(
    bureau: Bureau, kind: type, act: Callable[[], None]
) -> Iterator[list[Call]]:
    """Do something before the first call of a kind is handled."""
    met: list[Call] = []

    def before(call: Call) -> None:
        if isinstance(call, kind) and not met:
            met.append(call)
            act()

    bureau.before = before
    yield met


def begun(ranks: dict[str, CollectiveExchange]) -> dict[str, JoinReply]:
    """Let all ranks join, and reduce a first round whose mean is 1."""
    joined = {name: enter(each, name) for name, each in ranks.items()}
    for name, each in ranks.items():
        each.publish(update_of(each, joined[name], 1.0))
    for each in ranks.values():
        assert each.outcome(0, 1, wait_s=20.0) is not None
    return joined


def failure_of(exchange: CollectiveExchange) -> str:
    """Return what ends a collective, as a rank that trains is told it."""
    until_s = time.monotonic() + 20.0
    while time.monotonic() < until_s:
        try:
            exchange.outcome(0, 2, wait_s=0.01)
        except Unreachable as exc:
            return str(exc)
        time.sleep(0.01)
    raise AssertionError("nothing was raised")


def has_agreed(call: Call) -> bool:
    return isinstance(call, AgreedCall) and call.agreed is not None


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_coordinator_that_dies_in_a_round_has_it_once(is_committed: bool) -> None:
    """Killed before it heard of an outcome, or after it was durable: the same bits."""
    given = settings(3)
    bureau = Bureau(given)
    crashes: list[Call] = []

    def before(call: Call) -> None:
        if has_agreed(call) and len(crashes) < 3:
            crashes.append(call)
            if is_committed:
                bureau.service.handle(call, bureau.now_s())
            bureau.restart()
            raise Unreachable("The coordinator has died.")

    bureau.before = before
    found = train(collective(bureau, 3), MODEL)
    memory = MemoryRun(given)

    assert len(crashes) == 3
    assert set(found.values()) == set(
        train(dict.fromkeys(found, memory), MODEL).values()
    )
    assert len(found) == 3


def test_a_rank_that_dies_is_named_on_the_others() -> None:
    """Those who wait for a round raise, and it is not left half done."""
    bureau, worlds = Bureau(plain_settings(start_islands=3)), MemoryWorld.of(3)
    ranks = attached(bureau, [CollectiveRun(URL, world) for world in worlds])
    joined = begun(ranks)
    ranks["i0"].publish(update_of(ranks["i0"], joined["i0"], 1.0, round=2))
    worlds[2].close()

    for name in ("i0", "i1"):
        assert re.match(r"Island 'i2' \(rank 2\).*is gone", failure_of(ranks[name]))
    assert anchor_of(ranks["i0"]) == -1.0
    assert not bureau.service.state.rounds[0].staged


def test_survivors_go_on_without_a_collective() -> None:
    """What was committed is there; they join again and publish like everybody."""
    bureau, worlds = Bureau(plain_settings(start_islands=2)), MemoryWorld.of(2)
    ranks = attached(bureau, [CollectiveRun(URL, world) for world in worlds])
    joined = begun(ranks)
    worlds[1].close()
    failure_of(ranks["i0"])
    ranks["i0"].leave("i0", joined["i0"].incarnation)
    bureau.call(LeaveCall("i1", joined["i1"].incarnation))

    again = bureau.exchange(b"i0")
    life = enter(again, "i0")
    assert life.position.rounds == (2,)
    again.publish(update_of(again, life, 4.0, round=2))
    assert anchor_of(again) == -5.0


def test_a_rank_whose_training_hangs_is_named_by_the_deadline() -> None:
    """Its process lives and beats, but it does not publish."""
    given = RunSettings.from_dict(
        plain_settings(start_islands=2).to_dict()
        | {"limits": {"deadline_min_s": 0.1, "deadline_max_s": 0.5}}
    )
    bureau = Bureau(given)
    ranks = collective(bureau, 2)
    joined = {name: enter(each, name) for name, each in ranks.items()}
    ranks["i1"].publish(update_of(ranks["i1"], joined["i1"], 1.0))

    said = failure_of(ranks["i1"])
    assert said.startswith("Island 'i0' (rank 0) of the collective did not publish")
    assert "limits.deadline_max_s" in said


def test_an_ordinary_island_takes_part() -> None:
    """While it is a member, rounds go by the coordinator; afterwards not any more."""
    bureau = Bureau(settings(3, rounds=8))
    ranks = collective(bureau, 2)
    guest = bureau.exchange(b"guest")

    def on_step(name: str, host: Host) -> None:
        if name == "guest" and host.round >= 3:
            host.leave()

    found = train({**ranks, "guest": guest}, MODEL, on_step=on_step)
    published = {
        (call.frame.header.island, call.frame.header.round)
        for call in bureau.calls
        if isinstance(call, PublishCall)
    }

    assert {("i0", 1), ("i1", 1), ("guest", 1)} <= published
    assert not {("i0", 8), ("i1", 8)} & published
    assert found["i0"] == found["i1"]
    assert found["i0"] == tuple(each.digest for each in bureau.service.weights)


def test_who_leaves_lets_the_others_go_on() -> None:
    """By the coordinator, without an error; what had been announced counts."""
    bureau = Bureau(settings(3, rounds=6))

    def on_step(name: str, host: Host) -> None:
        if name == "i1" and host.round == 2:
            host.leave()

    found = train(collective(bureau, 3), MODEL, on_step=on_step)
    kept = tuple(each.digest for each in bureau.service.weights)

    assert found["i0"] == found["i2"] == kept
    assert [round.number for round in bureau.service.state.rounds] == [7, 7]


def test_a_rank_may_join_when_another_has_begun() -> None:
    """It comes into phase by the run's position, whatever `start_islands` says."""
    given = RunSettings.from_dict(
        {
            "run": {"start_islands": 1, "end_rounds": 3},
            "sync": {"sync_every": 12, "num_fragments": 2, "overlap_steps": 3},
        }
    )
    bureau = Bureau(given)
    ranks = collective(bureau, 2)
    has_begun = threading.Event()

    def on_step(name: str, host: Host) -> None:
        if name == "i0" and host.run_steps == 8:
            has_begun.set()

    found = train(ranks, MODEL, on_step=on_step, after={"i1": has_begun})

    assert len(found) == 2
    assert len(set(found.values())) == 1


def test_ranks_that_wait_for_each_others_fragments_are_asked_for_them() -> None:
    """Both stand still, each for a round that only the other can complete."""
    bureau = Bureau(two_fragments())
    ranks = collective(bureau, 2)
    beats = {}
    for at, (name, each) in enumerate(ranks.items()):
        joined = enter_two(each, name)
        each.publish(update_of(each, joined, 1.0, fragment=at))
        life = joined.incarnation
        beats[name] = Heartbeat(
            island=name, incarnation=life, step=1, waits_for=(at, 1)
        )
    until_s = time.monotonic() + 20.0
    wanted: dict[str, tuple[int, ...]] = {}
    while wanted != {"i0": (1,), "i1": (0,)} and time.monotonic() < until_s:
        wanted = {
            name: tuple(set(each.heartbeat(beats[name]).wanted) - {int(name[1:])})
            for name, each in ranks.items()
        }
        time.sleep(0.01)

    assert wanted == {"i0": (1,), "i1": (0,)}


def two_fragments() -> RunSettings:
    """Return the settings of plain averaging, of two fragments."""
    plain = plain_settings(start_islands=2).to_dict()
    return RunSettings.from_dict(plain | {"sync": {"num_fragments": 2}})


def enter_two(exchange: CollectiveExchange, name: str) -> JoinReply:
    """Join a run of two fragments of three elements, and found it with zeros."""
    model = vector_model({"h.0.w": (3,), "h.1.w": (3,)})
    joined = exchange.join(JoinRequest(model=model, island=name))
    for fragment in range(2) if joined.is_founder else ():
        state = FragmentState.found(np.zeros(3, np.float32), "sgd")
        header, body = state.to_frame(
            run=joined.run,
            fragment=fragment,
            outer=OUTER,
            island=name,
            incarnation=joined.incarnation,
        )
        exchange.publish(Frame(header, body))
    return joined


def test_an_update_of_an_earlier_life_stands() -> None:
    """Its next life waits for that outcome, and the other ranks do not wait for it."""
    bureau = Bureau(plain_settings(start_islands=2, quorum=2))
    first, before = bureau.exchange(b"i0"), bureau.exchange(b"i1")
    enter(first, "i0")
    before.publish(update_of(before, enter(before, "i1"), 3.0))
    ranks = collective(bureau, 2)
    joined = {name: enter(each, name) for name, each in ranks.items()}
    assert joined["i1"].spoken_for == (0,)
    ranks["i0"].publish(update_of(ranks["i0"], joined["i0"], 1.0))

    for each in ranks.values():
        while each.outcome(0, 1, wait_s=1.0) is None:
            pass
    assert anchor_of(ranks["i0"]) == -2.0


def test_a_paused_run_makes_the_ranks_wait() -> None:
    """Nothing fails and nothing is published; it goes on when the run does."""
    bureau = Bureau(settings(2))
    paused = threading.Event()

    def pause() -> None:
        bureau.service.change(PauseRequested(is_paused=True), bureau.now_s())
        paused.set()

    with met_once(bureau, AgreedCall, pause):
        resume = threading.Timer(
            1.0, lambda: bureau.change(PauseRequested(is_paused=False))
        )
        resume.start()
        found = train(collective(bureau, 2), MODEL)

    assert paused.is_set()
    assert len(found) == 2
    assert len(set(found.values())) == 1
    assert not any(isinstance(call, PublishCall) for call in bureau.calls)


def test_a_rank_that_cannot_join_is_told_to_all() -> None:
    """Nobody waits for an island whose model is another."""
    bureau = Bureau(plain_settings(start_islands=2))
    ranks = collective(bureau, 2)
    enter(ranks["i0"], "i0")
    with pytest.raises(ModelError):
        enter(ranks["i1"], "i1", model=MODEL)

    said = failure_of(ranks["i0"])
    assert said.startswith("Rank 1 of the collective cannot join the run: 'w' is a")


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        ({"dynamic_local_updates": True}, "dynamic_local_updates=true lets islands"),
        ({"mode": "async"}, "mode='async' does not work in a collective, .* Join each"),
    ],
)
def test_a_run_of_islands_that_keep_no_step_is_refused_by_name(
    sync: dict[str, Any], message: str
) -> None:
    """Ranks make every inner step together; the refused one is no member."""
    bureau = Bureau(RunSettings.from_dict(plain_settings().to_dict() | {"sync": sync}))
    (rank,) = collective(bureau, 1).values()
    with pytest.raises(SettingsError, match=message):
        enter(rank, "i0")

    assert bureau.service.state.members.known["i0"].has_left
    assert f"cannot join the run: sync.{next(iter(sync))}=" in failure_of(rank)


def test_a_run_that_deals_out_rows_is_refused_by_name() -> None:
    """A collective has no claims of rows."""
    tables = plain_settings().to_dict() | {"data": {"order": "run"}}
    bureau = Bureau(RunSettings.from_dict(tables))
    (rank,) = collective(bureau, 1).values()
    with pytest.raises(SettingsError, match="order='run' does not work in a coll"):
        enter(rank, "i0")


def test_a_run_that_gathers_is_refused_by_name() -> None:
    """Every rank is told the remedy, and no round waits for it."""
    gathers = plain_settings(start_islands=2).with_values({"wire.down": "gather"})
    bureau = Bureau(gathers)
    for island, rank in collective(bureau, 2).items():
        with pytest.raises(
            SettingsError,
            match=r"wire\.down='gather' sends .* Join without a collective",
        ):
            enter(rank, island)
        assert bureau.calls[-1] == LeaveCall(island, 1)


def test_ranks_of_two_runs_are_told_so() -> None:
    """Both are named, with the runs that they have joined."""
    one, two = Bureau(plain_settings()), Bureau(plain_settings(), run="other")
    runs = runs_of(2)
    first = runs[0].attach(one.exchange(b"a"))
    second = runs[1].attach(two.exchange(b"b"))
    enter(first, "a")
    enter(second, "b")

    for each in (first, second):
        assert re.search(r"has joined run '\w+', and Island '", failure_of(each))


def test_a_rank_joins_once() -> None:
    """Another life needs another collective, on all ranks."""
    bureau = Bureau(plain_settings())
    (run,) = runs_of(1)
    run.attach(bureau.exchange(b"a"))

    with pytest.raises(UsageError, match="has joined with its CollectiveRun"):
        run.attach(bureau.exchange(b"a"))


def test_a_collective_needs_a_coordinator() -> None:
    """A bucket has nobody to bring an outcome to."""
    with pytest.raises(UsageError, match="'s3://lagoon' is no coordinator's address"):
        CollectiveRun("s3://lagoon", MemoryWorld.of(1)[0])


def test_a_silence_has_a_least_length() -> None:
    """A rank that is busy for a moment is not dead."""
    with pytest.raises(UsageError, match=r"silence_s=0\.1 is too short"):
        CollectiveRun(URL, MemoryWorld.of(1)[0], silence_s=0.1)


def test_a_mean_that_overflows_voids_the_round() -> None:
    """Every update is refused, and the state stays as it was, as everywhere.

    The coordinator sees no body, so the norms in the headers can be lies.
    """
    bureau = Bureau(plain_settings(start_islands=2))
    ranks = collective(bureau, 2)
    joined = {name: enter(each, name) for name, each in ranks.items()}
    for name, each in ranks.items():
        each.publish(update_of(each, joined[name], 3e38, norm=1.0))
    found = [each.outcome(0, 1, wait_s=20.0) for each in ranks.values()]

    for outcome in found:
        assert outcome is not None
        header = outcome.agreed.header
        assert header.elements == 0
        assert header.roster is not None
        assert {each.reason for each in header.roster.entries} == {
            "norm: the mean overflows"
        }
    assert anchor_of(ranks["i0"]) == 0.0
    assert bureau.agreed() == 1


def test_an_island_that_refuses_its_own_values_is_left_out() -> None:
    """It has no body to send, reduces its share, and takes the others' mean."""
    bureau = Bureau(plain_settings(start_islands=2))
    ranks = collective(bureau, 2)
    joined = {name: enter(each, name) for name, each in ranks.items()}
    header = update_of(ranks["i0"], joined["i0"], 0.0).header
    refused = replace(header, elements=0, body_bytes=0, pieces=(), refused="not finite")
    ranks["i0"].publish(Frame(refused, np.empty(0, np.uint8)))
    ranks["i1"].publish(update_of(ranks["i1"], joined["i1"], 3.0))

    for each in ranks.values():
        assert each.outcome(0, 1, wait_s=20.0) is not None
    assert anchor_of(ranks["i1"]) == -3.0
    assert bureau.agreed() == 1
