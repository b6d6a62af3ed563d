"""What a coordinator answers to each call, and what is durable by then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from atoll import RunSettings
from atoll.coordinator import Service
from atoll.data import Ask, DataSpec, RowLedger
from atoll.exchange import Frame, Outcome
from atoll.exchange.calls import (
    AgreedCall,
    Call,
    ClaimCall,
    DataCall,
    FoundCall,
    HeartbeatCall,
    JoinCall,
    KeepCall,
    LeaveCall,
    OfferCall,
    OutcomeCall,
    PublishCall,
    RecoverCall,
    Reply,
    StateCall,
)
from atoll.journal import (
    Journal,
    RecordedRun,
)
from atoll.protocol import (
    Heartbeat,
    HeldRound,
    JoinRequest,
    ModelSpec,
    Reception,
    TensorSpec,
)
from atoll.protocol.tables import DecisionRow, DecisionTable
from atoll.simulate import SimDisk
from atoll.weights import FragmentState
from atoll.wire import FrameKind, Header, OuterValues, blake3_digest, with_body
from atoll.wire.frame import outcome_receipt, voucher
from tests.protocol.drivers import MODEL as TRAINED

SETTINGS = RunSettings.from_dict(
    {
        "run": {"start_islands": 3},
        "wire": {"up": "fp32", "down": "fp32"},
        "outer": {"optimizer": "sgd", "lr": 1.0},
        "data": {"order": "run"},
    }
)
VALUES = bytes(range(16))
CONSTANT = TensorSpec(
    name="mask",
    shape=(2,),
    dtype="int64",
    role="constant",
    digest=blake3_digest(VALUES).hex(),
)
MODEL = ModelSpec((*TRAINED.tensors, CONSTANT))
OUTER = OuterValues(optimizer="sgd", lr=1.0, momentum=0.0)

_ANY_UPDATE = Header(kind=FrameKind.UPDATE, run="run", fragment=0, round=3, island="a")

CALLS = DecisionTable(
    title="Responses to calls",
    columns={
        "call": (
            "JoinCall",
            "JoinCall, again",
            "JoinCall, an earlier incarnation has published",
            "KeepCall, a part",
            "KeepCall, the last part",
            "KeepCall, again",
            "FoundCall",
            "FoundCall, again",
            "RecoverCall",
            "RecoverCall, again",
            "HeartbeatCall",
            "OfferCall",
            "PublishCall, others are missing",
            "PublishCall, departing",
            "PublishCall, no other island is missing",
            "PublishCall, again",
            "AgreedCall, by which roster",
            "AgreedCall, agreed",
            "AgreedCall, again",
            "OutcomeCall, its round is open",
            "OutcomeCall, its round is over",
            "StateCall",
            "DataCall",
            "DataCall, again",
            "ClaimCall",
            "ClaimCall, again",
            "LeaveCall",
            "LeaveCall, again",
        )
    },
    answer="answer; durable by then",
    rows=(
        DecisionRow(
            ("JoinCall",),
            "JoinReply; the membership",
            "An incarnation is never assigned twice.",
        ),
        DecisionRow(
            ("JoinCall, again",),
            "JoinReply; nothing new",
            "The nonce shows that it is the same incarnation.",
        ),
        DecisionRow(
            ("JoinCall, an earlier incarnation has published",),
            "JoinReply; the membership, the update",
            "Its update is valid, and no process is left to send it again.",
        ),
        DecisionRow(
            ("KeepCall, a part",),
            "KeepReply; nothing new",
            "Written but not durable: after a crash the founder sends it again.",
        ),
        DecisionRow(
            ("KeepCall, the last part",),
            "KeepReply; the constant",
            "The complete constant has the digest in its name.",
        ),
        DecisionRow(
            ("KeepCall, again",),
            "KeepReply; nothing new",
            "Bytes that are stored already are not written twice.",
        ),
        DecisionRow(
            ("FoundCall",),
            "Position; every fragment's state",
            "The weights of round 0 are files before any island takes them.",
        ),
        DecisionRow(
            ("FoundCall, again",),
            "Position; nothing new",
            "The same digests are the same founding.",
        ),
        DecisionRow(
            ("RecoverCall",),
            "Position; the outcome, the state",
            "The state that only an island had is in the journal again.",
        ),
        DecisionRow(
            ("RecoverCall, again",),
            "Position; nothing new",
            "A state that is not lost changes nothing.",
        ),
        DecisionRow(
            ("HeartbeatCall",), "Position; nothing new", "A lease is only in memory."
        ),
        DecisionRow(("OfferCall",), "wanted; nothing new", "Decided by the header."),
        DecisionRow(
            ("PublishCall, others are missing",),
            "staged; nothing new",
            "The island keeps the bytes until an outcome lists them.",
        ),
        DecisionRow(
            ("PublishCall, departing",),
            "staged; the update",
            "Its owner leaves, and no process could send it again.",
        ),
        DecisionRow(
            ("PublishCall, no other island is missing",),
            "staged; the outcome, the state",
            "The round was closed by this update and committed.",
        ),
        DecisionRow(
            ("PublishCall, again",),
            "staged; nothing new",
            "Counting is keyed by fragment, round and island.",
        ),
        DecisionRow(
            ("AgreedCall, by which roster",),
            "Outcome; nothing new",
            "The outcome's header, its pieces blank: only the islands can fill it.",
        ),
        DecisionRow(
            ("AgreedCall, agreed",),
            "Outcome; the outcome, the state",
            "Committed immediately, with a voucher of every island.",
        ),
        DecisionRow(
            ("AgreedCall, again",),
            "Outcome; nothing new",
            "The same outcome is the same upload.",
        ),
        DecisionRow(
            ("OutcomeCall, its round is open",),
            "None; nothing new",
            "With a heartbeat in the call the response is a position.",
        ),
        DecisionRow(
            ("OutcomeCall, its round is over",),
            "Outcome; nothing new",
            "Its record was durable before any island could read it.",
        ),
        DecisionRow(
            ("StateCall",), "Frame; nothing new", "The state of a durable round."
        ),
        DecisionRow(
            ("DataCall",),
            "DataSpec; the data",
            "Every island must have the same data, after a restart too.",
        ),
        DecisionRow(
            ("DataCall, again",), "DataSpec; nothing new", "The same data again."
        ),
        DecisionRow(
            ("ClaimCall",),
            "Claim; the rows",
            "No other island gets them, even if the coordinator crashes.",
        ),
        DecisionRow(
            ("ClaimCall, again",),
            "Claim; nothing new",
            "The number shows that it is the same claim.",
        ),
        DecisionRow(
            ("LeaveCall",), "None; the leaving", "A restart does not wait for it."
        ),
        DecisionRow(
            ("LeaveCall, again",), "None; nothing new", "The island has left already."
        ),
    ),
)


def answered(call: str) -> str:
    """Make a call, cut the power, and say the answer and what the disk then holds."""
    disk = SimDisk()
    service = Service.create(disk, SETTINGS, run="run", now_s=0.0)
    made = _tell(service, until=call)
    known = _facts(service.journal.recorded)
    reply = service.handle(made(service), 0.0)
    disk.crash(is_power_cut=True)
    durable = _facts(Journal.open(disk).recorded) - known
    words = sorted({str(word) for word, *_ in durable})
    return f"{_said(reply)}; {', '.join(words) or 'nothing new'}"


Making = Callable[[Service], Call]


def _tell(service: Service, *, until: str) -> Making:
    """Make the calls of the story before the one of this name, and return that one."""
    for name, making in _story():
        if name == until:
            return making
        service.handle(making(service), 0.0)
    raise AssertionError(f"the story has no {until!r}")


def _story() -> list[tuple[str, Making]]:
    """Return the calls of a whole run, in an order in which each makes sense."""
    return [
        ("JoinCall", _join("a")),
        ("JoinCall, again", _join("a")),
        ("KeepCall, a part", _keep(0, 8)),
        ("KeepCall, the last part", _keep(8, 16)),
        ("KeepCall, again", _keep(0, 8)),
        ("FoundCall", _found),
        ("FoundCall, again", _found),
        ("", _join("b")),
        ("", _join("c")),
        ("HeartbeatCall", lambda s: _beat(1)),
        ("OfferCall", lambda s: OfferCall(_update(s, "a").header)),
        ("PublishCall, others are missing", _publish("a")),
        ("PublishCall, again", _publish("a")),
        ("OutcomeCall, its round is open", lambda s: OutcomeCall(0, 1)),
        (
            "JoinCall, an earlier incarnation has published",
            _join("a", nonce=b"2", after=1),
        ),
        ("PublishCall, departing", _publish("b", kind=FrameKind.DEPARTING)),
        ("LeaveCall", lambda s: LeaveCall("b", 1)),
        ("LeaveCall, again", lambda s: LeaveCall("b", 1)),
        ("PublishCall, no other island is missing", _publish("c")),
        ("OutcomeCall, its round is over", lambda s: OutcomeCall(0, 1)),
        ("StateCall", lambda s: StateCall(0)),
        ("DataCall", _describe),
        ("DataCall, again", _describe),
        ("ClaimCall", _claim),
        ("ClaimCall, again", _claim),
        ("the end", lambda s: StateCall(0)),
        ("", lambda s: _beat(2, _proven(s)[0])),
        ("RecoverCall", lambda s: _proven(s)[1]),
        ("RecoverCall, again", lambda s: _proven(s)[1]),
        ("AgreedCall, by which roster", _gathered),
        ("AgreedCall, agreed", _agreed),
        ("AgreedCall, again", lambda s: _brought(s.journal.outcome(0, 3)[0])),
    ]


def _join(name: str, nonce: bytes = b"1", after: int = 0) -> Making:
    request = JoinRequest(model=MODEL, island=name, after=after)
    return lambda service: JoinCall(request, name.encode(), nonce)


def _keep(first: int, last: int) -> Making:
    """Let island a bring a part of the constant."""
    call = KeepCall("a", 1, CONSTANT.digest, first, VALUES[first:last])
    return lambda service: call


def _describe(service: Service) -> DataCall:
    return DataCall("c", 1, DataSpec(rows=10_000))


def _claim(service: Service) -> ClaimCall:
    return ClaimCall(Ask(island="c", incarnation=1, number=1))


def _beat(incarnation: int, *holds: HeldRound) -> HeartbeatCall:
    """Let island a say what it holds."""
    return HeartbeatCall(
        Heartbeat(island="a", incarnation=incarnation, step=0, holds=holds)
    )


def _publish(name: str, *, kind: FrameKind = FrameKind.UPDATE) -> Making:
    return lambda service: PublishCall(_update(service, name, kind=kind))


@cache
def _later() -> tuple[HeldRound, RecoverCall]:
    """Return what island a has from a coordinator whose last round was lost."""
    service = Service.create(SimDisk(), SETTINGS, run="run", now_s=0.0)
    _tell(service, until="the end")
    for name, incarnation in (("a", 2), ("c", 1)):
        update = _update(service, name, round=2, incarnation=incarnation)
        service.handle(PublishCall(update), 0.0)
    state = service.handle(StateCall(0), 0.0)
    assert isinstance(state, Frame)
    outcomes = [service.journal.outcome(0, round)[0] for round in (1, 2)]
    holding = HeldRound(state.header.round, state.header.base)
    return holding, RecoverCall("a", 2, state, tuple(outcomes))


def _proven(service: Service) -> tuple[HeldRound, RecoverCall]:
    """Return the same with receipts, as if this very coordinator had lost it."""
    holding, call = _later()
    receipt = service.receipts.of_state(0, holding.round, holding.digest)
    key = service.journal.receipt_key
    receipts = tuple(outcome_receipt(key, outcome) for outcome in call.outcomes)
    state = replace(call.state, receipt=receipt)
    proven = replace(call, state=state, receipts=receipts)
    return replace(holding, receipt=receipt), proven


def _gathered(service: Service) -> AgreedCall:
    """Let a and c ask how they are to reduce round 3 among themselves."""
    lives = (("a", 2), ("c", 1))
    updates = [_update(service, each, round=3, incarnation=n) for each, n in lives]
    return AgreedCall("a", 2, tuple(update.header for update in updates))


def _agreed(service: Service) -> AgreedCall:
    """Let them bring the mean, which is that of two equal updates."""
    call = _gathered(service)
    asked = service.handle(call, 0.0)
    assert isinstance(asked, Outcome)
    body = np.ones(3, np.float32).view(np.uint8)
    return _brought(with_body(asked.agreed.header, body), call.updates)


def _brought(agreed: Header, updates: tuple[Header, ...] = ()) -> AgreedCall:
    """Return the call that brings an outcome, with the word of a and of c."""
    updates = updates or (replace(_ANY_UPDATE, round=agreed.round),) * 2
    body = np.ones(3, np.float32).view(np.uint8)
    words = tuple(voucher(blake3_digest(key), agreed) for key in (b"a", b"c"))
    return AgreedCall("a", 2, updates, Frame(agreed, body), words)


def _found(service: Service) -> FoundCall:
    state = FragmentState.found(np.zeros(3, np.float32), "sgd")
    header, body = state.to_frame(
        run="run", fragment=0, outer=OUTER, island="a", incarnation=1
    )
    return FoundCall("a", 1, (Frame(header, body),))


def _update(
    service: Service,
    name: str,
    *,
    round: int = 1,
    kind: FrameKind = FrameKind.UPDATE,
    incarnation: int = 1,
) -> Frame:
    body = np.ones(3, np.float32).view(np.uint8)
    header = Header(
        kind=kind,
        run="run",
        fragment=0,
        round=round,
        island=name,
        incarnation=incarnation,
        base=service.weights[0].digest,
        elements=3,
        norm=float(np.sqrt(3.0)),
    )
    return Frame(with_body(header, body), body)


def _facts(recorded: RecordedRun) -> set[tuple[object, ...]]:
    """Return what a journal holds, each fact with the word the table has for it."""
    members = recorded.members.values()
    return {
        *(("the membership", each.island, each.incarnation) for each in members),
        *(("the leaving", each.island) for each in members if each.has_left),
        *(("every fragment's state", at) for at, _ in enumerate(recorded.fragments)),
        *(
            ("the state", at)
            for each in recorded.fragments
            for at in each.digests
            if at
        ),
        *(("the constant", each) for each in recorded.constants),
        *(("the update", *key) for key in recorded.staged),
        *(("the outcome", *key) for key in recorded.rosters),
        *(_facts_of_rows(recorded.ledger) if recorded.ledger else ()),
    }


def _facts_of_rows(ledger: RowLedger) -> set[tuple[object, ...]]:
    return {
        *((("the data", ledger.data),) if ledger.is_open else ()),
        *(("the rows", island, spans) for island, spans in ledger.holdings.items()),
    }


def _said(reply: Reply) -> str:
    return reply.value if isinstance(reply, Reception) else _kind(reply)


def _kind(reply: Reply) -> str:
    return "None" if reply is None else type(reply).__name__
