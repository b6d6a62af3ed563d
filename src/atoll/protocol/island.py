"""The island's machine: when to seal, when to take, and how to treat work.

Rule 1: every change of an `IslandState` is made by `advance`, from one event.
Rule 2: a fragment has at most one update in flight. Its outcome is taken at
        `take_at`, never earlier, so that the same run gives the same bits.
Rule 3: the roster decides (`verdict_of`, `decide`); that an update was delivered means
        nothing.
Rule 4: outcomes of a fragment are taken in the order of their rounds.
Rule 5: round r of a fragment is due from its send point in the schedule's r-th
        period on. So the committed rounds, on which all agree, give the step of every
        island, and islands that got out of phase come back into it.

In an asynchronous run rounds do not tell steps:
Rule 6: an island seals a fragment at its own send points, for the round after the last
        one that it has taken. No outcome moves its step.
Rule 7: it takes the outcomes from there on, until a roster lists its update, so that
        nothing is late, and nothing is carried or dropped.

Theory of operation. The host counts inner steps and sends `Stepped` when `wakes_at`
is reached. It performs the actions in order. `Take` blocks until the outcome arrives
and is answered with `OutcomeTaken`, whose actions come before the remaining ones. With
each outcome an island's step moves ahead to the step that the committed rounds imply,
and an island that missed a round moves to the median step of the islands, so that its
next window ends when theirs does.

Events are the facts that the host reports; actions are the work that it must do.

A restarted island decides with `remaining_work` how much of the work in its checkpoint
has not counted yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from atoll.algorithm.schedule import next_send, send_step
from atoll.errors import Refused
from atoll.protocol.messages import Position
from atoll.protocol.tables import REJOINING, WORK, changed
from atoll.wire import Roster, Verdict

CARRIED_ROUNDS = 2
"""Work is carried over this many missed rounds; beyond that it is dropped."""

REFUSALS = 3
"""So many refusals in succession mean that the optimizer's moments are poisoned."""


class WorkDecision(StrEnum):
    """The effect of an outcome on an island's local weights."""

    ADOPT = "adopt"
    """Counted: rebase or mix, as the settings say."""

    REBASE = "rebase"
    """Counted, and later rounds passed: keep the progress since the seal."""

    CARRY = "carry"
    """Missed: keep all of the work, to contribute it next round."""

    DROP = "drop"
    """Missed too often: take the anchor, keep the residual."""

    REFUSE = "refuse"
    """Refused: take the anchor, clear the residual."""


@dataclass(frozen=True, kw_only=True)
class SyncPlan:
    """The part of the settings that the machine needs."""

    sync_every: int
    num_fragments: int
    overlap_steps: int
    has_buffers: bool = False
    """One more fragment, sent with the last one."""

    is_async: bool = False

    @property
    def num_books(self) -> int:
        return self.num_fragments + self.has_buffers

    def schedule_of(self, sync_state: int) -> int:
        """Return the fragment whose send points `sync_state` follows."""
        return min(sync_state, self.num_fragments - 1)


@dataclass(frozen=True, kw_only=True)
class RoundInFlight:
    """A sealed update whose outcome has not been taken."""

    round: int
    take_at: int
    is_awaited: bool = False
    """This incarnation has no update in it: the round is over or published before."""


@dataclass(frozen=True, kw_only=True)
class FragmentSync:
    """The state of one fragment's syncs on an island."""

    taken: int
    """The last round whose outcome was taken; 0 is the founding."""

    missed: int = 0
    refused: int = 0
    flight: RoundInFlight | None = None
    is_due: bool = False
    """Wanted now: to be sealed as soon as the update in flight is taken."""

    not_before: int = 0
    """The step before which nothing is sealed: an island has just joined, or an
    asynchronous one has sealed in this window."""

    is_spoken_for: bool = False
    """An earlier incarnation has published for the next round: only take it."""

    @property
    def next_round(self) -> int:
        return (self.flight.round if self.flight else self.taken) + 1


