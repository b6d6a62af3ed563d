"""Asynchronous rounds: how long they wait, and updates that stand until listed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll import RunSettings
from atoll.errors import Refused, Unreachable, UsageError
from atoll.protocol import HeldRound
from atoll.protocol.coordinator import wakes_at
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.events import (
    Leave,
    MoveRequested,
    Recovered,
    Respond,
    Tick,
    UpdateOffered,
    UpdateStored,
)
from atoll.protocol.join_leave import reply_to
from atoll.protocol.membership import LEASE_S
from atoll.protocol.messages import CountedWork
from atoll.protocol.rounds import ListedUpdate, Phase, Reception
from atoll.settings.sections import AsyncSection, RunSection, SyncSection
from atoll.wire import FrameKind, Header, Roster, Verdict, update_digest, with_body
from tests.protocol.test_coordinator import OUTER, Desk, closings

GRACE_S = 2.0


def asynchronous(
    *names: str,
    grace_s: float | None = GRACE_S,
    buffer: int | None = None,
    staleness: str = "none",
    overlap_steps: int = 0,
    quorum: int = 1,
) -> Desk:
    """Return an asynchronous run of these islands, whose first round is open."""
    settings = RunSettings(
        run=RunSection(start_islands=len(names), quorum=quorum),
        sync=SyncSection(mode="async", overlap_steps=overlap_steps),
        asynchronous=AsyncSection(grace_s=grace_s, buffer=buffer, staleness=staleness),
    )
    table = Desk(CoordinatorState(run="run", settings=settings))
    for name in names:
        table.join(name)
    return table


def answer(table: Desk, name: str, **fields: object) -> Reception | type[Refused]:
    """Return the answer to an offer."""
    try:
        actions = table.do(UpdateOffered(table.header(name, **fields)))
    except Refused:
        return Refused
    (response,) = (action for action in actions if isinstance(action, Respond))
    assert isinstance(response.answer, Reception)
    return response.answer


def over(table: Desk) -> Roster:
    """Let the grace pass, and commit the round that closes; return its roster."""
    table.now_s += GRACE_S
    (close,) = closings(table.do(Tick()))
    table.commit(close)
    return close.roster


def ages(roster: Roster) -> dict[str, int]:
    return {entry.island: entry.age for entry in roster.entries}


def sealed(table: Desk, name: str, **fields: object) -> Header:
    """Return the header of an update with a body, which counts."""
    header = table.header(name, refused="", elements=1, norm=1.0, **fields)
    return with_body(header, b"body")


DEPARTS = {"kind": FrameKind.DEPARTING}


def test_a_round_closes_a_grace_after_its_first_update() -> None:
    """Not before, and nobody who is missing then is listed."""
    table = asynchronous("a", "b", "c")
    table.now_s = 1.0
    table.publish("a")
    table.now_s = 2.5
    table.publish("b")
    assert wakes_at(table.state, table.now_s) == 1.0 + GRACE_S
    table.now_s = 1.0 + GRACE_S
    (close,) = closings(table.do(Tick()))

    assert [entry.island for entry in close.roster.entries] == ["a", "b"]


def test_a_round_closes_at_once_when_nobody_is_missing() -> None:
    """The last of the live islands closes it within the grace."""
    table = asynchronous("a", "b")
    table.publish("a")

    assert closings(table.publish("b"))


def test_a_round_waits_for_its_quorum_beyond_the_grace() -> None:
    """Two updates are asked for, and the second one comes late."""
    table = asynchronous("a", "b", "c", quorum=2)
    table.publish("a")
    table.now_s = 5 * GRACE_S
    assert not closings(table.do(Tick()))

    assert closings(table.publish("b"))


def test_the_grace_is_half_of_the_overlap_by_default() -> None:
    """6 steps of 0.5 s by the fastest island: 6 * 0.5 / 2 = 1.5 s; without paces 0."""
    table = asynchronous("a", "b", grace_s=None, overlap_steps=6)
    round, settings = table.state.rounds[0], table.state.settings
    members = table.state.members
    assert round.grace_s(members, settings) == 0.0
    for name, step_s in (("a", 0.5), ("b", 3.0)):
        members = members.with_member(replace(members.known[name], step_s=step_s))

    assert round.grace_s(members, settings) == 1.5


def test_an_update_counts_in_the_round_that_is_open_when_it_comes() -> None:
    """Sealed for round 1, in the roster of round 3: its age is 2."""
    table = asynchronous("a", "b", "c")
    slow = table.header("c")
    for _ in range(2):
        table.publish("a")
        assert ages(over(table)) == {"a": 0}
    table.publish("a")
    assert table.do(UpdateOffered(slow)) == [Respond(Reception.WANTED)]
    table.publish("c", round=slow.round, base=slow.base)

    assert ages(over(table)) == {"a": 0, "c": 2}


def test_a_repeat_of_a_listed_update_changes_nothing() -> None:
    """Counted or refused: the last roster that lists the name knows its label."""
    table = asynchronous("a", "b", "c")
    counted, refused = sealed(table, "a"), table.header("b", refused="not finite")
    for header in (counted, refused):
        table.do(UpdateStored(header))
    assert [entry.verdict for entry in over(table).entries] == ["counted", "refused"]
    table.publish("c")
    over(table)

    for header in (counted, refused):
        assert table.do(UpdateOffered(header)) == [Respond(Reception.COMMITTED)]
    assert table.state.counted.listed[0, "b"] == ListedUpdate(
        round=1, label=1, incarnation=1
    )


def test_what_comes_while_a_round_closes_is_staged_for_the_next() -> None:
    """The staged set is frozen; the body need not be sent twice."""
    table = asynchronous("a", "b", "c")
    table.publish("a")
    table.now_s = GRACE_S
    (close,) = closings(table.do(Tick()))
    assert answer(table, "b") is Reception.WANTED
    table.publish("b")
    assert answer(table, "b") is Reception.STAGED
    assert answer(table, "a") is Reception.STAGED  # in the frozen set
    table.commit(close)

    assert ages(close.roster) == {"a": 0}
    assert ages(over(table)) == {"b": 1}


def test_the_rest_of_a_farewell_follows_the_flight() -> None:
    """Of one island two rosters have an update each, and none has both."""
    table = asynchronous("a", "b", "c")
    table.publish("b", **DEPARTS)
    assert answer(table, "b", **DEPARTS, round=2) is Reception.WANTED
    table.publish("b", **DEPARTS, round=2)
    table.do(Leave("b", 1))
    table.publish("a")

    assert ages(over(table)) == {"a": 0, "b": 0}
    table.publish("a")
    assert ages(over(table)) == {"a": 0, "b": 0}


def test_a_rest_whose_flight_stands_in_a_later_round_follows_it_too() -> None:
    """The flight of round 1 stands in round 3, and its rest of round 2 in round 4."""
    table = asynchronous("a", "b", "c")
    first = table.header("b")
    for _ in range(2):
        table.publish("a")
        over(table)
    table.publish("b", **DEPARTS, round=1, base=first.base)
    rest = {**DEPARTS, "round": 2, "base": first.base}
    assert answer(table, "b", **rest) is Reception.WANTED
    table.publish("b", **rest)
    assert answer(table, "b", **rest) is Reception.STAGED
    table.publish("a")

    assert ages(over(table)) == {"a": 0, "b": 2}
    table.publish("a")
    assert ages(over(table)) == {"a": 0, "b": 2}


def test_while_a_round_closes_one_update_of_an_island_waits_for_the_next() -> None:
    """A rest that would be the second one is asked for again after the commit."""
    table = asynchronous("a", "b")
    table.publish("a")
    table.now_s = GRACE_S
    (close,) = closings(table.do(Tick()))
    table.publish("b", **DEPARTS)
    assert answer(table, "b", **DEPARTS, round=2) is Reception.CLOSING
    table.commit(close)

    assert answer(table, "b", **DEPARTS, round=2) is Reception.WANTED


def test_another_update_of_a_life_waits_for_the_next_round() -> None:
    """Only a run that has lost rounds gets two; the second counts after the first."""
    table = asynchronous("a", "b")
    table.publish("b")
    first = table.header("b")
    assert answer(table, "b", weight=7) is Reception.OTHER_STAGED
    over(table)

    assert answer(table, "b", round=2) is Reception.WANTED
    assert answer(table, "b", round=1, base=first.base) is Reception.COMMITTED


def test_an_update_for_a_round_that_never_opened_is_refused() -> None:
    """Its base cannot be known."""
    table = asynchronous("a", "b")

    assert answer(table, "a", round=2) is Refused
    assert answer(table, "a", round=3) is Refused


def test_the_next_life_is_not_judged_by_what_the_last_one_had_listed() -> None:
    """Its label may equal that of an update which an earlier incarnation published."""
    table = asynchronous("a", "b")
    table.publish("b", **DEPARTS)
    table.do(Leave("b", 1))
    table.join("b", nonce=b"2")
    assert answer(table, "b") is Reception.OTHER_STAGED
    over(table)

    assert answer(table, "b", round=1, base=bytes(16)) is Reception.WANTED


def test_a_life_waits_to_join_while_two_rounds_have_updates_of_the_last() -> None:
    """It takes the outcome of one round before it publishes, and no more."""
    table = asynchronous("a", "b")
    table.publish("b", **DEPARTS)
    table.publish("b", **DEPARTS, round=2)
    table.do(Leave("b", 1))
    with pytest.raises(Unreachable, match="round 1 takes the first of them"):
        table.join("b", nonce=b"2")
    (close,) = closings(table.publish("a"))
    table.commit(close)

    assert table.join("b", nonce=b"2").spoken_for == (0,)


def test_an_update_on_an_unknown_base_is_refused_by_its_roster() -> None:
    """Only the fragment's own last 1024 states are known."""
    table = asynchronous("a", "b")
    table.do(UpdateStored(sealed(table, "a", base=b"\1" * 16)))
    (entry,) = over(table).entries

    assert entry.verdict is Verdict.REFUSED
    assert entry.reason.startswith("base")


