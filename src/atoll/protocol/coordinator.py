"""The coordinator's machine: membership, rounds and epochs, and nothing that happens.

Rule 1: every change of a `CoordinatorState` is made by `advance`, from one event.
Rule 2: this file does not know how messages arrive, what time it is, what a body holds
        or where the journal is. It says what to do; the host does it and says so.
Rule 3: what must survive a crash is an action (`Remember`, `Close`) that the host makes
        durable before it answers anybody.

Theory of operation. An island's update is judged by its header (`Offered`) before its
body is read, and staged (`Stored`) when the body is here and verified. After every
event the machine looks which rounds can close; `Close` tells the host to reduce, to
journal and to take the outer step, and the host answers with `Committed`, which opens
the next round. `wakes_at` says when nothing but time can change something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from atoll.errors import Refused, Unreachable, UsageError
from atoll.protocol.events import (
    Action,
    Beaten,
    Close,
    Closed,
    Committed,
    Epoch,
    Event,
    Founded,
    Joining,
    Leave,
    NewValues,
    Offered,
    Pausing,
    Recovered,
    Remember,
    Say,
    Stopping,
    Stored,
    Tick,
    Welcome,
)
from atoll.protocol.judge import judge_updates
from atoll.protocol.membership import LEASE_S, Member
from atoll.protocol.messages import Beat
from atoll.protocol.recovery import all_heard, lost_state
from atoll.protocol.rounds import Phase, Reception, Round
from atoll.protocol.run_state import CoordinatorState, Founding
from atoll.protocol.values import changed
from atoll.settings import EPOCH_KEYS
from atoll.wire import Header, Roster, RosterEntry, Verdict

Result = tuple[CoordinatorState, list[Action]]


def advance(state: CoordinatorState, event: Event, now_s: float) -> Result:
    """Advance the machine by one event.

    Raises:
        UsageError, ModelError, LeaseLost, Refused: the event is refused, and nothing
            has changed.
    """
    state, actions = HANDLERS[type(event)](state, event, now_s)
    if isinstance(event, Offered):
        return state, actions  # settled before it was judged, and nothing has changed
    state, closings = _settle(state, now_s)
    return state, actions + closings


def wakes_at(state: CoordinatorState, now_s: float) -> float:
    """Return when time alone may change something; infinity when it cannot."""
    terms = state.terms
    moments = [
        moment_s
        for round in state.rounds
        if round.phase is Phase.OPEN and len(round.staged) >= state.settings.run.quorum
        for island in round.missing(state.members, now_s)
        for moment_s in (
            round.late_at_s(island, state.members, terms),
            state.members.known[island].lease_until_s,
        )
    ]
    moments += [
        member.lease_until_s
        for member in state.members.known.values()
        if not member.is_heard
    ]
    if state.founding:
        moments.append(state.founding.until_s)
    return min((moment_s for moment_s in moments if moment_s > now_s), default=_NEVER)


_NEVER = float("inf")


def _settle(state: CoordinatorState, now_s: float) -> Result:
    """Open what waited for islands to join, and close what can close."""
    state = _start(state, now_s)
    if state.is_paused or not all_heard(state.members, now_s):
        return state, []
    actions: list[Action] = []
    terms = state.terms
    for index, round in enumerate(state.rounds):
        can_close = round.can_close(state.members, terms, now_s)
        if can_close and not lost_state(round, state.members, now_s):
            roster = _roster(state, round, now_s)
            state = _with_round(state, index, round.close(roster))
            actions.append(
                Close(
                    fragment=index,
                    round=round.number,
                    roster=roster,
                    staged=tuple(round.staged.values()),
                    outer=round.outer,
                    epoch=state.epoch,
                )
            )
    return state, actions


def _start(state: CoordinatorState, now_s: float) -> CoordinatorState:
    """Open the first rounds once `start_islands` are here, or left their work."""
    if state.has_started or not state.rounds:
        return state
    live = state.members.live(now_s)
    taking_part = live.union(*(round.staged for round in state.rounds))
    if len(taking_part) < state.settings.run.start_islands:
        return state
    rounds = tuple(
        changed(round, phase=Phase.OPEN, opened_s=now_s, candidates=live)
        if round.phase is Phase.WAITING
        else round
        for round in state.rounds
    )
    return changed(state, rounds=rounds)


def _roster(state: CoordinatorState, round: Round, now_s: float) -> Roster:
    judged = judge_updates(
        round.staged.values(),
        base=round.base,
        known_bases=round.bases,
        max_update_norm=state.settings.limits.max_update_norm,
        norms=round.norms,
    )
    late = [
        RosterEntry(
            island=island,
            incarnation=state.members.known[island].incarnation,
            digest=b"",
            weight=0,
            verdict=Verdict.LATE,
        )
        for island in round.missing(state.members, now_s)
    ]
    return Roster(tuple(sorted([*judged.entries, *late], key=lambda e: e.island)))


def _join(state: CoordinatorState, event: Joining, now_s: float) -> Result:
    request = event.request
    if state.model is not None:
        request.model.require_same(state.model)
    position = state.position(now_s)
    members, member = state.members.join(
        request,
        event.key,
        event.nonce,
        now_s=now_s,
        max_islands=state.settings.run.max_islands,
        step=position.step,
    )
    is_founder = state.model is None
    if is_founder and _founded_by_another(state, member, now_s):
        raise Unreachable("Another island is founding the run. Ask again.")
    before = state.members.known.get(member.island)
    if before is not None and _is_new_life(before, member):
        rounds = tuple(round.without(member.island) for round in state.rounds)
        state = changed(state, rounds=rounds)
    state = changed(state, members=members)
    if is_founder:
        founding = Founding(
            island=member.island,
            incarnation=member.incarnation,
            model=request.model,
            until_s=now_s + LEASE_S,
        )
        state = changed(state, founding=founding)
    spoken_for = tuple(
        round.fragment for round in state.rounds if member.island in round.staged
    )
    welcome = Welcome(member, position, is_founder, spoken_for)
    return state, [Remember(member), welcome]


def _is_new_life(before: Member, member: Member) -> bool:
    """Return whether an island begins anew: rounds wait for it from the next on."""
    return before.incarnation != member.incarnation


def _founded_by_another(state: CoordinatorState, member: Member, now_s: float) -> bool:
    founding = state.founding
    if founding is None or now_s > founding.until_s:
        return False
    who = (founding.island, founding.incarnation)
    return who != (member.island, member.incarnation)


def _founded(state: CoordinatorState, event: Founded, now_s: float) -> Result:
    founding = state.founding_of(event.island, event.incarnation)
    rounds = tuple(
        Round(
            fragment=index,
            number=1,
            phase=Phase.WAITING,
            base=digest,
            bases=(digest,),
            outer=outer,
        )
        for index, (digest, outer) in enumerate(
            zip(event.digests, event.outers, strict=True)
        )
    )
    state = changed(state, model=founding.model, founding=None, rounds=rounds)
    return state, [Say(state.position(now_s))]


def _beat(state: CoordinatorState, event: Beaten, now_s: float) -> Result:
    beat = event.beat
    member = state.members.require(beat.island, beat.incarnation)
    _require_plausible(state, beat)
    members = state.members.beat(member, beat, now_s=now_s)
    state = changed(state, members=members)
    founding = state.founding
    if founding and (founding.island, founding.incarnation) == (
        beat.island,
        beat.incarnation,
    ):
        founding = changed(founding, until_s=now_s + LEASE_S)
        state = changed(state, founding=founding)
    if not event.is_asking:
        return state, []
    return state, [Say(state.position(now_s, island=beat.island))]


def _require_plausible(state: CoordinatorState, beat: Beat) -> None:
    """Refuse what no island of this run can say: others are led by it."""
    if beat.holds and state.rounds and len(beat.holds) != len(state.rounds):
        raise Refused(
            f"Island {beat.island!r} says what it holds of {len(beat.holds)} "
            f"fragments, and the run has {len(state.rounds)}. Join again."
        )
    if beat.step <= _last_step(state, ()):
        return
    held = [member.holds for member in state.members.known.values()]
    rounds = [each.round + 1 for holds in (beat.holds, *held) for each in holds]
    if beat.step > (last := _last_step(state, rounds)):
        furthest = max([1, *rounds, *(round.number for round in state.rounds)])
        raise Refused(
            f"Island {beat.island!r} says that it has made step {beat.step}, and with "
            f"round {furthest} open nobody gets beyond {last}. Join again."
        )


def _last_step(state: CoordinatorState, rounds: Iterable[int]) -> int:
    """Return the step that nobody gets beyond, when these rounds may be open too.

    Who has joined waits for its next send point, and stands still a window later.
    """
    furthest = max([1, *rounds, *(round.number for round in state.rounds)])
    return (furthest + 3) * state.settings.sync.sync_every


def _offer(state: CoordinatorState, event: Offered, now_s: float) -> Result:
    """Judge a header; a round that is due to close does so before it can be wanted."""
    header = event.header
    member = state.members.require(header.island, header.incarnation)
    state, closings = _settle(state, now_s)
    return state, [*closings, Say(_receive(state, member, header))]


def _store(state: CoordinatorState, event: Stored, now_s: float) -> Result:
    """Stage an update; one whose round has closed meanwhile changes nothing."""
    header = event.header
    member = state.members.require(header.island, header.incarnation)
    round = _round(state, header)
    reception = _receive(state, member, header)
    if reception is Reception.WANTED:
        state = _with_round(state, header.fragment, round.stage(header, now_s))
        if header.round == round.number and round.phase is Phase.OPEN:
            seconds = max(0.0, now_s - round.opened_s)
            learned = member.arrived(header.fragment, seconds)
            state = changed(state, members=state.members.with_member(learned))
        reception = Reception.STAGED
    return state, [Say(reception)]


def _receive(state: CoordinatorState, member: Member, header: Header) -> Reception:
    """Judge a header; only a run that has lost rounds may find it early."""
    round = _round(state, header)
    held = member.holds[header.fragment].round if member.holds else 0
    if not member.is_heard:
        return round.receive(header, its_island="not heard yet")
    is_ahead = held >= round.number
    return round.receive(
        header, its_island="ahead of the run" if is_ahead else "in step"
    )


def _leave(state: CoordinatorState, event: Leave, now_s: float) -> Result:
    member = state.members.require(event.island, event.incarnation)
    state = changed(state, members=state.members.leave(member))
    if state.founding and state.founding.island == event.island:
        state = changed(state, founding=None)
    return state, [Remember(event)]


def _close(state: CoordinatorState, event: Closed, now_s: float) -> Result:
    member = state.members.require(event.island, event.incarnation)
    return changed(state, members=state.members.close(member, now_s=now_s)), []


def _tick(state: CoordinatorState, event: Tick, now_s: float) -> Result:
    if state.founding and now_s > state.founding.until_s:
        state = changed(state, founding=None)
    return state, []


def _commit(state: CoordinatorState, event: Committed, now_s: float) -> Result:
    closing = state.rounds[event.fragment]
    state = _count(state, event.fragment, closing.number, event.roster)
    state = end_by_tokens(state)
    opened = closing.commit(
        base=event.digest,
        outer=event.outer,
        candidates=state.members.live(now_s),
        now_s=now_s,
        last_round=state.last_round,
    )
    return _bounded(_with_round(state, event.fragment, opened), now_s), []


def _recover(state: CoordinatorState, event: Recovered, now_s: float) -> Result:
    """Go on after a state that an island has brought."""
    round = state.rounds[event.fragment]
    for number, roster in event.rosters:
        state = _count(state, event.fragment, number, roster)
    opened = round.recover(
        event.state,
        outer=event.outer,
        candidates=state.members.live(now_s),
        now_s=now_s,
        last_round=state.last_round,
    )
    state = _with_round(state, event.fragment, opened)
    return state, [Say(state.position(now_s))]


def _count(
    state: CoordinatorState, fragment: int, round: int, roster: Roster
) -> CoordinatorState:
    counted = state.counted.adding(
        roster, fragment=fragment, round=round, num_fragments=len(state.rounds)
    )
    return changed(state, counted=counted)


def end_by_tokens(state: CoordinatorState) -> CoordinatorState:
    """Return the state with a last round, if `end_tokens` have been counted."""
    limit = state.settings.run.end_tokens
    if limit is None or state.last_round is not None or state.counted.tokens < limit:
        return state
    return changed(state, last_round=_furthest(state))


def _furthest(state: CoordinatorState) -> int:
    """Return the highest round that anybody has published for."""
    return max(round.number - (not round.staged) for round in state.rounds)


def _set_values(state: CoordinatorState, event: NewValues, now_s: float) -> Result:
    fixed = sorted(event.values.keys() - EPOCH_KEYS)
    if fixed:
        raise UsageError(
            f"{fixed[0]} cannot change while a run goes on. "
            f"What can: {', '.join(sorted(EPOCH_KEYS))}."
        )
    settings = state.settings.with_values(event.values)
    epoch = Epoch(state.epoch + 1, event.values)
    last = state.last_round
    if "run.end_rounds" in event.values:
        last = settings.run.end_rounds
        _require_not_passed(state, last)
    state = changed(state, settings=settings, epoch=epoch.number, last_round=last)
    return _bounded(state, now_s), [Remember(epoch)]


def _require_not_passed(state: CoordinatorState, last: int | None) -> None:
    furthest = _furthest(state) if state.rounds else 0
    if last is not None and last < furthest:
        raise UsageError(
            f"run.end_rounds={last} is over: round {furthest} has been published. "
            f"Give {furthest} or more."
        )


def _bounded(state: CoordinatorState, now_s: float) -> CoordinatorState:
    """Return the state with no round open beyond the last, and none ended before it."""
    last, live = state.last_round, state.members.live(now_s)
    rounds = []
    for round in state.rounds:
        is_over = last is not None and round.number > last
        if is_over and round.phase in (Phase.WAITING, Phase.OPEN):
            round = changed(round, phase=Phase.ENDED)
        elif round.phase is Phase.ENDED and not is_over:
            round = changed(round, phase=Phase.OPEN, opened_s=now_s, candidates=live)
        rounds.append(round)
    return changed(state, rounds=tuple(rounds))


def _stop(state: CoordinatorState, event: Stopping, now_s: float) -> Result:
    """End with the rounds that are under way; that they are the last is an epoch."""
    last = _furthest(state) if state.rounds else 0
    actions: list[Action] = []
    if last:
        values = NewValues({"run.end_rounds": last})
        state, actions = _set_values(state, values, now_s)
    state = _bounded(changed(state, last_round=last), now_s)
    return state, [*actions, Say(state.position(now_s))]


def _pause(state: CoordinatorState, event: Pausing, now_s: float) -> Result:
    state = changed(state, is_paused=event.is_paused)
    return state, [Remember(event), Say(state.position(now_s))]


HANDLERS: Mapping[type, Callable[[CoordinatorState, Any, float], Result]] = {
    Joining: _join,
    Founded: _founded,
    Beaten: _beat,
    Offered: _offer,
    Stored: _store,
    Leave: _leave,
    Closed: _close,
    Tick: _tick,
    Committed: _commit,
    Recovered: _recover,
    NewValues: _set_values,
    Stopping: _stop,
    Pausing: _pause,
}


def _round(state: CoordinatorState, header: Header) -> Round:
    if header.run != state.run:
        raise Refused(
            f"The frame belongs to run {header.run!r}, and this is {state.run!r}. "
            "Join this run first."
        )
    if not 0 <= header.fragment < len(state.rounds):
        raise Refused(
            f"Fragment {header.fragment} does not exist: the run has "
            f"{len(state.rounds)}. Take the settings from the run."
        )
    return state.rounds[header.fragment]


def _with_round(state: CoordinatorState, index: int, round: Round) -> CoordinatorState:
    rounds = (*state.rounds[:index], round, *state.rounds[index + 1 :])
    return changed(state, rounds=rounds)