@dataclass(frozen=True, kw_only=True)
class IslandState:
    """The machine's whole state."""

    step: int
    sync_states: tuple[FragmentSync, ...]
    last_round: int | None = None
    last_rounds: tuple[int | None, ...] | None = None
    """Of each fragment, in an asynchronous run whose end is decided."""

    def last_of(self, index: int) -> int | None:
        """Return the last round of a fragment, if it is known."""
        return self.last_round if self.last_rounds is None else self.last_rounds[index]

    def finished(self, index: int) -> bool:
        last = self.last_of(index)
        return last is not None and self.sync_states[index].next_round > last

    @property
    def has_ended(self) -> bool:
        return all(
            self.finished(index) and sync_state.flight is None
            for index, sync_state in enumerate(self.sync_states)
        )


@dataclass(frozen=True)
class Stepped:
    """The island's step counter has reached `step`."""

    step: int


@dataclass(frozen=True, kw_only=True)
class OutcomeTaken:
    """The outcome of the update in flight, and of later rounds, is in the weights."""

    fragment: int
    verdict: Verdict
    through: int
    """The last round taken: more than the sealed one when rounds passed meanwhile."""

    position: Position


@dataclass(frozen=True)
class FragmentsRequested:
    """All islands wait: this one for `fragment`, others for it at `position.wanted`."""

    fragment: int
    position: Position


@dataclass(frozen=True)
class NeverOpens:
    """The round in flight of a fragment will not open: the one before was the last."""

    fragment: int
    last_round: int | None = None
    """The last round, which an asynchronous island has taken before it learned that."""


@dataclass(frozen=True)
class SyncNow:
    """The user wants every fragment's work in its open round, at this step."""

    step: int


@dataclass(frozen=True)
class Leaving:
    """The island leaves: all of its work must be published."""


Event = Stepped | OutcomeTaken | FragmentsRequested | NeverOpens | SyncNow | Leaving


@dataclass(frozen=True)
class Seal:
    """Seal the fragment's work for `round` and publish it."""

    fragment: int
    round: int


@dataclass(frozen=True)
class Await:
    """Only take `round`: an earlier incarnation has sealed for it, or it is over."""

    fragment: int
    round: int


@dataclass(frozen=True)
class Take:
    """Wait for the outcome of the update in flight, take it, send `OutcomeTaken`.

    Does nothing if a request in between has taken it already.
    """

    fragment: int
    round: int


@dataclass(frozen=True)
class Resend:
    """Publish the update in flight again, same bytes, marked departing."""

    fragment: int
    round: int


@dataclass(frozen=True)
class PublishRest:
    """Publish the work since the last seal as a departing update for `round`."""

    fragment: int
    round: int


@dataclass(frozen=True)
class End:
    """Every fragment has taken the run's last round."""


Action = Seal | Await | Take | Resend | PublishRest | End


def join_at(
    position: Position, plan: SyncPlan, spoken_for: tuple[int, ...] = ()
) -> IslandState:
    """Return the state of an island that has just received the run's weights.

    It does not join a round that is about to close: the first seal of a fragment is
    at its next send point.
    """
    step = position.step
    if not plan.is_async:
        step = max(step, _reached(position, plan))
    sync_states = tuple(
        FragmentSync(
            taken=open_round - 1,
            is_spoken_for=index in spoken_for,
            not_before=_next_send(index, step, plan),
        )
        for index, open_round in enumerate(position.rounds)
    )
    return IslandState(
        step=step,
        sync_states=sync_states,
        last_round=position.last_round,
        last_rounds=position.last_rounds,
    )


def wakes_at(state: IslandState, plan: SyncPlan) -> int:
    """Return the step at which the machine next wants `Stepped`."""
    moments = [
        sync_state.flight.take_at
        if sync_state.flight
        else _due_at(index, sync_state, plan)
        for index, sync_state in enumerate(state.sync_states)
        if sync_state.flight or not state.finished(index)
    ]
    return max(state.step + 1, min(moments, default=state.step + plan.sync_every))


def _due_at(index: int, sync_state: FragmentSync, plan: SyncPlan) -> int:
    """Return the step from which the next round of a fragment is to be sealed."""
    if plan.is_async:
        return sync_state.not_before
    return max(sync_state.not_before, _send_step(index, sync_state.next_round, plan))


def _send_step(index: int, round: int, plan: SyncPlan) -> int:
    return send_step(
        plan.schedule_of(index),
        round - 1,
        sync_every=plan.sync_every,
        num_fragments=plan.num_fragments,
    )


def _next_send(index: int, step: int, plan: SyncPlan) -> int:
    return next_send(
        plan.schedule_of(index),
        step,
        sync_every=plan.sync_every,
        num_fragments=plan.num_fragments,
    )


