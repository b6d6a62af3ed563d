"""The island's machine in an asynchronous run: its own send points, and the end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.errors import Refused
from atoll.protocol import (
    Action,
    Await,
    End,
    Event,
    FragmentsRequested,
    IslandState,
    Leaving,
    NeverOpens,
    OutcomeTaken,
    Position,
    PublishRest,
    Resend,
    Seal,
    Stepped,
    SyncNow,
    SyncPlan,
    Take,
    advance,
    join_at,
    wakes_at,
)
from atoll.protocol.island import REFUSALS
from atoll.wire import Verdict

PLAN = SyncPlan(sync_every=4, num_fragments=1, overlap_steps=2, is_async=True)
TWO = replace(PLAN, num_fragments=2)


def begun(plan: SyncPlan = PLAN, *, step: int = 0, open_round: int = 1) -> IslandState:
    rounds = (open_round,) * plan.num_books
    return join_at(Position(step=step, rounds=rounds), plan)


def after(
    state: IslandState, *events: Event, plan: SyncPlan = PLAN
) -> tuple[IslandState, list[Action]]:
    """Return the state after all events, and the actions of the last one."""
    actions: list[Action] = []
    for event in events:
        state, actions = advance(state, event, plan)
    return state, actions


def taken(
    through: int,
    *,
    fragment: int = 0,
    verdict: Verdict = Verdict.COUNTED,
    step: int = 0,
    last_rounds: tuple[int, ...] | None = None,
) -> OutcomeTaken:
    """Return the receipt of an update, and the outcomes up to a round."""
    rounds = (through + 1,) * 2
    position = Position(step=step, rounds=rounds, last_rounds=last_rounds)
    return OutcomeTaken(
        fragment=fragment, verdict=verdict, through=through, position=position
    )


def test_an_island_seals_at_its_own_send_points() -> None:
    """The receipt came in round 7: the next seal is at step 8, for round 8."""
    state, actions = after(begun(), Stepped(4))
    assert actions == [Seal(0, 1)]
    state, actions = after(state, Stepped(6))
    assert actions == [Take(0, 1)]
    state, actions = after(state, taken(7, step=1000))

    assert (state.step, actions) == (6, [])
    assert wakes_at(state, PLAN) == 8
    assert after(state, Stepped(8))[1] == [Seal(0, 8)]


def test_rounds_that_passed_do_not_make_a_fragment_due() -> None:
    """At step 5 of a window, with round 9 taken, nothing is sealed before step 8."""
    state, _ = after(begun(), Stepped(4), Stepped(6), taken(9))

    assert after(state, Stepped(7))[1] == []


def test_a_newcomer_begins_at_the_step_of_the_others() -> None:
    """Its first window is the rest of theirs; the number of rounds says nothing."""
    state = begun(step=102, open_round=400)

    assert state.step == 102
    assert wakes_at(state, PLAN) == 104
    assert after(state, Stepped(104))[1] == [Seal(0, 400)]


def test_after_a_seal_out_of_turn_the_next_send_point_is_used() -> None:
    """Sealed at step 5 by `sync_now`, and again at step 8."""
    state, actions = after(begun(step=4), SyncNow(5))
    assert actions == [Seal(0, 1), Take(0, 1)]
    state, _ = after(state, taken(3))

    assert after(state, Stepped(8))[1] == [Seal(0, 4)]


def test_an_outcome_is_taken_before_the_next_send_point() -> None:
    """A window of one step has no overlap: 7 is sealed, and taken at once."""
    state, actions = after(begun(step=4), SyncNow(6), taken(1), SyncNow(7))

    assert actions == [Seal(0, 2), Take(0, 2)]
    assert state.sync_states[0].not_before == 8


def test_a_fragment_that_others_wait_for_is_sealed_on_an_older_state() -> None:
    """The rounds that it has not taken are not taken first."""
    state, _ = after(begun(TWO), Stepped(2), plan=TWO)
    requested = FragmentsRequested(0, Position(step=9, rounds=(1, 5), wanted=(1,)))
    state, actions = after(state, requested, plan=TWO)

    assert actions == [Seal(1, 1), Take(0, 1), Take(1, 1)]


def test_a_receipt_is_taken_before_the_fragment_is_sealed_again() -> None:
    """Others wait for a fragment whose update is listed, and not taken yet."""
    state, _ = after(begun(TWO), Stepped(2), Stepped(4), plan=TWO)
    requested = FragmentsRequested(0, Position(step=9, rounds=(1, 5), wanted=(1,)))
    state, actions = after(state, requested, plan=TWO)
    assert actions == [Take(1, 1), Take(0, 1)]

    assert after(state, taken(4, fragment=1), plan=TWO)[1] == [Seal(1, 5), Take(1, 5)]


def test_a_life_whose_name_is_spoken_for_takes_that_round_first() -> None:
    """Its own update is for the round after the ones that were over then."""
    position = Position(step=0, rounds=(3,))
    state, actions = after(join_at(position, PLAN, (0,)), Stepped(4))
    assert actions == [Await(0, 3)]
    state, _ = after(state, Stepped(6), taken(5, verdict=Verdict.LATE))

    assert state.sync_states[0].missed == 0
    assert after(state, Stepped(8))[1] == [Seal(0, 6)]


def test_three_refusals_in_succession_end_an_island() -> None:
    """As in a synchronous run."""
    state = begun()
    refused = Verdict.REFUSED
    for number in range(1, REFUSALS):
        state, _ = after(state, Stepped(4 * number), taken(3 * number, verdict=refused))
    state, _ = after(state, Stepped(4 * REFUSALS))

    with pytest.raises(Refused, match=f"{REFUSALS} times in succession"):
        advance(state, taken(3 * REFUSALS, verdict=refused), PLAN)


def test_an_island_that_leaves_sends_its_flight_and_the_rest() -> None:
    """The rest is for the round after, as its label says."""
    state, _ = after(begun(), Stepped(4), Stepped(6), taken(7), Stepped(8))

    assert after(state, Leaving())[1] == [Resend(0, 8), PublishRest(0, 9)]


def test_each_fragment_ends_with_its_own_last_round() -> None:
    """One ends with round 4, the other with round 9; the island with both."""
    ends = (4, 9)
    state, _ = after(begun(TWO), Stepped(2), Stepped(4), plan=TWO)
    state, actions = after(state, taken(4, last_rounds=ends), plan=TWO)
    assert state.finished(0)
    assert actions == []
    state, actions = after(
        state, taken(8, fragment=1, last_rounds=ends), Stepped(6), plan=TWO
    )
    assert actions == []  # nothing is due, and the first fragment is over
    state, actions = after(state, Stepped(8), plan=TWO)
    assert actions == [Seal(1, 9)]

    last = taken(9, fragment=1, last_rounds=ends)
    assert after(state, last, plan=TWO)[1] == [End()]


def test_a_fragment_that_no_round_takes_is_over_with_the_last_one_taken() -> None:
    """Rounds 1 to 6 were taken in search of the update; round 7 never opens."""
    state, _ = after(begun(), Stepped(4))
    state, actions = after(state, NeverOpens(0, last_round=6))

    assert actions == [End()]
    assert (state.sync_states[0].taken, state.last_of(0)) == (6, 6)


def test_the_end_of_one_fragment_does_not_end_the_others() -> None:
    """Their last rounds are learned from the next outcome."""
    state, _ = after(begun(TWO), Stepped(2), Stepped(4), plan=TWO)
    state, actions = after(state, NeverOpens(0, last_round=6), plan=TWO)
    assert actions == []
    assert not state.finished(1)

    ends = (6, 3)
    final = taken(3, fragment=1, last_rounds=ends)
    assert after(state, final, plan=TWO)[1] == [End()]
