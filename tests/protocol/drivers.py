"""Puts a combination of a table's columns to the real machine, and says its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from atoll import RunSettings
from atoll.data import DataSpec
from atoll.errors import (
    LeaseLost,
    ModelError,
    NameKnown,
    Refused,
    Unreachable,
    UsageError,
)
from atoll.protocol import HeldRound, JoinRequest, decide
from atoll.protocol.coordinator import advance
from atoll.protocol.coordinator_state import CoordinatorState, Founding
from atoll.protocol.events import (
    Committed,
    Event,
    JoinRequested,
    Recovered,
    Respond,
    Tick,
    UpdateOffered,
    Welcome,
)
from atoll.protocol.island import CountedSince, FragmentSync, remaining_work
from atoll.protocol.membership import LEASE_S, Member, Members
from atoll.protocol.rounds import Phase, Round
from atoll.settings.sections import AsyncSection, SyncSection
from atoll.testing import vector_model
from atoll.wire import FrameKind, Header, OuterValues, Roster, Verdict

Driver = Callable[..., str]

MODEL = vector_model({"w": (3,)})
OUTER = OuterValues(optimizer="sgd", lr=1.0, momentum=0.0)
NOW_S = 1000.0
OPENED_LONG_AGO_S = 0.0
OPEN_ROUND = 5
PATIENT = RunSettings(
    sync=SyncSection(mode="async"), asynchronous=AsyncSection(grace_s=60.0)
)
"""Of an asynchronous run whose rounds wait for a minute."""


def member(name: str, **fields: object) -> Member:
    """Return a live member."""
    basic = Member(
        island=name,
        incarnation=1,
        slot=0,
        key=b"key of " + name.encode(),
        nonce=b"nonce",
        lease_until_s=NOW_S + 1,
        unheard_until_s=NOW_S + 1,
    )
    return replace(basic, **fields)  # type: ignore[arg-type]


def open_round(**fields: object) -> Round:
    """Return fragment 0's open round."""
    basic = Round(
        fragment=0,
        number=OPEN_ROUND,
        phase=Phase.OPEN,
        base=bytes(16),
        bases=(bytes(16),),
        outer=OUTER,
        opened_s=NOW_S,
    )
    return replace(basic, **fields)  # type: ignore[arg-type]


def state_of(
    *islands: Member, rounds: tuple[Round, ...] = (), **run: object
) -> CoordinatorState:
    """Return a coordinator that knows these islands and rounds."""
    return CoordinatorState(
        run="run",
        settings=RunSettings.from_dict({"run": run}),
        members=Members({each.island: each for each in islands}),
        model=MODEL if rounds else None,
        rounds=rounds,
    )


def dealing(
    state: CoordinatorState,
    *,
    rows: int = 100,
    is_open: bool = True,
    holder: str | None = None,
    **data: object,
) -> CoordinatorState:
    """Return the state of a run that deals out rows in units of ten."""
    tables = {"order": "run", "unit_rows": 10} | data
    settings = state.settings.with_values(
        {f"data.{key}": value for key, value in tables.items()}
    )
    state = replace(state, settings=settings).with_ledger()
    assert state.ledger is not None
    ledger = state.ledger
    if is_open:
        ledger = ledger.opened(DataSpec(rows=rows))
    if holder is not None and is_open:
        ledger = ledger.claimed(holder, 1, ledger.chosen(1))
    return replace(state, ledger=ledger)


def update(name: str, **fields: object) -> Header:
    """Return the header of an update for the open round."""
    basic = Header(
        kind=FrameKind.UPDATE,
        run="run",
        fragment=0,
        round=OPEN_ROUND,
        island=name,
        incarnation=1,
        base=bytes(16),
        refused="for the test",
    )
    return replace(basic, **fields)  # type: ignore[arg-type]


def next_phase(
    phase: str,
    event: str,
    started: str,
    paused: str,
    quorum: str,
    missing: str,
    known: str,
    last: str,
) -> str:
    """Drive a round with islands a and b, of whom c may be missing."""
    staged = {"a": update("a")} | ({"b": update("b")} if quorum == "yes" else {})
    live = {*staged, *(() if missing == "none" else ("c",))}
    round = open_round(
        phase=Phase(phase),
        opened_s=OPENED_LONG_AGO_S if missing == "late" else NOW_S,
        candidates=frozenset(live),
        staged=staged,
        roster=Roster(()) if phase == "closing" else None,
        last_since_s=OPENED_LONG_AGO_S if last == "yes" else None,
    )
    first = {
        "all": member("a"),
        "some not heard": member("a", is_heard=False),
        "rounds lost": member("a", holds=(HeldRound(OPEN_ROUND, bytes(16)),)),
    }[known]
    state = replace(
        state_of(
            *[first, *map(member, sorted(live - {"a"}))],
            rounds=(round,),
            quorum=2,
            start_islands=1 if started == "yes" else 9,
        ),
        is_paused=paused == "yes",
        last_round=OPEN_ROUND if last == "yes" else None,
    )
    happened: Event = Tick()
    if event == "Committed":
        happened = Committed(0, Roster(()), bytes(16), OUTER)
    if event == "Recovered":
        happened = Recovered(0, HeldRound(OPEN_ROUND, bytes(16)), (), OUTER)
    try:
        after, _ = advance(state, happened, NOW_S)
    except AssertionError:
        return "impossible"
    return after.rounds[0].phase.value