def _reached(position: Position, plan: SyncPlan) -> int:
    """Return the step that a run with these rounds behind it has reached at least."""
    return max(
        _send_step(index, number - 1, plan) if number > 1 else 0
        for index, number in enumerate(position.rounds)
    )


def advance(
    state: IslandState, event: Event, plan: SyncPlan
) -> tuple[IslandState, list[Action]]:
    """Advance the machine by one event.

    Raises:
        Refused: a fragment was refused three times in succession.
    """
    match event:
        case Stepped():
            return _stepped(state, event.step, plan)
        case OutcomeTaken():
            return _taken(state, event, plan)
        case FragmentsRequested():
            return _wanted(state, event, plan)
        case NeverOpens():
            return _never_opens(state, event)
        case SyncNow():
            state = changed(state, step=event.step)
            return _seal(state, range(plan.num_books), plan, is_now=True)
        case Leaving():
            return state, _departures(state)


def verdict_of(roster: Roster, island: str, digest: bytes) -> Verdict:
    """Return the verdict of a roster on this very update."""
    entry = roster.entry(island)
    if entry is None or entry.digest != digest:
        return Verdict.LATE
    return entry.verdict


def decide(
    sync_state: FragmentSync,
    verdict: Verdict,
    *,
    through: int,
    listed: int | None = None,
) -> WorkDecision:
    """Return how to treat an island's work, by the verdict on its update.

    `through` is the last round that is applied together with the sealed one. `listed`
    is the round whose roster lists the update, in an asynchronous run, or the round
    that the island has awaited without one. The answer is the one of `tables.WORK`.
    """
    first = sync_state.taken + 1 if listed is None else listed
    passed = min(through - first, CARRIED_ROUNDS + 1)
    updates = "in step" if listed is None else "stand"
    return WorkDecision(
        WORK[verdict.name.lower(), str(sync_state.missed), str(passed), updates]
    )


def _missed(sync_state: FragmentSync, event: OutcomeTaken, plan: SyncPlan) -> int:
    """Return how many rounds in succession have missed the fragment's work."""
    verdict, through = event.verdict, event.through
    if plan.is_async or verdict is Verdict.REFUSED:
        return 0
    first = sync_state.taken + 1
    if verdict is Verdict.LATE:
        return sync_state.missed + through - first + 1
    return through - first


def _stepped(
    state: IslandState, step: int, plan: SyncPlan
) -> tuple[IslandState, list[Action]]:
    state = changed(state, step=step)
    take_actions: list[Action] = [
        Take(index, flight.round)
        for index, flight in _flights(state)
        if flight.take_at <= step
    ]
    state, actions = _seal(state, _due(state, plan), plan)
    seals, later = _apart(actions)
    return state, [*seals, *take_actions, *later]


def _apart(actions: list[Action]) -> tuple[list[Action], list[Action]]:
    """Return publishing actions and waiting actions: all are published before any wait.

    Others may wait for the updates of this island, and it for theirs.
    """
    take_actions: list[Action] = [
        action for action in actions if isinstance(action, Take)
    ]
    return [action for action in actions if action not in take_actions], take_actions


def _due(state: IslandState, plan: SyncPlan) -> list[int]:
    """Return the fragments to be sealed, in the order of the schedule."""
    due = [
        (_due_at(index, sync_state, plan), index)
        for index, sync_state in enumerate(state.sync_states)
        if sync_state.flight is None and not state.finished(index)
    ]
    return [index for step, index in sorted(due) if step <= state.step]


def _seal(
    state: IslandState,
    fragments: list[int] | range,
    plan: SyncPlan,
    *,
    is_now: bool = False,
) -> tuple[IslandState, list[Action]]:
    """Seal fragments with nothing in flight; take the others first, then seal.

    With `is_now` no step is made in flight: the island waits for the outcome.
    """
    seals: list[Action] = []
    take_actions: list[Action] = []
    for index in fragments:
        sync_state = state.sync_states[index]
        if sync_state.flight:
            state = _with(state, index, changed(sync_state, is_due=True))
            take_actions.append(Take(index, sync_state.flight.round))
        elif not state.finished(index):
            flight = _flight(index, sync_state, state.step, plan, is_now=is_now)
            begin = Await if flight.is_awaited else Seal
            sync_state = changed(
                sync_state, flight=flight, is_due=False, is_spoken_for=False
            )
            if plan.is_async:
                not_before = _next_send(index, state.step, plan)
                sync_state = changed(sync_state, not_before=not_before)
            state = _with(state, index, sync_state)
            seals.append(begin(index, flight.round))
            if flight.take_at <= state.step:
                take_actions.append(Take(index, flight.round))
    return state, seals + take_actions


