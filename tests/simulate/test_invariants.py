"""Every invariant can fail, and a violation says when, who, what and which."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from atoll import RunSettings
from atoll.coordinator.commit import Committer
from atoll.data import RowLedger, Spans
from atoll.errors import LeaseLost
from atoll.island.deal import Deal
from atoll.island.fragment import IslandFragment
from atoll.island.sync_worker import SyncWorker
from atoll.protocol import coordinator as protocol_coordinator
from atoll.protocol import rows
from atoll.protocol.membership import Members
from atoll.protocol.rounds import Round, refuse_all
from atoll.simulate import SimWorld
from atoll.simulate.invariants import ALL, Invariant
from atoll.simulate.invariants.claims import CommittedRound, History, Report, RoundCheck
from atoll.simulate.invariants.incarnation import check_unconfirmed
from atoll.simulate.invariants.listings import EveryoneListed
from atoll.simulate.invariants.watch import (
    EveryoneCounts,
    check_bytes,
    longest_grace_s,
    longest_silence_s,
    max_bytes_in_flight,
)
from atoll.simulate.run import MODEL, Conditions, simulate
from atoll.weights import FragmentState, lay_out
from atoll.wire import (
    FrameKind,
    Header,
    OuterValues,
    Roster,
    RosterEntry,
    TrainingProgress,
    Verdict,
    codec,
    state_digest,
    update_digest,
    with_body,
)
from tests.simulate.planted import BUGS, replaced
from tests.simulate.test_planted import CAUGHT_AS
from tests.simulate.test_planted_store import CAUGHT_AS as STORE_CAUGHT_AS

SETTINGS = RunSettings.from_dict(
    {
        "run": {"start_islands": 3, "end_rounds": 6},
        "sync": {"sync_every": 4},
        "wire": {"up": "e3m0", "down": "int8"},
        "limits": {"deadline_max_s": 10.0},
    }
)
LAYOUT = lay_out(MODEL, SETTINGS)
ROW_SETTINGS = RunSettings.from_dict(
    {
        "run": {"start_islands": 3},
        "sync": {"sync_every": 4},
        "data": {"order": "run", "unit_rows": 16},
    }
)
ROWS = Conditions(rows=600)


def spoilt_state(
    real: Any, courier: SyncWorker, slot: IslandFragment, *words: Any
) -> None:
    """One weight of i1's anchor is another."""
    real(courier, slot, *words)
    if courier._joined.island == "i1":
        state = slot.state
        state.anchor[0] += 1.0
        state.digest = state_digest(state.anchor, state.moments, state.count)


def wrong_tokens(real: Any, *words: Any, **named: Any) -> Header:
    """An update says that it has seen a token more."""
    header: Header = real(*words, **named)
    progress = replace(header.progress, tokens=header.progress.tokens + 1)
    return replace(header, progress=progress)


def expelled(real: Any, members: Members, island: str, incarnation: int) -> Any:
    if island == "i1":
        raise LeaseLost("Island 'i1' is no member.")
    return real(members, island, incarnation)


def in_ages(real: Any, round: Round, *words: Any) -> float:
    return round.opened_s + 1000.0


def shorter_cursor(real: Any, deal: Deal, *words: Any) -> bytes:
    """An update leaves out the first row that is in it."""
    spans = Spans.unpack(real(deal, *words))
    return (spans - spans.head(1)).pack()


def first_unit(real: Any, ledger: RowLedger, *words: Any, **named: Any) -> Spans:
    """Claims get the first unit again once it has counted."""
    unit = Spans([(0, 16)])
    spans: Spans = real(ledger, *words, **named)
    return unit if unit <= ledger.counted[0] else spans


def without_one(real: Any, headers: Any, **named: Any) -> Roster:
    """The roster of a round leaves out the update of i1."""
    kept = [header for header in headers if header.island != "i1"]
    roster: Roster = real(kept, **named)
    return roster


PLANTED: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "same state": lambda: replaced(SyncWorker, "_apply_all", spoilt_state),
    "tokens conserved": lambda: replaced(SyncWorker, "_header", wrong_tokens),
    "progress": lambda: replaced(Round, "can_close", lambda *words: False),
    "bounded": lambda: replaced(Committer, "end", lambda *words: None),
    "deadlines bounded": lambda: replaced(Round, "late_at_s", in_ages),
    "islands continue": lambda: replaced(Members, "require", expelled),
    "stands": lambda: replaced(protocol_coordinator, "judge_updates", without_one),
    "rows once": lambda: replaced(RowLedger, "chosen", first_unit),
    "rows true": lambda: replaced(Deal, "cursor", shorter_cursor),
    "rows named": lambda: replaced(rows, "_has_unsettled", lambda *words: False),
}
BY_HAND = {"rounds in order", "counted once", "everyone counts", "ages"}
"""What the journal and the machine make impossible, so that no run shows it."""


