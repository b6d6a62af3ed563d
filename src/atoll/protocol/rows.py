"""Handlers of the events of a run's rows: the dataset, claims, releases and the end.

Rule 1: rows belong to a name. The next incarnation of an island has what it held.
Rule 2: the rows of an island that has left return once no update of it stands in an
        open round, because such an update may still count.
Rule 3: those of a silent island return after `limits.deadline_max_s` of silence, when
        another island asks and no row is free. The judge refuses them to it then.
Rule 4: a claim, a release and the dataset are durable before they are answered.
Rule 5: a run without `end_rounds` and `end_tokens` ends, as by an operator's stop, when
        no row is free and none can return or is still to be published.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from atoll.data import Ask, Claim, RowLedger, Spans
from atoll.data.spans import EMPTY, union
from atoll.errors import CorruptError, Refused, UsageError
from atoll.protocol import events, operators
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.membership import LEASE_S
from atoll.protocol.rounds import Phase
from atoll.protocol.tables import changed

WAKE_S = 1.0
"""Delay until rows that can return, and the end of the data, are looked at again."""


def open_data(
    state: CoordinatorState, event: events.DataOpened, now_s: float
) -> events.Result:
    """Take the description of an island's dataset, or compare it."""
    state.members.require(event.island, event.incarnation)
    before = require_ledger(state)
    ledger = before.opened(event.data)
    actions: list[events.Action] = [events.Respond(ledger.data)]
    if ledger == before:
        return state, actions
    return changed(state, ledger=ledger), [events.Persist(event.data), *actions]


def claim(
    state: CoordinatorState, event: events.RowsClaimed, now_s: float
) -> events.Result:
    """Deal units to an island; a number that is known gets the same turns again."""
    ask = event.ask
    answer = answer_to(state, ask)
    if answer is not None:
        return state, [events.Respond(answer)]
    state, actions = _released(state, departed(state))
    if not require_ledger(state).has_free:
        state, others = _released(state, _silent(state, now_s))
        actions += others
    answer = chosen(state, ask, now_s)
    if not answer.spans:
        return state, [*actions, events.Respond(answer)]
    dealt = events.RowsDealt(ask.island, ask.number, answer.spans)
    ledger = require_ledger(state).claimed(ask.island, ask.number, answer.spans)
    return changed(state, ledger=ledger), [
        *actions,
        events.Persist(dealt),
        events.Respond(answer),
    ]


def answer_to(state: CoordinatorState, ask: Ask) -> Claim | None:
    """Return the answer that a claim has got before; None: it is a new one.

    Raises:
        LeaseLost: another incarnation holds the island's name.
        UsageError: no island has opened the data, or the run deals out none.
        Refused: its answer is not kept.
    """
    state.members.require(ask.island, ask.incarnation)
    if not require_ledger(state).is_open:
        raise UsageError(
            "No island has opened the data of this run. Open it before the first claim."
        )
    spans = require_ledger(state).answered(ask.island, ask.number)
    return None if spans is None else Claim(spans=spans)


def chosen(
    state: CoordinatorState, ask: Ask, now_s: float, *, departed: Iterable[str] = ()
) -> Claim:
    """Return the answer to a new claim, once the rows of these islands are free."""
    state, _ = _released(state, departed)
    spans = EMPTY
    if not _has_ended(state):
        num_live = max(1, len(state.members.live(now_s)))
        spans = require_ledger(state).chosen(
            ask.want, start=ask.start, num_live=num_live
        )
    is_over = not spans and is_over_for(state, ask.island, now_s)
    return Claim(spans=spans, is_over=is_over)


def settle(state: CoordinatorState, now_s: float) -> events.Result:
    """Return the rows of islands that have left, and end the run with its data."""
    if state.ledger is None or state.is_observed or state.move is not None:
        return state, []
    state, actions = _released(state, departed(state))
    if not is_over(state, now_s):
        return state, actions
    if state.last_round is None:
        state, ending = operators.stop(state, events.StopRequested(), now_s)
    else:
        state, ending = operators.end_each(state, now_s)
    is_change = (action for action in ending if not isinstance(action, events.Respond))
    return state, [*actions, *is_change]


def wakes_at(state: CoordinatorState, now_s: float) -> Iterator[float]:
    """Yield the moments at which time alone can change something about rows."""
    if state.ledger is None or state.is_observed or state.ledger.has_free:
        return
    if any(departed(state)) or is_over(state, now_s):
        yield now_s + WAKE_S
    for island in state.ledger.holdings:
        if island in state.members.known:
            yield _released_at_s(state, island)


def is_over_for(state: CoordinatorState, island: str, now_s: float) -> bool:
    """Return whether an island that has used its rows will never get another.

    Live islands keep their rows. Rows of an island that has left or is silent may
    return; in a run without an owner those of a silent one do not.
    """
    ledger = require_ledger(state)
    if _has_ended(state):
        return True
    return not ledger.has_free and not any(
        ledger.to_train(name, standing(state, name))
        for name in ledger.holdings
        if name != island and _may_return(state, name, now_s)
    )