def _flight(
    index: int, sync_state: FragmentSync, step: int, plan: SyncPlan, *, is_now: bool
) -> RoundInFlight:
    """Return the flight of the next round; it lands before the round after is due."""
    if plan.is_async:
        window = _next_send(index, step, plan) - step
    else:
        window = _send_step(index, sync_state.next_round + 1, plan) - step
    overlap = 0 if is_now else max(0, min(plan.overlap_steps, window - 1))
    return RoundInFlight(
        round=sync_state.next_round,
        take_at=step + overlap,
        is_awaited=sync_state.is_spoken_for,
    )


def _taken(
    state: IslandState, event: OutcomeTaken, plan: SyncPlan
) -> tuple[IslandState, list[Action]]:
    sync_state = state.sync_states[event.fragment]
    refused = sync_state.refused + 1 if event.verdict is Verdict.REFUSED else 0
    if refused >= REFUSALS:
        raise Refused(
            f"The run refused fragment {event.fragment} of this island {refused} times "
            "in succession; the warnings before this say why. If its values were not "
            "finite or too large, its optimizer's moments are probably poisoned too: "
            "restart the island with a fresh optimizer and a lower learning rate. If "
            "its updates are meant to be that large, raise limits.max_update_norm."
        )
    missed = _missed(sync_state, event, plan)
    is_due = sync_state.is_due
    sync_state = FragmentSync(
        taken=event.through,
        missed=0 if missed > CARRIED_ROUNDS else missed,
        refused=refused,
        not_before=sync_state.not_before if plan.is_async else 0,
    )
    state = _with(state, event.fragment, sync_state)
    state = _moved(state, event.position, plan, has_missed=missed > 0)
    if is_due:
        state, actions = _seal(state, [event.fragment], plan, is_now=True)
    else:
        state, actions = _follow(state, event.position, plan)
    if state.has_ended:
        actions.append(End())
    return state, actions


def _moved(
    state: IslandState, position: Position, plan: SyncPlan, *, has_missed: bool
) -> IslandState:
    """Return the state at the step that the run has reached, if that is ahead."""
    if plan.is_async:
        last_rounds = position.last_rounds or state.last_rounds
        return changed(state, last_round=position.last_round, last_rounds=last_rounds)
    step = max(state.step, _reached(position, plan))
    if has_missed:
        step = max(step, position.step)
    return changed(state, step=step, last_round=position.last_round)


def _follow(
    state: IslandState, position: Position, plan: SyncPlan
) -> tuple[IslandState, list[Action]]:
    """Seal fragments that have become due with an outcome, if their round is open."""
    due = _due(state, plan)
    state, first = _catch_up(state, due, position, plan, is_due=False)
    due = [index for index in due if not state.sync_states[index].flight]
    state, actions = _seal(state, due, plan)
    return state, [*actions, *first]


def _wanted(
    state: IslandState, event: FragmentsRequested, plan: SyncPlan
) -> tuple[IslandState, list[Action]]:
    """Seal the fragments that others wait for before they are due, and keep waiting.

    An update that was already sealed for the open round is in flight. If the run
    requests a fragment for which an earlier incarnation had published, that update is
    lost.
    """
    blocked = state.sync_states[event.fragment].flight
    assert blocked is not None
    for index in event.position.wanted:
        sync_state = _unspoken(state.sync_states[index], event.position.rounds[index])
        state = _with(state, index, sync_state)
    missing = [
        index
        for index in event.position.wanted
        if state.sync_states[index].next_round <= event.position.rounds[index]
    ]
    state, first = _catch_up(state, missing, event.position, plan, is_due=True)
    due = [index for index in missing if not state.sync_states[index].flight]
    state, actions = _seal(state, due, plan, is_now=True)
    seals, take_actions = _apart(actions)
    again = Take(event.fragment, blocked.round)
    return state, [
        *seals,
        *first,
        again,
        *(action for action in take_actions if action != again),
    ]


