"""Handlers of the coordinator's machine for join, founding, heartbeat and leave.

Join, founding and leave change the members and the founder. A
heartbeat renews a lease and reports an island's step and holdings. The effect on rounds
is in `coordinator`.
"""

from __future__ import annotations

from collections.abc import Iterable

from atoll.errors import Refused, Unreachable, UsageError
from atoll.protocol import events, rows
from atoll.protocol.coordinator_state import CoordinatorState, Founding
from atoll.protocol.membership import LEASE_S, Member, Members, max_schedule_step
from atoll.protocol.messages import Heartbeat, HeldRound, JoinReply
from atoll.protocol.operators import bounded
from atoll.protocol.rounds import Phase, Round
from atoll.protocol.tables import changed

MAX_NAMES = 65_536
"""Names that a run knows at most: every message copies their table."""

MAX_IDLE_NAMES = 256
"""How many of them may be gone without ever having counted."""

TRUSTED_IDLE_NAMES = 16
IDLE_MEMORY_S = 600.0
"""After this many idle names within this time, rounds wait for no newcomer's first
update."""


def join(
    state: CoordinatorState, event: events.JoinRequested, now_s: float
) -> events.Result:
    """Admit an island, as a new incarnation or the same; the first founds the run."""
    request = event.request
    request.require_bundle(state.settings)
    _require_fitting(state, request.island or "", request.holds)
    if state.model is not None:
        request.model.require_same(state.model)
    position = state.position(now_s)
    members, member = state.members.join(
        request,
        event.key,
        event.nonce,
        now_s=now_s,
        max_islands=state.settings.run.max_islands,
        default_islands=_default_islands(state),
        step=position.step,
    )
    is_founder = state.model is None
    if is_founder and _founded_by_another(state, member, now_s):
        raise Unreachable("Another island is founding the run. Ask again.")
    before = state.members.known.get(member.island)
    if before is None or before.incarnation != member.incarnation:
        _require_no_second(state, member.island)
        state = _spend_joining(state, now_s)
    if before is None:
        members, member = _with_name(state, members, member, now_s)
        state = _without_forgotten(state, members)
    if before is not None and _is_waited_for_anew(before, member):
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
    welcome = events.Welcome(member, position, is_founder, spoken_for)
    return state, [events.Persist(member), welcome]


def _require_no_second(state: CoordinatorState, island: str) -> None:
    """Return unless two rounds of an asynchronous run have updates of an island.

    Its next incarnation takes the outcome of one round only before it publishes.

    Raises:
        Unreachable: it has: ask again when the first of them is committed.
    """
    for round in state.rounds:
        if round.is_async and island in round.ahead:
            raise Unreachable(
                f"An earlier incarnation of island {island!r} has two updates in "
                f"fragment {round.fragment}, and round {round.number} takes the first "
                "of them. Ask again when it is over."
            )


def _default_islands(state: CoordinatorState) -> int:
    """Return the limit of live islands for a run without a setting.

    A run that more islands have counted in keeps room for all of them.
    """
    return max(state.settings.run.most_islands, len(state.counted.by_island))


def _spend_joining(state: CoordinatorState, now_s: float) -> CoordinatorState:
    """Return the state with one more new incarnation.

    Raises:
        Unreachable: the burst limit is used up.
    """
    joins = state.joins.spent(now_s)
    if joins is None:
        raise Unreachable(
            f"The burst limit of {state.joins.burst:g} joins is used up, and the run "
            f"takes {state.joins.per_s:g} more per second. Ask again in a moment."
        )
    return changed(state, joins=joins)


def _with_name(
    state: CoordinatorState, members: Members, member: Member, now_s: float
) -> tuple[Members, Member]:
    """Return the members with a new name, in the place of another if there are many.

    A name whose island has gone, and of which nothing ever counted, is forgotten for
    it: the longest gone first. Its slot goes to the new name, which is how a journal
    learns that it was forgotten.

    Raises:
        UsageError: the run knows as many names as it can, and all of them are needed.
    """
    idle = _idle_names(state, now_s)
    if len(idle) < MAX_IDLE_NAMES and len(members.known) <= MAX_NAMES:
        return members, member
    if not idle:
        raise UsageError(
            f"The run knows {len(state.members.known)} islands by name, and takes no "
            "further names. Start islands under names that they had before, or begin "
            "a new run with the weights of this one."
        )
    oldest = min(
        idle, key=lambda idle_member: (idle_member.lease_until_s, idle_member.island)
    )
    members = members.in_place_of(oldest, member)
    return members, members.known[member.island]


def _without_forgotten(state: CoordinatorState, members: Members) -> CoordinatorState:
    """Return the state without windows of a name that a new one has replaced."""
    windows = state.windows
    if windows.last:
        for island in state.members.known.keys() - members.known.keys():
            windows = windows.without(island)
    return changed(state, windows=windows)


def candidates(state: CoordinatorState, now_s: float) -> frozenset[str]:
    """Return the islands that a round which opens now waits for: the live ones.

    A holder of the token can join under one new name after another and publish under
    none, and each name would hold a round for a lease. After some such names, rounds
    wait only for islands whose updates have counted. A newcomer that publishes in time
    still counts, and rounds wait for it from then on. Islands of one process need no
    such limit, and their clock stands, so that it would never end.
    """
    live = state.members.live(now_s)
    newcomers = live - state.counted.by_island.keys()
    if state.trusts_names or not newcomers:
        return live
    since_s = now_s - IDLE_MEMORY_S
    recent = [
        idle_member
        for idle_member in _idle_names(state, now_s)
        if idle_member.lease_until_s > since_s
    ]
    return live if len(recent) < TRUSTED_IDLE_NAMES else live - newcomers


