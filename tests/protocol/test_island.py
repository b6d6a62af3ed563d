"""The island machine, alone: what it asks for, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import Refused
from atoll.protocol import (
    Action,
    Await,
    End,
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
    WorkDecision,
    advance,
    decide,
    join_at,
    verdict_of,
    wakes_at,
)
from atoll.protocol.island import FragmentSync, RoundInFlight
from atoll.wire import Roster, RosterEntry, Verdict

PLAN = SyncPlan(sync_every=10, num_fragments=2, overlap_steps=3)


def start(
    plan: SyncPlan = PLAN, *, step: int = 0, last: int | None = None
) -> IslandState:
    """Return an island that has just joined, with every first round open."""
    rounds = (1,) * plan.num_books
    return join_at(Position(step=step, rounds=rounds, last_round=last), plan)


def taken(
    state: IslandState,
    fragment: int,
    verdict: Verdict = Verdict.COUNTED,
    *,
    through: int | None = None,
    step: int = 0,
    last: int | None = None,
) -> OutcomeTaken:
    """Return the outcome of what is in flight, with the run at schedule step `step`."""
    flight = state.sync_states[fragment].flight
    assert flight is not None
    through = flight.round if through is None else through
    rounds = tuple(
        through + 1 if index == fragment else sync_state.taken + 1
        for index, sync_state in enumerate(state.sync_states)
    )
    position = Position(step=step, rounds=rounds, last_round=last)
    return OutcomeTaken(
        fragment=fragment, verdict=verdict, through=through, position=position
    )


def walk(
    plan: SyncPlan, steps: int, *, last: int | None = None
) -> list[tuple[int, list[Action]]]:
    """Return what a steady island does at each step at which it does something."""
    state, diary = start(plan, last=last), []
    for step in range(1, steps + 1):
        if step < wakes_at(state, plan):
            continue
        state, actions = advance(state, Stepped(step), plan)
        done: list[Action] = []
        while actions:
            action = actions.pop(0)
            done.append(action)
            if isinstance(action, Take):
                state, more = advance(
                    state, taken(state, action.fragment, last=last), plan
                )
                actions = [*more, *actions]
        if done:
            diary.append((step, done))
    return diary


def test_fragments_are_sealed_on_schedule_and_taken_after_the_overlap() -> None:
    """Fragment p goes after kH + ceil((p+1)H/P), and is taken overlap_steps later."""
    # H = 10, P = 2: sends after 5, 10, 15, ...; taken at 8, 13, 18.
    assert walk(PLAN, 18) == [
        (5, [Seal(0, 1)]),
        (8, [Take(0, 1)]),
        (10, [Seal(1, 1)]),
        (13, [Take(1, 1)]),
        (15, [Seal(0, 2)]),
        (18, [Take(0, 2)]),
    ]


def test_without_overlap_everything_due_is_sealed_before_anything_is_awaited() -> None:
    """Fragments due together are all published before the island waits for one."""
    plan = SyncPlan(sync_every=1, num_fragments=2, overlap_steps=0)

    assert walk(plan, 1) == [(1, [Seal(0, 1), Seal(1, 1), Take(0, 1), Take(1, 1)])]


def test_buffers_go_with_the_last_fragment() -> None:
    """The fragment of buffers has the send points of the last one."""
    plan = replace(PLAN, has_buffers=True, overlap_steps=0)

    assert walk(plan, 10) == [
        (5, [Seal(0, 1), Take(0, 1)]),
        (10, [Seal(1, 1), Seal(2, 1), Take(1, 1), Take(2, 1)]),
    ]


def test_the_run_ends_when_every_fragment_has_taken_its_last_round() -> None:
    """No fragment is sealed beyond the last round, and `End` comes once."""
    plan = SyncPlan(sync_every=4, num_fragments=2, overlap_steps=1)

    assert walk(plan, 12, last=1)[-1] == (5, [Take(1, 1), End()])


def test_a_round_that_never_opens_ends_its_fragment_and_no_other() -> None:
    """A newcomer takes the last round of the fragment that it was behind in.

    Round 2 was the last. It has the state after round 2 of fragment 0 and after round
    1 of fragment 1, and is told first that round 3 of fragment 0 will not open.
    """
    plan = SyncPlan(sync_every=4, num_fragments=2, overlap_steps=0)
    state = join_at(Position(step=9, rounds=(3, 2)), plan)
    state, actions = advance(state, Stepped(10), plan)
    assert actions == [Seal(0, 3), Take(0, 3)]
    state, actions = advance(state, NeverOpens(0), plan)
    assert actions == []

    state, actions = advance(state, Stepped(12), plan)
    assert actions == [Seal(1, 2), Take(1, 2)]
    over = Position(step=12, rounds=(3, 3), last_round=2)
    late = OutcomeTaken(fragment=1, verdict=Verdict.LATE, through=2, position=over)
    assert advance(state, late, plan)[1] == [End()]


def test_a_round_that_never_opens_is_the_end_where_nothing_else_is_open() -> None:
    """Every fragment has its last round already."""
    plan = SyncPlan(sync_every=4, num_fragments=1, overlap_steps=0)
    state = join_at(Position(step=9, rounds=(3,)), plan)
    state, _ = advance(state, Stepped(12), plan)

    assert advance(state, NeverOpens(0), plan)[1] == [End()]


@given(
    sync_every=st.integers(1, 12),
    num_fragments=st.integers(1, 15),
    overlap=st.integers(0, 11),
    has_buffers=st.booleans(),
)
def test_every_fragment_is_sealed_once_per_period_whatever_divides(
    sync_every: int, num_fragments: int, overlap: int, has_buffers: bool
) -> None:
    """After k periods each fragment has sealed rounds 1 to k, each once, in order."""
    plan = SyncPlan(
        sync_every=sync_every,
        num_fragments=num_fragments,
        overlap_steps=min(overlap, sync_every - 1),
        has_buffers=has_buffers,
    )
    diary = walk(plan, 3 * sync_every)

    for fragment in range(plan.num_books):
        rounds = [
            action.round
            for _, actions in diary
            for action in actions
            if isinstance(action, Seal) and action.fragment == fragment
        ]
        assert rounds == [1, 2, 3]


def test_a_newcomer_takes_the_phase_of_the_others() -> None:
    """Joining at schedule step 7, the next send is the one after step 10."""
    state = start(step=7)

    assert wakes_at(state, PLAN) == 10
    assert advance(state, Stepped(10), PLAN)[1] == [Seal(1, 1)]


def test_an_island_that_missed_a_round_moves_to_the_runs_position() -> None:
    """A late island jumps to the others' step, and sends at once what it jumps over."""
    plan = replace(PLAN, overlap_steps=0)
    state, _ = advance(start(plan), Stepped(5), plan)
    event = taken(state, 0, Verdict.LATE, step=12)

    state, actions = advance(state, event, plan)

    # The jump from 5 to 12 passes the send point of fragment 1 at step 10.
    assert state.step == 12
    assert actions == [Seal(1, 1), Take(1, 1)]