def _never_opens(
    state: IslandState, event: NeverOpens
) -> tuple[IslandState, list[Action]]:
    """End one fragment; the others continue up to their last round.

    Outcomes are taken in order, so that the last round is the one before the flight;
    an asynchronous island has looked for its update up to the last round. Only there
    fragments end with different rounds.
    """
    sync_state = state.sync_states[event.fragment]
    assert sync_state.flight is not None
    sync_state = changed(sync_state, flight=None, is_due=False)
    if event.last_round is None:
        state = changed(state, last_round=sync_state.taken)
    else:
        sync_state = changed(sync_state, taken=event.last_round)
        last_rounds = list(state.last_rounds or (None,) * len(state.sync_states))
        last_rounds[event.fragment] = event.last_round
        state = changed(state, last_rounds=tuple(last_rounds))
    state = _with(state, event.fragment, sync_state)
    return state, [End()] if state.has_ended else []


def _unspoken(sync_state: FragmentSync, open_round: int) -> FragmentSync:
    """Return the book of a fragment for which this incarnation must publish itself."""
    flight = sync_state.flight
    if flight and flight.is_awaited and flight.round == open_round:
        sync_state = changed(sync_state, flight=None)
    return changed(sync_state, is_spoken_for=False)


def _catch_up(
    state: IslandState,
    missing: list[int],
    position: Position,
    plan: SyncPlan,
    *,
    is_due: bool,
) -> tuple[IslandState, list[Action]]:
    """Take the rounds that are over, before the open one can be sealed.

    Those of an asynchronous run need not be taken before a seal.
    """
    actions: list[Action] = []
    for index in missing:
        sync_state = state.sync_states[index]
        is_behind = sync_state.next_round < position.rounds[index] and not plan.is_async
        if sync_state.flight is None and is_behind:
            flight = RoundInFlight(
                round=sync_state.next_round, take_at=state.step, is_awaited=True
            )
            sync_state = changed(sync_state, flight=flight)
            actions.append(Await(index, flight.round))
        if sync_state.flight:
            state = _with(state, index, changed(sync_state, is_due=is_due))
            actions.append(Take(index, sync_state.flight.round))
    return state, actions


def _departures(state: IslandState) -> list[Action]:
    actions: list[Action] = []
    for index, sync_state in enumerate(state.sync_states):
        if sync_state.flight:
            actions.append(Resend(index, sync_state.flight.round))
        if not state.finished(index):
            # An earlier incarnation's update stands in the open round.
            actions.append(
                PublishRest(index, sync_state.next_round + sync_state.is_spoken_for)
            )
    return actions


def _flights(state: IslandState) -> list[tuple[int, RoundInFlight]]:
    """Return the updates in flight, in the order in which to take them."""
    in_flight = [
        (i, sync_state.flight)
        for i, sync_state in enumerate(state.sync_states)
        if sync_state.flight
    ]
    return sorted(in_flight, key=lambda pair: pair[1].take_at)


def _with(state: IslandState, index: int, sync_state: FragmentSync) -> IslandState:
    sync_states = (
        *state.sync_states[:index],
        sync_state,
        *state.sync_states[index + 1 :],
    )
    return changed(state, sync_states=sync_states)


class RemainingWork(StrEnum):
    """How much of the saved work no round has."""

    ALL = "all of it"
    SINCE = "what came since its seal"
    NONE = "nothing"
    LOST = "lost"


class CountedSince(StrEnum):
    """Which update of the island has counted after the saved base."""

    NOTHING = "nothing"
    SAVED = "the saved update"
    ANOTHER = "another"


def remaining_work(
    since: CountedSince, *, is_refused: bool, is_base_known: bool
) -> RemainingWork:
    """Return how much saved work a restarted island keeps (`tables.REJOINING`)."""
    return RemainingWork(
        REJOINING[
            since.value,
            "refused" if is_refused else "not refused",
            "known" if is_base_known else "unknown",
        ]
    )


def counted_in(roster: Roster, island: str, digest: bytes) -> CountedSince | None:
    """Return which update of an island a roster counts; None: it was refused.

    `digest` is that of the saved update, or empty.
    """
    entry = roster.entry(island)
    if entry is None or entry.verdict is Verdict.LATE:
        return CountedSince.NOTHING
    if entry.verdict is Verdict.REFUSED:
        return None
    return CountedSince.SAVED if entry.digest == digest else CountedSince.ANOTHER
