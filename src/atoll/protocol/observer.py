"""Handlers of the events of an observer: of a run in a bucket, which has no owner.

Every observer keeps a `CoordinatorState` by the objects that it reads, and two of them
may read in another order. The rules are those of a coordinator, except:

Rule 1: no round closes before its roster is seen, because any observer may write one.
Rule 2: a member is seen when its document is read, which may be long after it joined;
        the document tells from which rounds on it is waited for.
Rule 3: an operator's command is in force when it is seen. Whether it may be given is
        decided before.
Rule 4: a roster that was in flight when the run was stopped stays valid, and the run
        ends with its round, so that every fragment ends with the same one. In an
        asynchronous run each fragment ends with the first round, from the one that the
        stop names on, whose closer knew of the stop: it waits for every live island.
Rule 5: the ledger of rows is folded by the reader, which knows the order of claims and
        rosters: a roster that is seen does not settle its rows.
"""

from __future__ import annotations

from atoll.protocol import events
from atoll.protocol.coordinator_state import CoordinatorState, CountedUpdates
from atoll.protocol.membership import Member
from atoll.protocol.operators import END_ROUNDS, bounded
from atoll.protocol.rounds import KNOWN_BASES, Phase, Round
from atoll.protocol.tables import changed
from atoll.wire.header import BASE_BYTES

UNKNOWN_BASE = bytes(BASE_BYTES)
"""The base of a round whose observer does not know the state before it."""


def settle(state: CoordinatorState, now_s: float) -> CoordinatorState:
    """Return the state with its last round moved by rule 4, and no round beyond it."""
    last = state.last_round
    closed = max((round.number - 1 for round in state.rounds), default=0)
    is_async = state.settings.sync.mode == "async"
    if last is not None and last < closed and not is_async:
        state = changed(state, last_round=closed)
    return bounded(state, now_s)


def found(
    state: CoordinatorState, event: events.FoundingSeen, now_s: float
) -> events.Result:
    """Begin with the first round of each fragment."""
    rounds = tuple(
        Round(
            fragment=index,
            number=1,
            phase=Phase.WAITING,
            base=UNKNOWN_BASE,
            bases=(),
            outer=outer,
            opened_s=now_s,
            is_async=state.settings.sync.is_async,
        )
        for index, outer in enumerate(event.outers)
    )
    state = changed(state, model=event.model, rounds=rounds)
    return state.with_ledger(), []


def skip(
    state: CoordinatorState, event: events.StateSeen, now_s: float
) -> events.Result:
    """Begin with the round after a state."""
    before, number = state.round(event.fragment), event.round + 1
    if before.number != number:
        before = changed(before, base=UNKNOWN_BASE, staged={})
    opened = changed(
        before,
        number=number,
        phase=Phase.OPEN,
        bases=event.bases,
        opened_s=now_s,
        candidates=state.members.joined_before(number, event.fragment, now_s),
    )
    by_island = dict(state.counted.by_island)
    for island, work in event.counted.items():
        fragments = list(by_island.get(island, (None,) * len(state.rounds)))
        fragments[event.fragment] = work
        by_island[island] = tuple(fragments)
    listed = {(event.fragment, island): last for island, last in event.listed.items()}
    counted = CountedUpdates(by_island, {**state.counted.listed, **listed})
    state = changed(state, counted=counted)
    state = state.with_windows(
        event.windows, fragment=event.fragment, round=event.round
    )
    return state.with_round(opened), []


def take_base(
    state: CoordinatorState, event: events.BaseSeen, now_s: float
) -> events.Result:
    """Start the open round of a fragment from a state, if it is the one before it."""
    round = state.round(event.fragment)
    if event.state.round + 1 != round.number:
        return state, []
    return state.with_round(changed(round, base=event.state.digest)), []


def admit(
    state: CoordinatorState, event: events.MemberSeen, now_s: float
) -> events.Result:
    """Replace a member; its learned arrivals stay."""
    before = state.members.known.get(event.member.island)
    arrivals = before.arrivals if before else {}
    return _with_member(state, changed(event.member, arrivals=arrivals), now_s), []


