"""The island's machine: when to seal, when to take, and what becomes of work.

Rule 1: every change of an `IslandState` is made by `advance`, from one event.
Rule 2: a fragment has at most one update in flight. Its outcome is taken at
        `take_at`, never earlier, so that the same run gives the same bits.
Rule 3: what the roster says decides (`verdict_of`, `decide`); that an update was
        delivered means nothing.
Rule 4: outcomes of a fragment are taken in the order of their rounds.

Theory of operation. The host counts inner steps and sends `Stepped` when `wakes_at`
is reached. It performs the actions in order. `Take` blocks until the outcome is there
and is answered with `Taken`, whose actions come before the remaining ones. An island
that missed a round moves its step counter to the run's position, so that its next
window ends when the others' does.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.algorithm.schedule import jumped, next_send
from atoll.errors import Refused
from atoll.protocol.island_events import (
    Action,
    Await,
    End,
    Event,
    Leaving,
    Resend,
    Rest,
    Seal,
    Stepped,
    SyncNow,
    Take,
    Taken,
    Wanted,
)
from atoll.protocol.island_state import (
    CARRIED_ROUNDS,
    REFUSALS,
    Book,
    Flight,
    How,
    IslandState,
    Plan,
)
from atoll.protocol.messages import Position
from atoll.protocol.tables import WORK
from atoll.wire import Roster, Verdict


def join_at(position: Position, spoken_for: tuple[int, ...] = ()) -> IslandState:
    """Return the state of an island that has just received the run's weights."""
    books = tuple(
        Book(taken=open_round - 1, is_spoken_for=index in spoken_for)
        for index, open_round in enumerate(position.rounds)
    )
    return IslandState(step=position.step, books=books, last_round=position.last_round)


def wakes_at(state: IslandState, plan: Plan) -> int:
    """Return the step at which the machine next wants `Stepped`."""
    takes = [book.flight.take_at for book in state.books if book.flight]
    sends = [_next_send(index, state.step, plan) for index in range(plan.num_books)]
    return max(state.step + 1, min(takes + sends))


def _next_send(book: int, step: int, plan: Plan) -> int:
    return next_send(
        plan.schedule_of(book),
        step,
        sync_every=plan.sync_every,
        num_fragments=plan.num_fragments,
    )


def advance(
    state: IslandState, event: Event, plan: Plan
) -> tuple[IslandState, list[Action]]:
    """Advance the machine by one event.

    Raises:
        Refused: a fragment was refused three times in succession.
    """
    match event:
        case Stepped():
            return _stepped(state, event.step, plan)
        case Taken():
            return _taken(state, event, plan)
        case Wanted():
            return _wanted(state, event, plan)
        case SyncNow():
            state = replace(state, step=event.step, is_realigning=True)
            return _seal(state, range(plan.num_books), plan, take_at=state.step)
        case Leaving():
            return state, _departures(state)


def verdict_of(roster: Roster, island: str, digest: bytes) -> Verdict:
    """Return what a roster says of this very update."""
    entry = roster.entry(island)
    if entry is None or entry.digest != digest:
        return Verdict.LATE
    return entry.verdict


def decide(book: Book, verdict: Verdict, *, through: int) -> How:
    """Return what becomes of an island's work, by the verdict on its update.

    `through` is the last round that is applied together with the sealed one; the
    answer is the one of `tables.WORK`.
    """
    passed = min(through - book.taken - 1, CARRIED_ROUNDS + 1)
    return How(WORK[verdict.name.lower(), str(book.missed), str(passed)])


def _missed(book: Book, verdict: Verdict, through: int) -> int:
    first = book.taken + 1
    if verdict is Verdict.LATE:
        return book.missed + through - first + 1
    return through - first


def _stepped(
    state: IslandState, step: int, plan: Plan
) -> tuple[IslandState, list[Action]]:
    passed = _due(state.step, step, plan)
    due = [index for index in passed if not state.books[index].is_early]
    state = _without_early(replace(state, step=step), passed)
    takes: list[Action] = [
        Take(index, flight.round)
        for index, flight in _flights(state)
        if flight.take_at <= step and index not in due
    ]
    state, actions = _seal(state, due, plan)
    seals, later = _apart(actions)
    return state, [*seals, *takes, *later]


def _apart(actions: list[Action]) -> tuple[list[Action], list[Action]]:
    """Return what publishes and what waits: nobody waits before all is published.

    Others may wait for what this island has sealed, and it for them.
    """
    takes = [action for action in actions if isinstance(action, Take)]
    return [action for action in actions if action not in takes], list(takes)


def _due(before: int, step: int, plan: Plan) -> list[int]:
    fragments = jumped(
        before, step, sync_every=plan.sync_every, num_fragments=plan.num_fragments
    )
    last = plan.num_fragments - 1
    if plan.has_buffers and last in fragments:
        return [*fragments, plan.num_fragments]
    return list(fragments)


def _seal(
    state: IslandState,
    fragments: list[int] | range,
    plan: Plan,
    *,
    take_at: int | None = None,
) -> tuple[IslandState, list[Action]]:
    """Seal what has nothing in flight; the rest is taken first and sealed after."""
    overlap = min(plan.overlap_steps, plan.sync_every - 1)
    take_at = state.step + overlap if take_at is None else take_at
    seals: list[Action] = []
    takes: list[Action] = []
    for index in fragments:
        book = state.books[index]
        if book.flight:
            state = _with(state, index, replace(book, is_due=True))
            takes.append(Take(index, book.flight.round))
        elif not state.finished(book):
            flight = Flight(round=book.next_round, take_at=take_at)
            begin = Await if book.is_spoken_for else Seal
            book = replace(
                book,
                flight=flight,
                is_due=False,
                is_early=state.is_realigning,
                is_spoken_for=False,
            )
            state = _with(state, index, book)
            seals.append(begin(index, flight.round))
            if take_at <= state.step:
                takes.append(Take(index, flight.round))
    return state, seals + takes


