"""Dynamic local updates: what a roster says of each island's inner steps per window."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll import RunSettings
from atoll.protocol import Heartbeat, HeldRound, observer
from atoll.protocol.coordinator import advance
from atoll.protocol.coordinator_state import CoordinatorState, ListedWindow, Windows
from atoll.protocol.events import (
    ConnectionLost,
    FoundingSeen,
    HeartbeatReceived,
    Leave,
    Recovered,
    RosterSeen,
    StateSeen,
    Tick,
)
from atoll.protocol.join_leave import MAX_IDLE_NAMES, reply_to
from atoll.protocol.membership import LEASE_S
from atoll.protocol.rounds import refuse_all
from atoll.wire import FrameKind, Roster, RosterEntry, Verdict
from tests.protocol.test_coordinator import (
    MODEL,
    OUTER,
    Desk,
    closings,
    publish_counted,
)

SYNC_EVERY = 100
LATE_S = 5.0
"""Shorter than a lease: a late island is live."""


def desk(
    *names: str, is_dynamic: bool = True, fragments: int = 1, **run: object
) -> Desk:
    """Return a run whose islands have joined, and whose first rounds are open."""
    sync = {"sync_every": SYNC_EVERY, "dynamic_local_updates": is_dynamic}
    tables = {
        "run": {"start_islands": len(names), **run},
        "sync": sync,
        "limits": {"deadline_max_s": LATE_S},
    }
    settings = RunSettings.from_dict(tables)
    table = Desk(CoordinatorState(run="run", settings=settings), fragments=fragments)
    for name in names:
        table.join(name)
    return table


def report(table: Desk, **paces_s: float | None) -> None:
    """Let islands report their paces."""
    for name, step_s in paces_s.items():
        member = table.state.members.known[name]
        beat = Heartbeat(
            island=name, incarnation=member.incarnation, step=0, step_s=step_s
        )
        table.do(HeartbeatReceived(beat))


def close(table: Desk, *names: str, **fields: object) -> Roster:
    """Let islands publish, close the round and commit it; return its roster."""
    [closing] = [
        closing for name in names for closing in closings(table.publish(name, **fields))
    ]
    table.commit(closing)
    return closing.roster


def test_a_slow_island_gets_a_window_of_the_same_time() -> None:
    """Paces of 0.1, 0.13, 0.26 and 0.57 s give 100, 76, 38 and 17 of 100 steps."""
    # 100 * 0.1 / 0.13 = 76.9; / 0.26 = 38.5; / 0.57 = 17.5. 100 is written as 0.
    table = desk("i0", "i1", "i2", "i3")
    report(table, i0=0.1, i1=0.13, i2=0.26, i3=0.57)
    roster = close(table, "i0", "i1", "i2", "i3")

    assert roster.windows == {"i0": 0, "i1": 76, "i2": 38, "i3": 17}
    assert [table.state.window_of(name) for name in roster.windows] == [100, 76, 38, 17]


def test_without_the_setting_no_roster_has_a_window() -> None:
    """Islands report their paces in every run, and only this one uses them."""
    table = desk("a", "b", is_dynamic=False)
    report(table, a=0.1, b=1.0)

    assert close(table, "a", "b").windows == {"a": 0, "b": 0}
    assert table.state.windows == Windows()


def test_islands_of_nearly_one_pace_have_the_rosters_of_other_runs() -> None:
    """Within an eighth, every byte of every roster is that of a run without it."""
    rosters = []
    for is_dynamic in (True, False):
        table = desk("a", "b", "c", is_dynamic=is_dynamic)
        report(table, a=0.1, b=0.114, c=0.109)  # 0.1 * 8/7 = 0.1143
        rosters.append([close(table, "a", "b", "c").packed for _ in range(3)])

    assert rosters[0] == rosters[1]


def test_an_island_alone_makes_every_step() -> None:
    """The only island is the fastest, at any pace."""
    table = desk("a")
    report(table, a=0.1)
    assert close(table, "a").windows == {"a": 0}
    report(table, a=7.0)
    assert close(table, "a").windows == {"a": 0}


def test_an_island_whose_pace_is_unknown_keeps_its_window() -> None:
    """Before four inner steps are timed, an island makes what it made before."""
    table = desk("a", "b")
    report(table, a=0.1, b=0.4)
    assert close(table, "a", "b").windows == {"a": 0, "b": 25}
    table.join("b", nonce=b"2")

    assert close(table, "b", "a").windows == {"a": 0, "b": 25}


def deadline_s(table: Desk, name: str) -> float:
    """Return how long after its opening the round waits for an island."""
    [round], state = table.state.rounds, table.state
    return round.late_at_s(name, state.members, state.settings) - round.opened_s


def test_a_window_that_grows_moves_the_learned_deadline_with_it() -> None:
    """Else the island would be late in the first round of its longer window."""
    table = desk("a", "b")
    report(table, a=0.1, b=0.4)
    close(table, "a", "b")
    for _ in range(5):  # each in the window of 25 that the first roster gave it
        table.now_s += 1.0
        close(table, "a", "b")
    # Arrivals 0, 1, 1, 1, 1, 1: median 1, spread at least 0.05, patience 3.
    assert deadline_s(table, "b") == pytest.approx(1.15)
    report(table, a=0.1, b=0.2)
    table.now_s += 1.0
    assert close(table, "a", "b").windows == {"a": 0, "b": 50}

    assert deadline_s(table, "b") == pytest.approx(2.3)
    assert deadline_s(table, "a") == pytest.approx(1.15)


def test_a_window_that_shrinks_leaves_the_learned_deadline() -> None:
    """An island that is early is waited for long enough, and its arrivals teach it."""
    table = desk("a", "b")
    report(table, a=0.1, b=0.1)
    for _ in range(6):
        table.now_s += 1.0
        close(table, "a", "b")
    report(table, a=0.1, b=0.4)
    table.now_s += 1.0
    assert close(table, "a", "b").windows == {"a": 0, "b": 25}

    assert deadline_s(table, "b") == pytest.approx(1.15)


def test_a_late_and_a_refused_island_get_a_window_too() -> None:
    """Only a roster sets a window, so it must list whoever the round waited for."""
    table = desk("a", "b", "c", quorum=2)
    report(table, a=0.1, b=0.2, c=0.5)
    publish_counted(table, "a")
    table.publish("b", refused="not finite")
    table.now_s = LATE_S
    [closing] = closings(table.do(Tick()))
    verdicts = {e.island: (e.verdict, e.window) for e in closing.roster.entries}

    assert verdicts == {
        "a": (Verdict.COUNTED, 0),
        "b": (Verdict.REFUSED, 50),
        "c": (Verdict.LATE, 20),
    }


def test_a_void_round_sets_windows() -> None:
    """If every update is refused after all, the windows in the roster stay."""
    roster = Roster(
        (
            RosterEntry(
                island="b",
                incarnation=1,
                digest=bytes(32),
                weight=1,
                verdict=Verdict.COUNTED,
                window=20,
            ),
        )
    )

    assert refuse_all(roster, "overflow").windows == {"b": 20}


def test_a_departing_island_gets_no_window() -> None:
    """Its name begins anew: the next incarnation may be on another machine."""
    table = desk("a", "b")
    report(table, a=0.1, b=0.4)
    assert close(table, "a", "b").windows["b"] == 25
    table.publish("b", kind=FrameKind.DEPARTING)
    table.do(Leave("b", 1))

    assert close(table, "a").windows == {"a": 0, "b": 0}
    assert table.state.window_of("b") == SYNC_EVERY


def test_an_island_that_died_keeps_its_window() -> None:
    """A name that comes back without leaving is the same machine, most often."""
    table = desk("a", "b")
    report(table, a=0.1, b=0.4)
    close(table, "a", "b")
    table.do(ConnectionLost("b", 1))
    table.now_s = LEASE_S + 1
    report(table, a=0.1)
    close(table, "a")
    welcome = table.join("b", nonce=b"2")

    assert reply_to(table.state, welcome).window == 25


def test_an_island_that_is_gone_does_not_set_the_pace() -> None:
    """The fastest of the live islands makes every step."""
    table = desk("a", "b")
    report(table, a=0.1, b=0.4)
    close(table, "a", "b")
    table.do(Leave("a", 1))

    assert close(table, "b").windows == {"b": 0}


def test_a_lie_about_a_pace_changes_windows_and_nothing_else() -> None:
    """An island that claims to be 1000 times faster makes the others' windows 1."""
    tables = desk("a", "b"), desk("a", "b")
    for table, claimed_s in zip(tables, (0.1, 0.0001), strict=True):
        report(table, a=0.1, b=claimed_s)
    honest, lied = (close(table, "a", "b") for table in tables)

    assert (honest.windows["a"], lied.windows["a"]) == (0, 1)
    assert honest == Roster(tuple(replace(e, window=0) for e in lied.entries))


