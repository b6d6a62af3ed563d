"""The coordinator's machine: membership, rounds and epochs, and nothing that happens.

Rule 1: every change of a `CoordinatorState` is made by `advance`, from one event. The
        handlers of rounds are in this module, those of join, heartbeat and leave in
        `join_leave`, those of operators in `operators`, and those of a run that other
        processes decide in `observer`.
Rule 2: none of them knows the transport, the clock, the content of a body or the
        journal. They return actions; the host performs them and reports the result.
Rule 3: a change that must survive a crash is an action (`Persist`, `CloseRound`) that
        the host makes durable before it sends any response.

Theory of operation. The machine judges an island's update by its header
(`UpdateOffered`) before its body is read, and stages it (`UpdateStored`) once the body
is received and verified. After every event the machine checks which rounds can close.
`CloseRound` makes the host reduce, journal and take the outer step; the host answers
with `Committed`, which opens the next round. `wakes_at` returns the next moment at
which time alone can change something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from atoll.algorithm.pace import local_steps
from atoll.protocol import events, join_leave, observer, operators, rows
from atoll.protocol.coordinator_state import CoordinatorState, all_heard, lost_state
from atoll.protocol.membership import Member
from atoll.protocol.rounds import Phase, Reception, Round, judge_updates
from atoll.protocol.tables import changed
from atoll.wire import FrameKind, Header, Roster, RosterEntry, Verdict


def advance(
    state: CoordinatorState, event: events.Event, now_s: float
) -> events.Result:
    """Advance the machine by one event.

    Raises:
        UsageError, ModelError, LeaseLost, Refused, RunMoved, Unreachable: the event is
            refused, and nothing has changed.
    """
    if state.move is not None:
        operators.require_still(state, event)
    state, actions = HANDLERS[type(event)](state, event, now_s)
    if isinstance(event, events.UpdateOffered) or _comes_along(event):
        return state, actions  # settled before it was judged, or with the next event
    # A commit makes nothing else durable: the next event looks at the rows.
    if state.ledger is not None and not isinstance(event, events.Committed):
        state, changes = rows.settle(state, now_s)
        actions = actions + changes
    endings: list[events.Action] = []
    if isinstance(event, _DECIDING):
        state, endings = operators.decide_end(state, now_s, is_restored=True)
    state, closings = _settle(state, now_s)
    return state, actions + endings + closings


_DECIDING = (events.Tick, events.HeartbeatReceived, events.UpdateStored)
"""Events that find out that a run is to end, if no earlier event could make that
durable: after a restart, a recovery, or the founding of a run of one round."""


def _comes_along(event: events.Event) -> bool:
    """Return whether an event is a heartbeat that came with an update."""
    return isinstance(event, events.HeartbeatReceived) and not event.is_asking


def wakes_at(state: CoordinatorState, now_s: float) -> float:
    """Return when time alone may change something; infinity when it cannot."""
    settings = state.settings
    moments = [
        moment_s
        for round in state.rounds
        if round.phase is Phase.OPEN
        and len(round.staged) >= (1 if round.is_last else settings.run.quorum)
        for island in round.missing(state.members, now_s)
        for moment_s in (
            round.late_at_s(island, state.members, settings),
            state.members.known[island].lease_until_s,
        )
    ]
    moments += [
        min(member.lease_until_s, member.unheard_until_s)
        for member in state.members.known.values()
        if not member.is_heard
    ]
    if state.founding:
        moments.append(state.founding.until_s)
    if state.ledger is not None:
        moments += rows.wakes_at(state, now_s)
    return min((moment_s for moment_s in moments if moment_s > now_s), default=_NEVER)


_NEVER = float("inf")


def _settle(state: CoordinatorState, now_s: float) -> events.Result:
    """Open the first rounds if enough islands joined, and close every due round."""
    state = _start(state, now_s)
    if state.is_observed:
        return observer.settle(state, now_s), []
    members, settings = state.members, state.settings
    if state.move is not None:
        due = unmovable(state)
    elif state.is_paused:
        due = []
    else:
        due = [
            round for round in state.rounds if round.can_close(members, settings, now_s)
        ]
    if not due or not all_heard(members, now_s):
        return state, []
    actions: list[events.Action] = []
    for round in due:
        if lost_state(round, members, now_s):
            continue
        roster = roster_of(state, round, now_s)
        state = state.with_round(round.close(roster))
        actions.append(
            events.CloseRound(
                fragment=round.fragment,
                round=round.number,
                roster=roster,
                staged=tuple(round.staged.values()),
                outer=round.outer,
                epoch=state.epoch,
                buffer=buffer_of(state, round, now_s),
            )
        )
    return state, actions


def buffer_of(state: CoordinatorState, round: Round, now_s: float) -> int:
    """Return how many updates make one outer step; 0 in a synchronous run."""
    if not round.is_async:
        return 0
    buffer = state.settings.asynchronous.buffer
    return len(state.members.live(now_s)) or 1 if buffer is None else buffer


def unmovable(state: CoordinatorState) -> list[Round]:
    """Return the open rounds that close before the run moves.

    They have updates that no island will send to the run's new address. Their number
    never grows while the run moves, because nothing is published then.
    """
    return [
        round
        for round in state.rounds
        if round.phase is Phase.OPEN and round.is_abandoned(state.members)
    ]


def _start(state: CoordinatorState, now_s: float) -> CoordinatorState:
    """Open the first rounds once `start_islands` joined, or left their work.

    Also if the run moves and one of them has updates that no island sends again.
    """
    # Fragments of an observed run may start one by one, as their rosters are seen.
    if not state.rounds or (state.has_started and not state.is_observed):
        return state
    live = state.members.live(now_s)
    taking_part = live.union(*(round.staged for round in state.rounds))
    is_enough = len(taking_part) >= state.settings.run.start_islands
    has_to_close = state.move is not None and any(
        round.is_abandoned(state.members) for round in state.rounds
    )
    if not (state.has_started or is_enough or has_to_close):
        return state
    rounds = tuple(
        round.opening(state.members, now_s) if round.phase is Phase.WAITING else round
        for round in state.rounds
    )
    return changed(state, rounds=rounds)


def roster_of(state: CoordinatorState, round: Round, now_s: float) -> Roster:
    """Return what a round comes to if it closes now."""
    judged = judge_updates(
        round.staged.values(),
        round=round.number,
        base=round.base,
        known_bases=round.bases,
        norms=round.norms,
        counted=partial(state.counted.last, fragment=round.fragment),
        window_of=state.window_of,
        settings=state.settings,
        ledger=state.ledger,
    )
    missing = () if round.is_async else round.missing(state.members, now_s)
    late = [
        RosterEntry(
            island=island,
            incarnation=state.members.known[island].incarnation,
            digest=b"",
            weight=0,
            verdict=Verdict.LATE,
        )
        for island in missing
    ]
    entries = sorted([*judged.entries, *late], key=lambda e: e.island)
    return _with_windows(state, round, Roster(tuple(entries)), now_s)


def _with_windows(
    state: CoordinatorState, round: Round, roster: Roster, now_s: float
) -> Roster:
    """Return the roster with the window of each island that stays."""
    if not state.settings.sync.dynamic_local_updates:
        return roster
    departing = {
        island
        for island, header in round.staged.items()
        if header.kind is FrameKind.DEPARTING
    }
    fastest_s = min(state.members.paces_s(now_s), default=None)
    sync_every = state.settings.sync.sync_every
    entries = []
    for entry in roster.entries:
        window = local_steps(
            state.window_of(entry.island),
            step_s=state.members.known[entry.island].step_s,
            fastest_s=fastest_s,
            sync_every=sync_every,
        )
        is_short = window < sync_every and entry.island not in departing
        entries.append(replace(entry, window=window) if is_short else entry)
    return Roster(tuple(entries))


def _offer(
    state: CoordinatorState, event: events.UpdateOffered, now_s: float
) -> events.Result:
    """Judge a header; a round that is due to close does so before it can be wanted."""
    header = event.header
    member = state.members.require(header.island, header.incarnation)
    state, closings = _settle(state, now_s)
    return state, [*closings, events.Respond(_receive(state, member, header))]


def _store(
    state: CoordinatorState, event: events.UpdateStored, now_s: float
) -> events.Result:
    """Stage an update; one whose round has closed meanwhile changes nothing."""
    # Judged again after `UpdateOffered`: the host reads the body between the two
    # events, outside of its lock, and the round may have closed since.
    header = event.header
    member = state.members.require(header.island, header.incarnation)
    reception = _receive(state, member, header)
    if reception is Reception.WANTED:
        state, reception = state.with_update(header, now_s), Reception.STAGED
    return state, [events.Respond(reception)]


def _gather(
    state: CoordinatorState, event: events.UpdatesGathered, now_s: float
) -> events.Result:
    """Stage updates together; if one is not wanted, none is."""
    gathered, response = state, events.Respond(Reception.STAGED)
    for header in event.headers:
        member = state.members.require(header.island, header.incarnation)
        reception = _receive(gathered, member, header)
        if reception is not Reception.WANTED:
            return state, [events.Respond(reception)]
        gathered, _ = _store(gathered, events.UpdateStored(header), now_s)
    return gathered, [response]


def _receive(state: CoordinatorState, member: Member, header: Header) -> Reception:
    """Judge a header; only a run that has lost rounds may find it early."""
    round = state.round_of(header)
    listed = state.counted.listed.get((header.fragment, header.island))
    held_round = member.holds[header.fragment].round if member.holds else 0
    if not member.is_heard:
        return round.receive(header, its_island="not heard yet", listed=listed)
    is_ahead = held_round >= round.number
    return round.receive(
        header,
        its_island="ahead of the run" if is_ahead else "in step",
        listed=listed,
    )


def _tick(state: CoordinatorState, event: events.Tick, now_s: float) -> events.Result:
    if state.founding and now_s > state.founding.until_s:
        state = changed(state, founding=None)
    return state, []


def _commit(
    state: CoordinatorState, event: events.Committed, now_s: float
) -> events.Result:
    closing, window_of = state.rounds[event.fragment], state.window_of
    state = state.with_counted(
        event.roster, fragment=event.fragment, round=closing.number
    )
    opened = closing.commit(
        base=event.digest,
        roster=event.roster,
        outer=event.outer,
        candidates=join_leave.candidates(state, now_s),
        now_s=now_s,
        last_round=state.last_of(event.fragment),
        window_of=window_of,
    )
    state = operators.bounded(state.with_round(opened), now_s)
    return operators.decide_end(state, now_s)


def _recover(
    state: CoordinatorState, event: events.Recovered, now_s: float
) -> events.Result:
    """Go on after a state that an island has brought."""
    before = state.rounds[event.fragment]
    for number, roster in event.rosters:
        state = state.with_counted(roster, fragment=event.fragment, round=number)
    round = _with_lost(state, before, event)
    opened = round.recover(
        event.state,
        outer=event.outer,
        candidates=join_leave.candidates(state, now_s),
        now_s=now_s,
        last_round=state.last_of(event.fragment),
    )
    state = operators.bounded(state.with_round(opened), now_s)
    return state, [events.Respond(state.position(now_s))]


def _with_lost(state: CoordinatorState, round: Round, event: events.Recovered) -> Round:
    """Return the round with the updates that no lost roster can have listed.

    Islands publish the others again, which is answered with `committed`.
    """
    if not round.is_async:
        return round
    listed_rounds = {number for number, _ in event.rosters}
    recovered = range(event.state.round, round.number - 1, -1)
    lost = (number for number in recovered if number not in listed_rounds)
    round = changed(round, lost_through=next(lost, round.lost_through))
    return changed(
        round,
        staged=_standing(state, round, round.staged),
        ahead=_standing(state, round, round.ahead),
    )


def _standing(
    state: CoordinatorState, round: Round, updates: Mapping[str, Header]
) -> dict[str, Header]:
    listed = state.counted.listed
    return {
        island: header
        for island, header in updates.items()
        if round.stands(header, listed.get((round.fragment, island)))
    }


HANDLERS: Mapping[type, Callable[[CoordinatorState, Any, float], events.Result]] = {
    events.JoinRequested: join_leave.join,
    events.Founded: join_leave.found,
    events.HeartbeatReceived: join_leave.beat,
    events.UpdateOffered: _offer,
    events.UpdateStored: _store,
    events.UpdatesGathered: _gather,
    events.Leave: join_leave.leave,
    events.ConnectionLost: join_leave.close,
    events.DataOpened: rows.open_data,
    events.RowsClaimed: rows.claim,
    events.Tick: _tick,
    events.Committed: _commit,
    events.Recovered: _recover,
    events.SettingsChanged: operators.set_values,
    events.StopRequested: operators.stop,
    events.PauseRequested: operators.pause,
    events.SaveRequested: operators.save,
    events.MoveRequested: operators.move,
    events.MoveCompleted: operators.moved,
    events.MoveCancelled: operators.stay,
    events.FoundingSeen: observer.found,
    events.StateSeen: observer.skip,
    events.BaseSeen: observer.take_base,
    events.MemberSeen: observer.admit,
    events.UpdateSeen: observer.stage,
    events.UpdateRevoked: observer.unstage,
    events.RosterSeen: observer.close,
    events.SettingsSeen: observer.set_values,
    events.StopSeen: observer.stop,
    events.EndPassed: observer.pass_end,
    events.RowsSeen: observer.take_rows,
    events.MoveSeen: observer.move,
}