def reception(
    its_round: str, phase: str, kind: str, standing: str, its_island: str
) -> str:
    """Offer an update of island a to a run in which one may stand."""
    distance = {
        "over": -1,
        "not listed yet": -1,
        "the open one": 0,
        "the next": 1,
        "a later one": 2,
    }
    is_async = its_round == "not listed yet"
    number = OPEN_ROUND + distance[its_round]
    offered = update("a", round=number, kind=FrameKind[kind.upper()], incarnation=2)
    stands = {
        "nothing": {},
        "the same": {"a": offered},
        "another": {"a": replace(offered, weight=7)},
        "an earlier incarnation's": {"a": replace(offered, weight=7, incarnation=1)},
    }[standing]
    is_second = kind == "departing" and standing not in ("nothing", "the same")
    is_ahead = is_async and (phase == "closing" or is_second)
    where = "ahead" if is_ahead or its_round == "the next" else "staged"
    first = {"staged": {"a": replace(offered, weight=8)}} if is_ahead else {}
    round = open_round(
        phase=Phase(phase),
        candidates=frozenset("ab"),
        roster=Roster(()) if phase == "closing" else None,
        is_async=is_async,
        **{**first, where: stands},
    )
    sender = {
        "in step": member("a", incarnation=2),
        "not heard yet": member("a", incarnation=2, is_heard=False),
        "ahead of the run": member(
            "a", incarnation=2, holds=(HeldRound(OPEN_ROUND, bytes(16)),)
        ),
    }[its_island]
    state = state_of(sender, member("b"), rounds=(round,), start_islands=9)
    if is_async:
        state = replace(state, settings=PATIENT)
    try:
        _, (said,) = advance(state, UpdateOffered(offered), NOW_S)
    except Refused:
        return "refused"
    assert isinstance(said, Respond)
    return str(said.answer)


def whose_name(name: str, key: str, nonce: str, incarnation: str, room: str) -> str:
    """Join as island a, or without a name, in a run that may know it and be full."""
    before = {
        "none": member("island-0", lease_until_s=NOW_S - 1),
        "unknown": member("somebody", lease_until_s=NOW_S - 1),
        "live": member("a"),
        "silent": member("a", lease_until_s=NOW_S - 1),
        "left": member("a", has_left=True),
    }[name]
    before = replace(before, incarnation=2)
    state = state_of(
        before,
        member("other", slot=1),
        rounds=(open_round(),),
        max_islands=1 if room == "no" else None,
    )
    request = JoinRequest(
        model=MODEL,
        island=None if name == "none" else "a",
        incarnation={"later than known": 7, "not later": 2}.get(incarnation),
        after=before.incarnation if incarnation == "new" else 0,
    )
    joining = JoinRequested(
        request,
        before.key if key == "the same" else b"another",
        before.nonce if nonce == "the same" else b"another",
    )
    try:
        _, actions = advance(state, joining, NOW_S)
    except LeaseLost:
        return "LeaseLost"
    except NameKnown as exc:
        is_told = exc.incarnation == before.incarnation
        return "NameKnown" if is_told else "of the wrong life"
    except UsageError as exc:
        return "refused: taken" if "not its key" in str(exc) else "refused: full"
    (welcome,) = (each for each in actions if isinstance(each, Welcome))
    return _which_life(welcome.member, before, request)


def _which_life(now: Member, before: Member, request: JoinRequest) -> str:
    assert now.lease_until_s == NOW_S + LEASE_S
    if (now.island, now.nonce, now.key) == (before.island, before.nonce, before.key):
        assert now.incarnation == before.incarnation
        return "same incarnation"
    if request.incarnation:
        assert now.incarnation == request.incarnation
        return "continues"
    is_first = now.island != before.island
    assert now.incarnation == (1 if is_first else before.incarnation + 1)
    assert is_first or now.slot == before.slot
    return "first incarnation" if is_first else "next incarnation"


def who_founds(model: str, founder: str) -> str:
    """Join as island a, in a run that b may be founding."""
    joining = JoinRequested(JoinRequest(model=MODEL, island="a"), b"key of a", b"nonce")
    state = state_of(
        member("a"), member("b"), rounds=(open_round(),) if model != "none" else ()
    )
    if model == "another":
        state = replace(state, model=vector_model({"w": (4,)}))
    if founder != "no island":
        founding = Founding(
            island="a" if founder == "this island" else "b",
            incarnation=1,
            model=MODEL,
            until_s=NOW_S + (-1 if founder == "a silent island" else 1),
        )
        state = replace(state, founding=founding)
    try:
        _, actions = advance(state, joining, NOW_S)
    except (ModelError, Unreachable) as exc:
        return type(exc).__name__
    (welcome,) = (each for each in actions if isinstance(each, Welcome))
    return "founds" if welcome.is_founder else "joins"


def what_becomes(verdict: str, missed: str, passed: str, updates: str) -> str:
    """Take the outcome of round 5, with so many rounds after it.

    An update that stands was sealed two rounds before.
    """
    stands = updates == "stand"
    taken = OPEN_ROUND - 3 if stands else OPEN_ROUND - 1
    return decide(
        FragmentSync(taken=taken, missed=int(missed)),
        Verdict[verdict.upper()],
        through=OPEN_ROUND + int(passed),
        listed=OPEN_ROUND if stands else None,
    ).value


def what_remains(since: str, update: str, base: str) -> str:
    """Restart an island that has saved work, at a run with this past."""
    return remaining_work(
        CountedSince(since),
        is_refused=update == "refused",
        is_base_known=base == "known",
    ).value