def test_what_is_jumped_over_is_only_taken_when_its_round_is_over() -> None:
    """A jumped send point is sent only if the fragment's round is open."""
    plan = replace(PLAN, overlap_steps=0)
    state, _ = advance(start(plan), Stepped(5), plan)
    late = taken(state, 0, Verdict.LATE, step=12)
    position = replace(late.position, rounds=(2, 2))

    _, actions = advance(state, replace(late, position=position), plan)

    assert actions == [Await(1, 1), Take(1, 1)]


def test_a_round_is_not_sealed_before_its_step() -> None:
    """Round 2 of fragment 1 belongs to step 20, though it is open since step 8."""
    state = IslandState(
        step=8, sync_states=(FragmentSync(taken=1), FragmentSync(taken=1))
    )

    assert wakes_at(state, PLAN) == 15
    state, actions = advance(state, Stepped(15), PLAN)
    assert actions == [Seal(0, 2)]
    assert (
        wakes_at(
            replace(state, sync_states=(FragmentSync(taken=2), FragmentSync(taken=1))),
            PLAN,
        )
        == 20
    )


def test_a_fragment_that_is_a_round_behind_is_sealed_again_at_once() -> None:
    """At step 18 round 1 of fragment 1 was late: round 2 was due at step 10 + 10."""
    flight = RoundInFlight(round=1, take_at=18)
    sync_states = (FragmentSync(taken=2), FragmentSync(taken=0, flight=flight))
    state = IslandState(step=21, sync_states=sync_states)
    late = OutcomeTaken(
        fragment=1,
        verdict=Verdict.LATE,
        through=1,
        position=Position(step=21, rounds=(3, 2)),
    )

    assert advance(state, late, PLAN)[1] == [Seal(1, 2)]


