"""A journal that begins with a run from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from atoll.errors import UsageError
from atoll.journal import (
    CountedRecord,
    CountedUpdate,
    Journal,
)
from atoll.protocol import ModelSpec
from atoll.simulate.world import SimDisk
from atoll.wire import Header
from tests.journal.runs import RUN, Framed, Run, a_created, a_departing, bits, view

ROUNDS = 3


def a_run_elsewhere() -> Run:
    """Return a run of a small and a large fragment, some rounds after its start."""
    run = Run(SimDisk()).start()
    for value in range(ROUNDS):
        run.commit(0, value=value / 3, is_void=value == 1)
        run.commit(1, value=-value / 7)
    return run


def brought(run: Run, *, outcomes: int = 2) -> Run:
    """Return the same run on another disk, to which it was brought."""
    here = Run(SimDisk(), after=run.after, outcomes=run.outcomes)
    here.journal = Journal.create(here.disk, a_created())
    states = (
        state.to_frame(run=RUN, fragment=index, outer=run.outer)
        for index, state in enumerate(run.states)
    )
    here.journal.arrive(model_of(run), states)
    for fragment, known in enumerate(run.journal.recorded.fragments):
        last = range(ROUNDS - outcomes + 1, ROUNDS + 1)
        here.journal.passed(
            fragment,
            bases=[known.digests[round] for round in range(ROUNDS)],
            outcomes=[run.outcomes[fragment, round] for round in last],
        )
    return here.reopen()


def model_of(run: Run) -> ModelSpec:
    model = run.journal.recorded.model
    assert model is not None
    return model


def test_a_run_that_came_here_is_the_run_that_left() -> None:
    """Its states, digests and last outcomes are the same; it goes on from there."""
    run = a_run_elsewhere()
    here = brought(run)

    here.check()
    assert here.journal.damage == []
    for found, left in zip(
        here.journal.recorded.fragments, run.journal.recorded.fragments, strict=True
    ):
        assert (found.round, found.digests) == (left.round, left.digests)
    assert here.journal.past.rounds() == [ROUNDS]
    for value in range(1, 4):
        for each in (run, here):
            each.commit(0, value=value)
            each.commit(1, value=value)
    here.journal.compact(0)
    here.journal.compact(1)
    here.reopen().check()
    assert [bits(each) for each in here.states] == [bits(each) for each in run.states]
    assert here.journal.past.rounds() == [3, 4, 5, 6]


def test_outcomes_that_were_lost_do_not_come_along() -> None:
    """Nothing is said of them, and the state is there."""
    here = brought(a_run_elsewhere(), outcomes=0)

    assert not here.journal.recorded.rosters
    with pytest.raises(UsageError, match="has no outcome here"):
        here.journal.outcome(0, ROUNDS)


def test_how_far_islands_had_come_is_known() -> None:
    """Until a later round says more."""
    here = brought(a_run_elsewhere())
    for island in ("a", "island-000"):
        here.journal.append(
            CountedRecord(
                fragment=0, island=island, round=2, inner_steps=20, tokens=300
            )
        )
    here.commit(0)

    counted = here.reopen().journal.recorded.counted
    assert counted[0, "a"] == CountedUpdate(2, 20, 300)
    assert counted[0, "island-000"].round == ROUNDS + 1


def test_updates_for_open_rounds_come_along() -> None:
    """Of rounds that are over nobody wants any."""
    here = brought(a_run_elsewhere())
    here.journal.stage(*a_departing(0, ROUNDS + 1, "a"))
    here.reopen().check()
    assert sorted(here.journal.recorded.staged) == [(0, ROUNDS + 1, "a")]
    with pytest.raises(UsageError, match="is over"):
        here.journal.stage(*a_departing(0, ROUNDS, "a"))


Wrong = Callable[[Run, Run], None]


def _again(run: Run, here: Run) -> None:
    here.journal.arrive(model_of(run), [])


def _passed_again(run: Run, here: Run) -> None:
    here.journal.passed(0, bases=[], outcomes=[])


def _counted_ahead(run: Run, here: Run) -> None:
    ahead = CountedRecord(fragment=0, island="a", round=4, inner_steps=1, tokens=1)
    here.journal.append(ahead)


def _counted_nowhere(run: Run, here: Run) -> None:
    ahead = CountedRecord(fragment=2, island="a", round=0, inner_steps=1, tokens=1)
    here.journal.append(ahead)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (_again, "has been founded already"),
        (_passed_again, "are recorded once"),
        (_counted_ahead, "Round 4 of fragment 0 is not over"),
        (_counted_nowhere, "Fragment 2 does not exist"),
    ],
)
def test_what_cannot_follow_is_refused(act: Wrong, why: str) -> None:
    """And nothing has changed."""
    run = a_run_elsewhere()
    here = brought(run)
    before = view(here.journal)
    with pytest.raises(UsageError, match=why):
        act(run, here)
    assert view(here.reopen().journal) == before


def _bases(run: Run) -> list[bytes]:
    digests = run.journal.recorded.fragments[0].digests
    return [digests[round] for round in range(ROUNDS)]


@pytest.mark.parametrize(
    ("bases", "rounds"), [(4, (2, 3)), (3, (1, 2)), (3, (3, 2)), (1, (2, 3))]
)
def test_what_was_passed_leads_to_the_state(bases: int, rounds: tuple[int]) -> None:
    """Bases of more rounds than there were, and outcomes of others, are refused."""
    run = a_run_elsewhere()
    here = Run(SimDisk())
    here.create()
    frames = [
        state.to_frame(run=RUN, fragment=index, outer=run.outer)
        for index, state in enumerate(run.states)
    ]
    with pytest.raises(UsageError, match="not of fragment 0"):
        here.journal.arrive(model_of(run), frames[::-1])
    here.journal.arrive(model_of(run), frames)
    known = [bytes(16), *_bases(run)][-bases:]
    with pytest.raises(UsageError, match="do not lead to round 3"):
        here.journal.passed(
            0, bases=known, outcomes=[run.outcomes[0, round] for round in rounds]
        )
    header, body = run.outcomes[0, 3]
    foreign: Framed = (_of_run(header, "other"), body)
    with pytest.raises(UsageError, match="does not belong here"):
        here.journal.passed(0, bases=_bases(run), outcomes=[foreign])
    here.journal.passed(0, bases=_bases(run), outcomes=[(header, body)])


def _of_run(header: Header, run: str) -> Header:
    return replace(header, run=run)