def test_every_invariant_has_a_test_that_it_can_fail() -> None:
    """Planted here, planted as a bug, or judged by hand below."""
    assert {each.name for each in ALL} == {
        *PLANTED,
        *CAUGHT_AS.values(),
        *STORE_CAUGHT_AS.values(),
        *BY_HAND,
    }
    assert BUGS.keys() == CAUGHT_AS.keys()


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_an_invariant_fails_when_it_should(name: str) -> None:
    """Each on a calm run of three islands in which one thing is wrong."""
    with PLANTED[name]():
        if name.startswith("rows"):
            result = simulate(ROW_SETTINGS, islands=3, conditions=ROWS)
        else:
            result = simulate(SETTINGS, islands=3)

    assert name in {each.invariant for each in result.violations}


def test_a_violation_says_when_who_what_and_which() -> None:
    """One line, to be read by a person."""
    with PLANTED["same state"]():
        violation = simulate(SETTINGS, islands=3).violations[0]

    assert str(violation).startswith(f"{violation.at_s:.6f} s, i1: same state: holds ")
    assert " at round 1 of fragment 0, where others hold " in str(violation)


class Judged:
    """Violations in the order in which they were reported."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.report: Report = self._report

    def _report(self, invariant: Invariant, who: str, what: str) -> None:
        self.names.append(invariant.name)


def zeros(name: str) -> np.ndarray:
    """Return a fragment of zeros as a codec has it."""
    encoded = np.empty(codec(name).body_bytes(LAYOUT[0].elements), np.uint8)
    codec(name).encode(np.zeros(LAYOUT[0].elements, np.float32), encoded)
    return encoded


def update(round: int, *, inner_steps: int = 4, base: bytes = bytes(16)) -> Header:
    """Return the header of an update of zeros."""
    header = Header(
        kind=FrameKind.UPDATE,
        run="run",
        fragment=0,
        round=round,
        island="i0",
        incarnation=1,
        base=base,
        codec="e3m0",
        elements=LAYOUT[0].elements,
        progress=TrainingProgress(inner_steps=inner_steps),
    )
    return with_body(header, zeros("e3m0"))


def outcome(
    round: int, *counted: Header, buffer: int = 0, share: float = 0.0
) -> CommittedRound:
    """Return the outcome of a round of zeros, or a void one."""
    entries = tuple(
        RosterEntry(
            island=each.island,
            incarnation=1,
            digest=update_digest(each),
            weight=1,
            verdict=Verdict.COUNTED,
            age=round - each.round,
        )
        for each in counted
    )
    body = zeros("int8") if counted else np.empty(0, np.uint8)
    header = Header(
        kind=FrameKind.AGREED,
        run="run",
        fragment=0,
        round=round,
        base=bytes(16),
        codec="int8",
        elements=LAYOUT[0].elements if counted else 0,
        weight=0,
        outer=OuterValues(
            optimizer="nesterov", lr=0.5, momentum=0.5, buffer=buffer, share=share
        ),
        roster=Roster(entries),
    )
    state = round.to_bytes(16, "big")
    return CommittedRound(with_body(header, body), body.tobytes(), state, 0.0)


@pytest.mark.parametrize("rounds", [(2,), (1, 1), (1, 3), (1, 2, 3, 4, 5, 6, 7)])
def test_rounds_out_of_order_are_found(rounds: tuple[int, ...]) -> None:
    """A round is skipped, repeated, or beyond the last."""
    judged = Judged()
    watched = RoundCheck(History(), SETTINGS, LAYOUT, judged.report)
    for round in rounds:
        watched.committed(outcome(round))

    assert judged.names == ["rounds in order"]


def test_an_update_that_nobody_published_is_found() -> None:
    """A roster counts what was never on its way."""
    judged = Judged()
    watched = RoundCheck(History(), SETTINGS, LAYOUT, judged.report)
    watched.committed(outcome(1, update(1)))

    assert judged.names[0] == "counted once"


def test_inner_steps_that_count_again_are_found() -> None:
    """An update of round 2 holds steps that an update of round 1 went beyond."""
    judged, history = Judged(), History()
    watched = RoundCheck(history, SETTINGS, LAYOUT, judged.report)
    for round, inner_steps in {1: 8, 2: 6}.items():
        base = (round - 1).to_bytes(16, "big")
        header = update(round, inner_steps=inner_steps, base=base)
        history.publish(header, zeros("e3m0"))
        watched.committed(outcome(round, header))

    assert judged.names == ["counted once"]


ASYNC = SETTINGS.with_values({"sync.mode": "async", "async.buffer": 2})


def judged_async(*rounds: CommittedRound, published: tuple[Header, ...]) -> list[str]:
    """Return what is found in the rounds of an asynchronous run."""
    judged, history = Judged(), History()
    watched = RoundCheck(history, ASYNC, LAYOUT, judged.report)
    for header in published:
        history.publish(header, zeros("e3m0"))
    for commit in rounds:
        watched.committed(commit)
    return judged.names


def test_an_update_counts_after_the_round_that_it_was_sealed_for() -> None:
    """In an asynchronous run, with its age; in another it was published for its own."""
    header = update(1)
    rounds = outcome(1), outcome(2, header, buffer=2, share=0.5)

    assert judged_async(*rounds, published=(header,)) == []
    judged, history = Judged(), History()
    history.publish(header, zeros("e3m0"))
    watched = RoundCheck(history, SETTINGS, LAYOUT, judged.report)
    for commit in (outcome(1), outcome(2, header)):
        watched.committed(commit)
    assert judged.names[0] == "counted once"


def test_an_update_that_is_listed_again_is_found() -> None:
    """Although its entry says how old it is."""
    header = update(1)
    rounds = [outcome(round, header, buffer=2, share=0.5) for round in (1, 2)]

    assert judged_async(*rounds, published=(header,))[0] == "counted once"


def test_an_update_from_another_state_is_found() -> None:
    """Its base is the state after round 1, and it says that it is for round 3."""
    right, wrong = (update(3, base=bytes(15) + bytes([n])) for n in (2, 1))
    before = outcome(1), outcome(2)

    for header, names in {right: [], wrong: ["ages"]}.items():
        counted = outcome(3, header, buffer=2, share=0.5)
        assert judged_async(*before, counted, published=(header,)) == names


@pytest.mark.parametrize(("buffer", "share"), [(1, 1.0), (2, 1.0), (3, 0.5)])
def test_a_share_that_rounds_fill_instead_of_updates_is_found(
    buffer: int, share: float
) -> None:
    """One update is half of a buffer of 2."""
    header = update(1)
    counted = outcome(1, header, buffer=buffer, share=share)

    assert judged_async(counted, published=(header,)) == ["true mean"]


def test_a_buffer_of_other_than_the_live_islands_is_found() -> None:
    """If it is not set, and it is known how many were live."""
    header, judged, history = update(1), Judged(), History()
    history.publish(header, zeros("e3m0"))
    unset = SETTINGS.with_values({"sync.mode": "async"})
    commit = outcome(1, header, buffer=2, share=0.5)
    for num_live in (2, 3):
        watched = RoundCheck(history, unset, LAYOUT, judged.report)
        history.last.clear()
        watched.committed(replace(commit, num_live=num_live))

    assert judged.names == ["true mean"]


def test_a_last_round_that_changes_is_found() -> None:
    """Or a round beyond it."""
    judged = Judged()
    watched = RoundCheck(History(), ASYNC, LAYOUT, judged.report)
    for last_round in (None, 2, 2):
        watched.ends(0, last_round)
    for round in (1, 2):
        watched.committed(outcome(round))
    assert judged.names == []

    watched.committed(outcome(3))
    watched.ends(0, 4)
    assert judged.names == ["rounds in order", "rounds in order"]


def listed_after_storm(*rounds: CommittedRound) -> list[str]:
    """Return what is found after a storm, with an update staged before round 1."""
    judged, history = Judged(), History()
    everyone = EveryoneListed(history, judged.report, lease_s=1.0, longest_s=10.0)
    everyone.calm(0.0)
    everyone.acknowledged(update(1), 2.0)
    for commit in rounds:
        history.commit(commit)
        everyone.committed(commit, 0.0, ["i0"])
    return judged.names


def test_an_update_that_two_rounds_pass_over_is_found() -> None:
    """Its island knows that it was staged, and nothing fails."""
    assert listed_after_storm(outcome(1), outcome(2, update(1))) == []
    assert listed_after_storm(outcome(1), outcome(2)) == ["everyone counts"]


def test_an_island_that_is_not_listed_for_long_is_found() -> None:
    """Rounds are committed, and none of them lists it."""
    rounds = [outcome(1, update(1)), *(outcome(round) for round in (2, 3))]
    late = [replace(each, at_s=5.0 * number) for number, each in enumerate(rounds, 1)]

    assert listed_after_storm(*late) == []
    assert listed_after_storm(*late, replace(outcome(4), at_s=16.0)) == [
        "everyone counts"
    ]


def test_the_silence_of_an_asynchronous_run_is_bounded_by_its_grace() -> None:
    """It waits for nobody up to a deadline: 1.1 * (15 + 3 + 2), and as below."""
    settings = ASYNC.with_values({"async.grace_s": 2.0})

    assert longest_silence_s(settings, step_s=0.5) == pytest.approx(59.0)
    assert longest_grace_s(ASYNC.with_values({"sync.overlap_steps": 3}), step_s=2) == 3


def test_an_island_that_never_counts_after_a_storm_is_found() -> None:
    """In the third round that opens a lease after the last fault, not before."""
    judged = Judged()
    everyone = EveryoneCounts(judged.report)
    everyone.calm(10.0)  # so that rounds opened from 25 s on are judged
    for round, opened_s in enumerate((24.0, 26.0, 28.0), 1):
        everyone.committed(outcome(round), opened_s, ["i0"])
    assert judged.names == []

    everyone.committed(outcome(4), 30.0, ["i0"])
    assert judged.names == ["everyone counts"]


def test_an_island_whose_window_changes_may_be_late_once() -> None:
    """And a refusal of work that is too large is no absence."""
    judged = Judged()
    everyone = EveryoneCounts(judged.report, may_miss_one=True)
    everyone.calm(0.0)
    counted, header = outcome(1, update(1)), update(5)
    for round in range(1, 5):
        commit = counted if round == 3 else outcome(round)
        everyone.committed(commit, 20.0, ["i0"])
    counting = outcome(5, header).header.roster
    assert counting is not None
    void = outcome(5)
    refused = replace(void.header, roster=refuse_all(counting, "norm: too large"))
    everyone.committed(replace(void, header=refused), 20.0, ["i0"])
    assert judged.names == []

    for round in (6, 7):
        everyone.committed(outcome(round), 20.0, ["i0"])
    assert judged.names == ["everyone counts"]


def test_an_island_that_came_or_went_starts_two_rounds_of_grace() -> None:
    """Whoever joins is in step from the third round on."""
    judged = Judged()
    everyone = EveryoneCounts(judged.report)
    everyone.calm(0.0)
    for round in range(1, 3):
        everyone.committed(outcome(round), 20.0, ["i0"])
    everyone.disturbed(21.0)
    everyone.committed(outcome(3), 22.0, ["i0"])

    assert judged.names == []


def test_a_state_of_a_round_that_was_never_committed_is_found() -> None:
    """An island is ahead of the journal."""
    judged = Judged()
    watched = RoundCheck(History(), SETTINGS, LAYOUT, judged.report)
    state = FragmentState(np.zeros(3, np.float32), [np.zeros(3, np.float32)], round=2)
    watched.holds("i0", 0, state)

    assert judged.names == ["durable first"]


def test_too_many_bytes_in_flight_are_found() -> None:
    """More than the strands of all islands can have sent."""
    judged = Judged()
    most = max_bytes_in_flight(LAYOUT, islands=3, flight_s=10.0)
    with SimWorld(0) as world:
        world.network.counts.bytes_in_flight = most
        check_bytes(world.network, most, judged.report)
        assert judged.names == []

        world.network.counts.bytes_in_flight = most + 1
        check_bytes(world.network, most, judged.report)
    assert judged.names == ["bounded"]


def test_an_island_that_keeps_its_updates_for_good_is_found() -> None:
    """Each fragment has one in flight, and one more when it leaves."""
    judged = Judged()
    check_unconfirmed("i0", 4, 2, judged.report)
    assert judged.names == []

    check_unconfirmed("i0", 5, 2, judged.report)
    assert judged.names == ["bounded"]


def test_the_bound_of_a_silence_is_stated() -> None:
    """Lease, heartbeat and deadline by a slow clock, two windows, three calls."""
    # 1.1 * (15 + 3 + 10) = 30.8; 2 * 4 * 0.5 = 4; 3 * (6 + 5) = 33.
    assert longest_silence_s(SETTINGS, step_s=0.5) == pytest.approx(67.8)