def test_age_lowers_the_weight_in_the_roster() -> None:
    """Inverse at ages 0 and 1: 2^20 and 2^19."""
    table = asynchronous("a", "b", "c", staleness="inverse")
    first = table.header("b")
    table.do(UpdateStored(sealed(table, "a")))
    over(table)
    table.do(UpdateStored(sealed(table, "a")))
    table.do(UpdateStored(sealed(table, "b", round=1, base=first.base)))
    roster = over(table)

    weights = {entry.island: entry.weight for entry in roster.counted}
    assert weights == {"a": 2**20, "b": 2**19}


@pytest.mark.parametrize(("buffer", "expected"), [(None, 2), (7, 7)])
def test_the_buffer_of_a_round_is_fixed_when_it_closes(
    buffer: int | None, expected: int
) -> None:
    """By default it is the number of live islands: c has fallen silent."""
    table = asynchronous("a", "b", "c", buffer=buffer)
    table.now_s = LEASE_S + 1.0
    table.beat("a", "b")
    table.publish("a")
    (close,) = closings(table.publish("b"))

    assert close.buffer == expected


def test_nobody_is_waited_for_that_may_come_back() -> None:
    """An asynchronous run resumes nothing exactly; `returns` says nothing there."""
    table = asynchronous("a", "b", grace_s=1000.0)
    members = table.state.members
    returning = replace(members.known["b"], returns=True)
    table.state = replace(table.state, members=members.with_member(returning))
    table.now_s = LEASE_S + 1.0
    table.beat("a")

    assert closings(table.publish("a"))