def test_the_committed_rounds_tell_where_the_run_is() -> None:
    """Round 3 of fragment 0 is over, so everybody is at step 25 or beyond."""
    state = IslandState(
        step=14,
        sync_states=(
            FragmentSync(taken=2, flight=RoundInFlight(round=3, take_at=14)),
            FragmentSync(taken=2),
        ),
    )
    counted = taken(state, 0)

    state, actions = advance(state, counted, PLAN)

    assert (state.step, actions) == (25, [])


def test_an_island_in_step_keeps_its_counter() -> None:
    """A counted update does not move the counter, even if others are ahead."""
    state, _ = advance(start(), Stepped(5), PLAN)
    state, _ = advance(state, taken(state, 0, step=9), PLAN)

    assert state.step == 5


def test_sync_now_seals_all_and_then_takes_the_phase() -> None:
    """What is in flight is taken first; afterwards the island is in phase."""
    state, _ = advance(start(), Stepped(5), PLAN)
    state, actions = advance(state, SyncNow(5), PLAN)
    assert actions == [Seal(1, 1), Take(0, 1), Take(1, 1)]

    state, actions = advance(state, taken(state, 0), PLAN)
    assert actions == [Seal(0, 2), Take(0, 2)]

    state, _ = advance(state, taken(state, 0), PLAN)
    state, actions = advance(state, taken(state, 1, step=10), PLAN)
    # Round 2 of fragment 0 belongs to step 15, and the others have sent it there.
    assert (state.step, actions) == (15, [])


def blocked_on(fragment: int, *, plan: SyncPlan = PLAN) -> IslandState:
    """Return an island that has sealed round 1 of `fragment` and stands still."""
    step = (5, 10)[fragment]
    state, _ = advance(start(plan, step=step - 1), Stepped(step), plan)
    return state


def test_a_summoned_island_seals_what_others_wait_for_and_goes_on_waiting() -> None:
    """While it waits for fragment 0, it publishes fragment 1, before its time."""
    state = blocked_on(0)
    position = Position(step=11, rounds=(1, 1), wanted=(1,))

    state, actions = advance(state, FragmentsRequested(0, position), PLAN)

    assert actions == [Seal(1, 1), Take(0, 1), Take(1, 1)]
    state, _ = advance(state, taken(state, 0), PLAN)
    state, actions = advance(state, taken(state, 1), PLAN)
    # Round 1 of fragment 1 is over, which belongs to step 10.
    assert (state.step, actions) == (10, [])


def test_a_summons_for_what_is_on_its_way_changes_nothing() -> None:
    """An update that was sealed for the open round is not sealed again."""
    state = blocked_on(0)
    position = Position(step=11, rounds=(1, 1), wanted=(0,))

    assert advance(state, FragmentsRequested(0, position), PLAN) == (
        state,
        [Take(0, 1)],
    )


def test_an_earlier_lifes_update_that_the_run_wants_is_sealed_anew() -> None:
    """The run has lost it: this life stops waiting for it, and publishes its own."""
    state = join_at(Position(step=0, rounds=(1, 1)), PLAN, spoken_for=(0,))
    state, actions = advance(state, Stepped(5), PLAN)
    assert actions == [Await(0, 1)]

    position = Position(step=5, rounds=(1, 1), wanted=(0,))
    _, actions = advance(state, FragmentsRequested(0, position), PLAN)

    assert actions == [Seal(0, 1), Take(0, 1)]