def _taken(
    state: IslandState, event: Taken, plan: Plan
) -> tuple[IslandState, list[Action]]:
    book = state.books[event.fragment]
    refused = book.refused + 1 if event.verdict is Verdict.REFUSED else 0
    if refused >= REFUSALS:
        raise Refused(
            f"The run refused fragment {event.fragment} of this island {refused} times "
            "in succession. Its optimizer's moments are probably poisoned too: "
            "restart the island with a fresh optimizer and a lower learning rate."
        )
    missed = 0
    if event.verdict is not Verdict.REFUSED:
        missed = _missed(book, event.verdict, event.through)
    is_due = book.is_due
    book = Book(
        taken=event.through,
        missed=0 if missed > CARRIED_ROUNDS else missed,
        refused=refused,
        is_early=book.is_early and not missed,
    )
    state = _with(state, event.fragment, book)
    state = replace(state, last_round=event.position.last_round)
    due = [event.fragment] if is_due else []
    if state.is_astray:
        state = _take_position(state, event.position, plan)
    elif missed or state.is_realigning:
        state, due = _realign(state, event.position, plan, due, missed=missed)
    take_at = state.step if state.is_realigning else None
    state, actions = _seal(state, due, plan, take_at=take_at)
    if state.has_ended:
        actions.append(End())
    return state, actions


def _realign(
    state: IslandState, position: Position, plan: Plan, due: list[int], *, missed: int
) -> tuple[IslandState, list[int]]:
    """Move the step counter to the run's position, and seal what it jumps over."""
    if state.is_realigning and (due or any(b.flight for b in state.books)):
        return state, due
    if position.step <= state.step:
        if missed and not state.is_realigning:
            due = due + [i for i in _overdue(state, position, plan) if i not in due]
        return replace(state, is_realigning=False), due
    passed = _due(state.step, position.step, plan)
    state = _without_early(state, passed)
    if missed and not state.is_realigning:
        due = due + [
            index
            for index in passed
            if index not in due
            and position.rounds[index] == state.books[index].next_round
        ]
    return replace(state, step=position.step, is_realigning=False), due


def _overdue(state: IslandState, position: Position, plan: Plan) -> list[int]:
    """Return what the run will send for its open rounds where this island has passed.

    Its send point there went to a round that was over: for this fragment it is a round
    behind, though its step is not, and would be for good.
    """
    return [
        index
        for index, book in enumerate(state.books)
        if book.flight is None
        and book.next_round == position.rounds[index]
        and _next_send(index, position.step, plan) <= state.step
    ]


def _wanted(
    state: IslandState, event: Wanted, plan: Plan
) -> tuple[IslandState, list[Action]]:
    """Seal what others wait for, though it is not its time, and go on waiting.

    What was sealed for the open round already is on its way.
    """
    blocked = state.books[event.fragment].flight
    assert blocked is not None
    missing = [
        index
        for index in event.position.wanted
        if state.books[index].next_round <= event.position.rounds[index]
    ]
    for index in missing:
        book = replace(state.books[index], is_spoken_for=False)
        state = _with(state, index, book)
    state = replace(state, is_astray=state.is_astray or bool(missing))
    state, first = _catch_up(state, missing, event.position)
    due = [index for index in missing if not state.books[index].flight]
    state, actions = _seal(state, due, plan, take_at=state.step)
    seals, takes = _apart(actions)
    return state, [*seals, *first, Take(event.fragment, blocked.round), *takes]


def _catch_up(
    state: IslandState, missing: list[int], position: Position
) -> tuple[IslandState, list[Action]]:
    """Take the rounds that are over, before the open one can be sealed."""
    actions: list[Action] = []
    for index in missing:
        book = state.books[index]
        if book.flight is None and book.next_round < position.rounds[index]:
            flight = Flight(round=book.next_round, take_at=state.step)
            book = replace(book, flight=flight)
            actions.append(Await(index, flight.round))
        if book.flight:
            state = _with(state, index, replace(book, is_due=True))
            actions.append(Take(index, book.flight.round))
    return state, actions


def _take_position(state: IslandState, position: Position, plan: Plan) -> IslandState:
    """Move the step counter to where most islands are: from there all go in phase."""
    latest = position.step + min(plan.overlap_steps, plan.sync_every - 1)
    for index, book in enumerate(state.books):
        flight = book.flight
        if flight:
            flight = replace(flight, take_at=min(flight.take_at, latest))
        state = _with(state, index, replace(book, flight=flight, is_early=False))
    return replace(state, step=position.step, is_astray=False)


def _departures(state: IslandState) -> list[Action]:
    actions: list[Action] = []
    for index, book in enumerate(state.books):
        if book.flight:
            actions.append(Resend(index, book.flight.round))
        if not state.finished(book):
            # What an earlier life left in the open round stands there.
            actions.append(Rest(index, book.next_round + book.is_spoken_for))
    return actions


def _without_early(state: IslandState, passed: list[int]) -> IslandState:
    """Forget that fragments were sealed early: their send points are behind."""
    for index in passed:
        state = _with(state, index, replace(state.books[index], is_early=False))
    return state


def _flights(state: IslandState) -> list[tuple[int, Flight]]:
    """Return what is in flight, in the order in which it is to be taken."""
    flying = [(i, book.flight) for i, book in enumerate(state.books) if book.flight]
    return sorted(flying, key=lambda pair: pair[1].take_at)


def _with(state: IslandState, index: int, book: Book) -> IslandState:
    books = (*state.books[:index], book, *state.books[index + 1 :])
    return replace(state, books=books)