def test_updates_of_lost_rounds_are_over_unless_their_rosters_are_known() -> None:
    """Of the rounds 1 to 3 the roster of 3 was brought: it does not list b's of 3."""
    table = asynchronous("a", "b", "c")
    old = table.header("c")
    table.publish("c")
    lost = HeldRound(3, bytes([3]) * 16)
    table.do(Recovered(0, lost, ((3, Roster(())),), OUTER))

    assert table.state.rounds[0].phase is Phase.OPEN
    assert table.state.rounds[0].staged == {}
    assert table.do(UpdateOffered(old)) == [Respond(Reception.COMMITTED)]
    assert answer(table, "a", round=2) is Reception.COMMITTED
    assert answer(table, "b", round=3) is Reception.WANTED


def test_an_update_stays_staged_if_no_recovered_roster_lists_it() -> None:
    """The outcome of the only lost round was brought, too."""
    table = asynchronous("a", "b", "c")
    table.publish("c")
    mine = table.header("c")
    lost = HeldRound(1, bytes([1]) * 16)
    table.do(Recovered(0, lost, ((1, Roster(())),), OUTER))

    staged = table.state.rounds[0].staged["c"]
    assert update_digest(staged) == update_digest(mine)
    assert ages(over(table)) == {"c": 1}


def test_a_life_learns_which_roster_refused_its_last_update() -> None:
    """Of a name that has counted, and of one that has not."""
    table = asynchronous("a", "b", "c")
    table.do(UpdateStored(sealed(table, "a")))
    over(table)
    for name in "ab":
        table.publish(name, refused="not finite")
    over(table)
    replies = [
        reply_to(table.state, table.join(name, nonce=b"2")).counted for name in "abc"
    ]

    assert replies == [
        (CountedWork(round=1, inner_steps=0, tokens=0, listed=2),),
        (CountedWork(round=0, inner_steps=0, tokens=0, listed=2),),
        (None,),
    ]


def test_an_asynchronous_run_does_not_move() -> None:
    """Islands would look for their updates in rosters that stay behind."""
    table = asynchronous("a")

    with pytest.raises(UsageError, match="asynchronous run cannot move yet"):
        table.do(MoveRequested("s3://lagoon", "nonce"))