def test_a_summoned_island_takes_the_rounds_that_are_over_first() -> None:
    """It missed rounds 1 and 2 of fragment 1: it takes them, then seals round 3."""
    state = blocked_on(0)
    position = Position(step=11, rounds=(1, 3), wanted=(1,))

    state, actions = advance(state, FragmentsRequested(0, position), PLAN)
    assert actions == [Await(1, 1), Take(1, 1), Take(0, 1)]

    late = taken(state, 1, Verdict.LATE, through=2, step=11)
    assert advance(state, late, PLAN)[1][0] == Seal(1, 3)


def test_leaving_sends_the_flight_again_and_the_rest_for_the_round_after() -> None:
    """A fragment in flight gives two departing updates, another one gives one."""
    state, _ = advance(start(), Stepped(5), PLAN)

    _, actions = advance(state, Leaving(), PLAN)

    assert actions == [Resend(0, 1), PublishRest(0, 2), PublishRest(1, 1)]


def test_leaving_sends_nothing_for_a_round_that_will_not_open() -> None:
    """With the last round in flight there is no round after it."""
    state, _ = advance(start(last=1), Stepped(5), PLAN)

    _, actions = advance(state, Leaving(), PLAN)

    assert actions == [Resend(0, 1), PublishRest(1, 1)]


def test_three_refusals_in_succession_raise() -> None:
    """Twice refused an island goes on; the third time it is told to stop."""
    plan = SyncPlan(sync_every=1, num_fragments=1, overlap_steps=0)
    state = start(plan)
    for step in (1, 2):
        state, _ = advance(state, Stepped(step), plan)
        state, _ = advance(state, taken(state, 0, Verdict.REFUSED), plan)
    state, _ = advance(state, Stepped(3), plan)

    with pytest.raises(Refused, match=r"3 times in succession"):
        advance(state, taken(state, 0, Verdict.REFUSED), plan)


def test_a_counted_round_forgives_earlier_refusals() -> None:
    """Refusals are counted in succession only."""
    plan = SyncPlan(sync_every=1, num_fragments=1, overlap_steps=0)
    state = start(plan)
    for step in range(1, 12):
        verdict = Verdict.COUNTED if step % 3 == 0 else Verdict.REFUSED
        state, _ = advance(state, Stepped(step), plan)
        state, _ = advance(state, taken(state, 0, verdict), plan)

    assert state.sync_states[0].taken == 11


@pytest.mark.parametrize(
    ("missed", "verdict", "through", "how"),
    [
        (0, Verdict.COUNTED, 5, WorkDecision.ADOPT),
        (2, Verdict.COUNTED, 5, WorkDecision.ADOPT),
        (0, Verdict.COUNTED, 6, WorkDecision.REBASE),
        (0, Verdict.LATE, 5, WorkDecision.CARRY),
        (1, Verdict.LATE, 5, WorkDecision.CARRY),
        (0, Verdict.LATE, 6, WorkDecision.CARRY),
        (2, Verdict.LATE, 5, WorkDecision.DROP),
        (0, Verdict.LATE, 7, WorkDecision.DROP),
        (2, Verdict.REFUSED, 5, WorkDecision.REFUSE),
    ],
)
def test_the_verdict_decides_what_becomes_of_work(
    missed: int, verdict: Verdict, through: int, how: WorkDecision
) -> None:
    """Work is carried over two missed rounds, and dropped with the third."""
    sync_state = FragmentSync(
        taken=4, missed=missed, flight=RoundInFlight(round=5, take_at=0)
    )

    assert decide(sync_state, verdict, through=through) is how


def test_only_the_very_update_counts() -> None:
    """A roster that lists another update of the same island means ours was missed."""
    entry = RosterEntry(
        island="a", incarnation=1, digest=b"1" * 32, weight=1, verdict=Verdict.COUNTED
    )
    roster = Roster((entry,))

    assert verdict_of(roster, "a", b"1" * 32) is Verdict.COUNTED
    assert verdict_of(roster, "a", b"2" * 32) is Verdict.LATE
    assert verdict_of(roster, "b", b"1" * 32) is Verdict.LATE