def is_over(state: CoordinatorState, now_s: float) -> bool:
    """Return whether the run ends now, because its data has.

    If no island is live after that, none publishes for a last round that is still
    open: it ends without an outcome.
    """
    ledger, run = state.ledger, state.settings.run
    if ledger is None or not ledger.is_open or ledger.has_free:
        return False
    if state.last_rounds is not None or _has_ended(state):
        return False
    if state.last_round is None:
        has_other_end = run.end_rounds is not None or run.end_tokens is not None
        return not has_other_end and not _has_unsettled(state, ledger, now_s)
    is_last_open = operators.is_end_near(state) and not state.members.live(now_s)
    return is_last_open and _is_idle(state) and not _has_unsettled(state, ledger, now_s)


def _is_idle(state: CoordinatorState) -> bool:
    """Return whether no round has an update, or is being committed."""
    return not any(
        round.staged or round.ahead or round.phase is Phase.CLOSING
        for round in state.rounds
    )


def _has_unsettled(state: CoordinatorState, ledger: RowLedger, now_s: float) -> bool:
    """Return whether a row can return, or is still to be published."""
    for name in ledger.holdings:
        turns = standing(state, name)
        if name in state.members.live(now_s):
            if ledger.unsettled(name, turns):
                return True
        elif _may_return(state, name, now_s) and ledger.to_train(name, turns):
            return True
    return False


def standing(state: CoordinatorState, island: str) -> tuple[Spans, ...]:
    """Return by fragment the turns in the updates of an island in open rounds."""
    return tuple(
        union(
            _unpacked(updates[island].progress.cursor)
            for updates in (round.staged, round.ahead)
            if island in updates
        )
        for round in state.rounds
    )


@lru_cache(maxsize=4096)
def _unpacked(cursor: bytes) -> Spans:
    """Return the turns in an update; none if it is no set, and will be refused."""
    try:
        return Spans.unpack(cursor)
    except CorruptError:
        return EMPTY


def require_ledger(state: CoordinatorState) -> RowLedger:
    """Return the ledger of a run that deals out rows.

    Raises:
        UsageError: it deals out none.
        Refused: it has no weights yet.
    """
    if not state.settings.data.is_dealt:
        raise UsageError(
            "This run does not deal out rows: data.order='islands'. Shard the data by "
            "the island's slot, or begin a run with data.order='run'."
        )
    if state.ledger is None:
        raise Refused("The run has no weights yet, and deals out no rows. Found it.")
    return state.ledger


def _has_ended(state: CoordinatorState) -> bool:
    return all(round.phase is Phase.ENDED for round in state.rounds)


def _may_return(state: CoordinatorState, island: str, now_s: float) -> bool:
    """Return whether the rows of an island can become free without its own doing."""
    member = state.members.known.get(island)
    if member is None or member.has_left:
        return True
    if member.is_live(now_s) or state.is_observed:
        return False
    return now_s <= _released_at_s(state, island) or _stands(state, island)


def _released_at_s(state: CoordinatorState, island: str) -> float:
    """Return when a silent island has been silent for the longest deadline."""
    heard_s = state.members.known[island].lease_until_s - LEASE_S
    return heard_s + max(LEASE_S, state.settings.limits.deadline_max_s)


def departed(state: CoordinatorState) -> Iterator[str]:
    """Yield the islands that have left with rows, and of which no update stands."""
    assert state.ledger is not None
    for island, spans in state.ledger.holdings.items():
        member = state.members.known.get(island)
        has_gone = member is None or member.has_left
        if spans and has_gone and not _stands(state, island):
            yield island


def _silent(state: CoordinatorState, now_s: float) -> Iterator[str]:
    """Yield the islands that have been silent for too long, and whose updates are over.

    An update that is staged counts, and must not meet its rows in another one.
    """
    assert state.ledger is not None
    for island, spans in state.ledger.holdings.items():
        if island not in state.members.known or island in state.members.live(now_s):
            continue
        is_over = now_s > _released_at_s(state, island)
        if spans and is_over and not _stands(state, island):
            yield island


def _stands(state: CoordinatorState, island: str) -> bool:
    return any(
        island in round.staged or island in round.ahead for round in state.rounds
    )


def _released(state: CoordinatorState, islands: Iterable[str]) -> events.Result:
    """Make the rows of islands free; one at a time, so that each is durable."""
    actions: list[events.Action] = []
    for island in list(islands):
        assert state.ledger is not None
        state = changed(state, ledger=state.ledger.released(island))
        actions.append(events.Persist(events.RowsReleased(island)))
    return state, actions