def stage(
    state: CoordinatorState, event: events.UpdateSeen, now_s: float
) -> events.Result:
    """Stage an update of the open round: its island is live."""
    header = event.header
    state = state.with_update(header, now_s)
    member = state.members.known[header.island]
    until_s = max(member.lease_until_s, event.lease_until_s)
    return _with_member(state, changed(member, lease_until_s=until_s), now_s), []


def unstage(
    state: CoordinatorState, event: events.UpdateRevoked, now_s: float
) -> events.Result:
    """Drop a staged update: a later incarnation of its island does not name it."""
    round = state.round(event.fragment)
    staged = {
        name: header for name, header in round.staged.items() if name != event.island
    }
    return state.with_round(changed(round, staged=staged)), []


def close(
    state: CoordinatorState, event: events.RosterSeen, now_s: float
) -> events.Result:
    """Close the open round of a fragment by its roster, and open the next."""
    round, window_of = state.round(event.fragment), state.window_of
    state = state.with_counted(
        event.roster, fragment=event.fragment, round=round.number
    )
    closing = changed(round, phase=Phase.CLOSING, roster=event.roster)
    opened = closing.commit(
        base=UNKNOWN_BASE,
        roster=event.roster,
        outer=event.outer,
        candidates=state.members.joined_before(round.number + 1, event.fragment, now_s),
        now_s=now_s,
        last_round=state.last_of(event.fragment),
        window_of=window_of,
    )
    bases = (*round.bases, event.base)[-KNOWN_BASES:]
    return state.with_round(changed(opened, bases=bases)), []


def set_values(
    state: CoordinatorState, event: events.SettingsSeen, now_s: float
) -> events.Result:
    """Put an operator's values in force; a round keeps its own once it has updates."""
    settings = state.settings.with_values(event.values)
    is_end = END_ROUNDS in event.values
    rounds = tuple(
        round if round.staged else changed(round, outer=outer)
        for round, outer in zip(state.rounds, event.outers, strict=True)
    )
    state = changed(
        state,
        settings=settings,
        epoch=state.epoch + 1,
        last_round=settings.run.end_rounds if is_end else state.last_round,
        last_rounds=None if is_end else state.last_rounds,
        rounds=rounds,
    )
    return state, []


def stop(
    state: CoordinatorState, event: events.StopSeen, now_s: float
) -> events.Result:
    """End with the round that an operator or the counted tokens have made the last.

    Of several such ends of an asynchronous run the first one stands. A round that was
    closed before this was seen was closed by an island that had not seen it either.
    """
    if event.last_rounds is None:
        return changed(state, last_round=event.last_round), []
    is_right = len(event.last_rounds) == len(state.rounds)
    if (
        not is_right
        or state.last_rounds is not None
        or not state.settings.sync.is_async
    ):
        return state, []
    last_rounds = [
        max(last, round.number)
        for last, round in zip(event.last_rounds, state.rounds, strict=True)
    ]
    return changed(state, last_rounds=tuple(last_rounds)), []


def pass_end(
    state: CoordinatorState, event: events.EndPassed, now_s: float
) -> events.Result:
    """Make the next round of a fragment the last, if this one was to be."""
    if state.last_rounds is None or state.last_rounds[event.fragment] != event.round:
        return state, []
    last_rounds = list(state.last_rounds)
    last_rounds[event.fragment] += 1
    return changed(state, last_rounds=tuple(last_rounds)), []


def take_rows(
    state: CoordinatorState, event: events.RowsSeen, now_s: float
) -> events.Result:
    """Replace the ledger of rows."""
    return changed(state, ledger=event.ledger), []


def move(
    state: CoordinatorState, event: events.MoveSeen, now_s: float
) -> events.Result:
    """Hold every round while the run moves, and after it has moved."""
    return changed(state, move=event.move), []


def _with_member(
    state: CoordinatorState, member: Member, now_s: float
) -> CoordinatorState:
    """Return the state with a member, which open rounds wait for if they should."""
    state = changed(state, members=state.members.with_member(member))
    rounds = []
    for round in state.rounds:
        others = round.candidates - {member.island}
        is_awaited = member.is_live(now_s) and member.joined_before(
            round.number, round.fragment
        )
        candidates = others | {member.island} if is_awaited else others
        rounds.append(changed(round, candidates=candidates))
    return changed(state, rounds=tuple(rounds))