def test_a_window_goes_back_up_when_the_fastest_slows_down() -> None:
    """Windows follow the paces, but not their noise."""
    table = desk("a", "b")
    windows = []
    for a, b in ((0.1, 0.25), (0.1, 0.27), (0.11, 0.25), (0.25, 0.25)):
        report(table, a=a, b=b)
        windows.append(close(table, "a", "b").windows["b"])

    # q = 40; 37, kept from 35 on; 44, kept below 46.1; 100.
    assert windows == [40, 40, 40, 0]


def test_a_join_reply_has_the_last_window_of_the_name() -> None:
    """A new name has none; a name of a run without the setting never has one."""
    table = desk("a", "b")
    report(table, a=0.1, b=0.4)
    assert reply_to(table.state, table.join("b")).window == 0
    close(table, "a", "b")

    assert reply_to(table.state, table.join("b", nonce=b"2")).window == 25
    assert reply_to(table.state, table.join("new")).window == 0


def test_rosters_that_an_island_brings_back_set_windows() -> None:
    """A run that recovers lost rounds has the windows of their rosters."""
    table = desk("a", "b")
    entry = RosterEntry(
        island="b",
        incarnation=1,
        digest=b"",
        weight=0,
        verdict=Verdict.LATE,
        window=25,
    )
    rosters = ((7, Roster((entry,))),)
    table.do(Recovered(0, HeldRound(7, bytes(16)), rosters, OUTER))

    assert table.state.windows.of("b") == 25