def _idle_names(state: CoordinatorState, now_s: float) -> list[Member]:
    """Return the members that have gone, and that nothing refers to."""
    needed = set(state.counted.by_island)
    for round in state.rounds:
        needed.update(round.candidates, round.staged, round.ahead, round.awaited)
    return [
        member
        for name, member in state.members.known.items()
        if name not in needed and not member.is_live(now_s)
    ]


def reply_to(state: CoordinatorState, welcome: events.Welcome) -> JoinReply:
    """Return the reply to an island that was admitted."""
    island, ledger = welcome.member.island, state.ledger
    counted = state.counted.of(island)
    held_rows = b""
    if ledger is not None:
        held_rows = ledger.to_train(island, rows.standing(state, island)).pack()
    return JoinReply(
        run=state.run,
        island=welcome.member.island,
        incarnation=welcome.member.incarnation,
        slot=welcome.member.slot,
        settings=state.settings,
        epoch=state.epoch,
        position=welcome.position,
        is_founder=welcome.is_founder,
        inner_steps=max((work.inner_steps for work in counted), default=0),
        tokens=max((work.tokens for work in counted), default=0),
        spoken_for=welcome.spoken_for,
        counted=state.counted.by_fragment(welcome.member.island, len(state.rounds)),
        window=state.windows.of(welcome.member.island),
        held_rows=held_rows,
        last_claim=ledger.last_claim(island) if ledger else 0,
    )


def _is_waited_for_anew(before: Member, member: Member) -> bool:
    """Return whether an island starts over: rounds wait for it from the next on.

    An open round has waited for an island that resumes from a checkpoint.
    """
    return before.incarnation != member.incarnation and not member.returns


def _founded_by_another(state: CoordinatorState, member: Member, now_s: float) -> bool:
    founding = state.founding
    if founding is None or now_s > founding.until_s:
        return False
    founder = (founding.island, founding.incarnation)
    return founder != (member.island, member.incarnation)


def found(
    state: CoordinatorState, event: events.Founded, now_s: float
) -> events.Result:
    """Begin with the weights that the founder has brought."""
    founding = state.founding_of(event.island, event.incarnation)
    rounds = tuple(
        Round(
            fragment=index,
            number=1,
            phase=Phase.WAITING,
            base=digest,
            bases=(digest,),
            outer=outer,
            is_async=state.settings.sync.is_async,
        )
        for index, (digest, outer) in enumerate(
            zip(event.digests, event.outers, strict=True)
        )
    )
    state = changed(state, model=founding.model, founding=None, rounds=rounds)
    state = state.with_ledger()
    state = bounded(state, now_s)  # it may have been stopped before this
    return state, [events.Respond(state.position(now_s))]


def beat(
    state: CoordinatorState, event: events.HeartbeatReceived, now_s: float
) -> events.Result:
    """Renew a lease, and that of the founding with it."""
    beat = event.beat
    member = state.members.require(beat.island, beat.incarnation)
    require_plausible(state, beat)
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
    return state, [events.Respond(state.position(now_s, island=beat.island))]


def require_plausible(state: CoordinatorState, beat: Heartbeat) -> None:
    """Return if a heartbeat can be true: other islands follow the reported step.

    Raises:
        Refused: its step or its holdings are impossible.
    """
    _require_fitting(state, beat.island, beat.holds)
    if beat.step <= _last_step(state, ()):
        return
    member_holds = [member.holds for member in state.members.known.values()]
    rounds = [
        held_round.round + 1
        for holds in (beat.holds, *member_holds)
        for held_round in holds
    ]
    if beat.step > (last := _last_step(state, rounds)):
        furthest = max([1, *rounds, *(round.number for round in state.rounds)])
        raise Refused(
            f"Island {beat.island!r} reports step {beat.step}, and with "
            f"round {furthest} open no island gets beyond {last}. Join again."
        )


def _require_fitting(
    state: CoordinatorState, island: str, holds: tuple[HeldRound, ...]
) -> None:
    """Refuse holdings of another number of fragments, or of a run without weights."""
    if holds and state.rounds and len(holds) != len(state.rounds):
        raise Refused(
            f"Island {island!r} reports holdings of {len(holds)} "
            f"fragments, and the run has {len(state.rounds)}. Join again."
        )
    if not state.rounds and any(held_round.round for held_round in holds):
        raise Refused(
            f"Island {island!r} holds rounds, and the run has no weights yet: its "
            "journal has lost them, or this is another run. Restore the journal."
        )


def _last_step(state: CoordinatorState, rounds: Iterable[int]) -> int:
    """Return the highest possible step, when these rounds may be open too.

    An island that has joined waits for its next send point, and stops a window later.
    """
    opened = [round.number for round in state.rounds]
    return max_schedule_step([*rounds, *opened], state.settings)


def leave(state: CoordinatorState, event: events.Leave, now_s: float) -> events.Result:
    """Wait for an island no longer; if it is the founder, the founding ends."""
    member = state.members.require(event.island, event.incarnation)
    members = state.members.leave(member, because=event.reason)
    state = changed(state, members=members)
    if state.founding and state.founding.island == event.island:
        state = changed(state, founding=None)
    return state, [events.Persist(event)]


def close(
    state: CoordinatorState, event: events.ConnectionLost, now_s: float
) -> events.Result:
    """Shorten the lease of an island whose connection was closed."""
    member = state.members.require(event.island, event.incarnation)
    return changed(state, members=state.members.close(member, now_s=now_s)), []