def test_a_forgotten_name_has_no_window() -> None:
    """What is remembered is bounded by the names that the run knows."""
    table = desk("a", "b", quorum=1)
    report(table, a=0.1, b=0.4)
    publish_counted(table, "a")
    table.now_s = LATE_S
    [closing] = closings(table.do(Tick()))
    table.commit(closing)
    assert table.state.windows.of("b") == 25  # it was late, and never counted
    table.do(Leave("b", 1))
    close(table, "a")
    for number in range(MAX_IDLE_NAMES):
        table.now_s += LEASE_S + 1
        report(table, a=0.1)
        table.join(f"idle-{number}")

    assert "b" not in table.state.members.known
    assert "b" not in table.state.windows.last


ROSTERS = st.lists(
    st.tuples(
        st.integers(1, 4),  # round
        st.integers(0, 2),  # fragment
        st.dictionaries(st.sampled_from("ab"), st.integers(0, 99)),
    ),
    unique_by=lambda roster: roster[:2],
    max_size=8,
)


@given(ROSTERS, st.randoms(use_true_random=False))
def test_windows_do_not_depend_on_the_order_of_reading(rosters, random) -> None:  # type: ignore[no-untyped-def]
    """Observers of a bucket read the fragments in any order, and agree."""

    def windows_of(rosters: list[tuple[int, int, dict[str, int]]]) -> Windows:
        windows = Windows()
        for round, fragment, listed in rosters:
            windows = windows.adding(listed, fragment=fragment, round=round)
        return windows

    shuffled = random.sample(rosters, len(rosters))

    assert windows_of(rosters) == windows_of(shuffled)


def observed() -> CoordinatorState:
    """Return an observer's state of a run with two fragments and no closed round."""
    sync = {"sync_every": SYNC_EVERY, "dynamic_local_updates": True}
    settings = RunSettings.from_dict({"sync": sync})
    state = CoordinatorState.begin("run", settings, is_observed=True)
    return advance(state, FoundingSeen(MODEL, (OUTER, OUTER)), 0.0)[0]


def late(window: int) -> Roster:
    """Return a roster that lists one island, as late."""
    return Roster(
        (
            RosterEntry(
                island="b",
                incarnation=1,
                digest=b"",
                weight=0,
                verdict=Verdict.LATE,
                window=window,
            ),
        )
    )


def test_an_observer_has_the_windows_of_the_rosters_it_reads() -> None:
    """In a bucket an island may be listed before its document was read."""
    state = observed()
    events = [
        StateSeen(0, 10, {}, (), {"b": 30}),
        StateSeen(1, 9, {}, (), {"b": 40}),  # older, though it is read later
    ]
    for event in events:
        state, _ = advance(state, event, 0.0)
    assert state.window_of("b") == 30
    windows = []
    for fragment, window in ((0, 20), (1, 25), (1, 0)):
        seen = RosterSeen(fragment, late(window), observer.UNKNOWN_BASE, OUTER)
        state, _ = advance(state, seen, 0.0)
        windows.append(state.window_of("b"))

    # Round 11 of fragment 0; round 10 of fragment 1, which is older; its round 11.
    assert windows == [20, 20, SYNC_EVERY]


@pytest.mark.parametrize("window", [SYNC_EVERY, SYNC_EVERY + 1, 2**32 - 1])
def test_a_window_longer_than_the_schedule_is_the_schedule(window: int) -> None:
    """A closer of a bucket may write anything; nothing longer is ever used."""
    seen = RosterSeen(0, late(window), observer.UNKNOWN_BASE, OUTER)
    state, _ = advance(observed(), seen, 0.0)

    assert state.window_of("b") == SYNC_EVERY
    assert state.windows.last["b"] == ListedWindow(1, 0, 0)


def test_windows_are_those_of_the_last_roster_in_the_order_of_the_schedule() -> None:
    """Fragment 1 of a round is after fragment 0 of it, and before the next round."""
    windows = Windows()
    listed = {}
    for (round, fragment), window in zip(
        itertools.product((1, 2), (0, 1)), (10, 20, 30, 40), strict=True
    ):
        windows = windows.adding({"b": window}, fragment=fragment, round=round)
        listed[round, fragment] = windows.of("b")

    assert list(listed.values()) == [10, 20, 30, 40]
