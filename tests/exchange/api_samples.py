"""Calls and replies of every kind, and how they look after their way over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from atoll.data import Ask, Claim, DataSpec, Spans
from atoll.data.ledger import MAX_WANT
from atoll.data.spans import MAX_TURN
from atoll.exchange import Frame, Outcome
from atoll.exchange.api import (
    EncodedReply,
    EncodedRequest,
    Incoming,
    Info,
    Limits,
    RequestHead,
    error_parts,
    identities_of,
    parse_call,
    parse_reply,
    proof_text,
    read_head,
    reply_parts,
    to_request,
)
from atoll.exchange.api.messages import MAX_STEP_S
from atoll.exchange.calls import (
    AgreedCall,
    Call,
    ClaimCall,
    DataCall,
    FoundCall,
    HeartbeatCall,
    JoinCall,
    KeepCall,
    KeepReply,
    LeaveCall,
    OfferCall,
    OutcomeCall,
    PublishCall,
    RecoverCall,
    Reply,
    StateCall,
)
from atoll.http.request import parse_target
from atoll.protocol import (
    Heartbeat,
    HeldRound,
    JoinReply,
    JoinRequest,
    ModelSpec,
    Position,
    Reception,
    TensorSpec,
)
from atoll.protocol.messages import CountedWork
from atoll.protocol.model import ConstantCatalogue
from atoll.routes import find_route
from atoll.settings import RunSettings
from atoll.wire import Header, blake3_digest, pack
from atoll.wire.roster import new_name_fault
from tests.wire.samples import a_state, an_agreed, an_update, body_of, sealed

U64_MAX = 2**64 - 1

SETTINGS = (
    RunSettings(),
    RunSettings.from_dict(
        {
            "run": {"max_islands": 9, "end_rounds": 3, "patience": 2.5},
            "sync": {"num_fragments": 4, "overlap_steps": 5},
            "outer": {"lr": 0.1, "momentum": 0.3},
            "wire": {"up": "e3m0", "down": "int8"},
        }
    ),
)

MODEL = ModelSpec(
    (
        TensorSpec(
            name="embed.weight", shape=(256, 128), dtype="float32", role="parameter"
        ),
        TensorSpec(
            name="mask", shape=(8,), dtype="int64", role="constant", digest="00ff"
        ),
    )
)
CATALOGUE = ConstantCatalogue.of(
    ModelSpec(
        (
            TensorSpec(
                name="base",
                shape=(2, 2),
                dtype="bfloat16",
                role="constant",
                digest="0123456789abcdef" * 4,
            ),
            *MODEL.with_role("constant"),
        )
    ),
    stored_digests=["0123456789abcdef" * 4],
)
BEAT = Heartbeat(
    island="tokyo-1",
    incarnation=3,
    step=712,
    waits_for=(0, 8),
    holds=(
        HeldRound(7, bytes(range(16)), bytes(range(0xF0, 0x100))),
        HeldRound(6, bytes(16)),
    ),
    step_s=0.125,
)
POSITION = Position(
    step=700, rounds=(8, 7), last_round=20, tokens=5000, wanted=(0,), lost=(1,)
)

RUN = Info(
    run="lagoon",
    version="1.2.3",
    settings=SETTINGS[0],
    epoch=1,
    model_fingerprint="",
    lease_s=15.0,
    heartbeat_s=3.0,
    limits=Limits(body_bytes=SETTINGS[0].limits.max_body_bytes),
)
REPLY = JoinReply(
    run="lagoon",
    island="tokyo-1",
    incarnation=3,
    slot=0,
    settings=SETTINGS[0],
    epoch=1,
    position=Position(step=700, rounds=(8, 7), tokens=5000),
    is_founder=False,
    inner_steps=600,
    tokens=4000,
    spoken_for=(1,),
    counted=(CountedWork(round=7, inner_steps=600, tokens=4000), None),
)


def as_received(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers as whoever reads HTTP gives them: by lower-case name."""
    return {key.lower(): value for key, value in headers.items()}


def body_bytes(message: EncodedRequest | EncodedReply) -> bytes:
    """Return a body as it is on the wire."""
    return b"".join(bytes(part) for part in message.body)


def proof_of(call: Call, *, key: bytes = b"key", run: str = "lagoon") -> str | None:
    """Return the header that proves a call, for an island with this key."""
    for identity in identities_of(call):
        return proof_text(identity, blake3_digest(key), run=run)
    return None


def head_of(method: str, target: str, headers: Mapping[str, str]) -> RequestHead:
    """Return the head of a request as a coordinator reads it."""
    segments, query = parse_target(target, max_path_bytes=2048)
    return read_head(find_route(method, segments), query, headers)


def sent_and_read(call: Call) -> Call:
    """Return a call as the coordinator reads it."""
    sent = to_request(call, proof=proof_of(call))
    head = head_of(sent.method, sent.target, as_received(sent.headers))
    return parse_call(head, Incoming.of(body_bytes(sent)))


def answered(call: Call, answer: EncodedReply) -> Reply:
    """Return what an island makes of an answer, or raise what it stands for."""
    body = Incoming.of(body_bytes(answer))
    return parse_reply(call, answer.status, as_received(answer.headers), body)


def replied_and_read(call: Call, reply: Reply) -> Reply:
    """Return a reply as the island reads it."""
    return answered(call, reply_parts(reply))


def raised_and_read(error: Exception) -> Exception:
    """Return an error as it is raised at the island."""
    try:
        answered(StateCall(0), error_parts(error))
    except Exception as exc:  # whatever comes out is what the test judges
        return exc
    raise AssertionError("nothing was raised")


def plain(value: object) -> object:
    """Return a value that can be compared: arrays as bytes, headers as they travel."""
    if isinstance(value, Header):
        return pack(value)
    if isinstance(value, np.ndarray | memoryview):
        return value.tobytes()
    if is_dataclass(value):
        inside = {each.name: plain(getattr(value, each.name)) for each in fields(value)}
        return type(value).__name__, inside
    if isinstance(value, tuple):
        return tuple(plain(each) for each in value)
    return value


def frame_of(header: Header) -> Frame:
    """Return a frame whose body is all zero bytes."""
    return Frame(sealed(header), body_of(header.codec, header.elements))


NUMBERS = st.integers(0, U64_MAX)
FRAGMENTS = st.integers(0, 2**32 - 1)
NAMES = st.one_of(
    st.sampled_from(["-", "a b", "50%", "a?b=c&d", "%2F", "é", "...", "#", "+"]),
    st.text(min_size=1, max_size=30),
).filter(lambda name: new_name_fault(name, field="name") is None)


def several(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, max_size=4).map(tuple)


SIXTEEN = st.binary(min_size=16, max_size=16)
RECEIPTS = st.just(b"") | SIXTEEN
HOLDINGS = st.builds(HeldRound, NUMBERS, SIXTEEN, RECEIPTS)
BEATS = st.builds(
    Heartbeat,
    island=NAMES,
    incarnation=NUMBERS,
    step=NUMBERS,
    waits_for=st.none() | st.tuples(NUMBERS, NUMBERS),
    holds=several(HOLDINGS),
    step_s=st.none() | st.floats(0.0, MAX_STEP_S, exclude_min=True),
)
TENSORS = st.builds(
    TensorSpec,
    name=st.text(st.characters(codec="utf-8"), min_size=1, max_size=40),
    shape=several(st.integers(0, 2**63 - 1)),
    dtype=st.sampled_from(["float32", "bfloat16", "int64"]),
    role=st.sampled_from(["parameter", "buffer", "constant"]),
    digest=st.binary(max_size=64).map(bytes.hex),
)
MODELS = st.lists(TENSORS, max_size=4, unique_by=lambda each: each.name).map(
    lambda tensors: ModelSpec(tuple(tensors))
)
POSITIONS = st.builds(
    Position,
    step=NUMBERS,
    rounds=several(NUMBERS),
    last_round=st.none() | NUMBERS,
    tokens=st.integers(0, 4 * U64_MAX),
    wanted=several(FRAGMENTS),
    lost=several(FRAGMENTS),
    last_rounds=st.none() | several(NUMBERS),
)
UPDATES = st.builds(
    an_update, fragment=FRAGMENTS, round=NUMBERS, island=NAMES, incarnation=NUMBERS
)
STATES = st.builds(a_state, fragment=FRAGMENTS, round=NUMBERS).map(frame_of)
PROVEN_STATES = st.builds(replace, STATES, receipt=RECEIPTS)
KEYS = st.binary(min_size=1, max_size=64)


@st.composite
def publishings(draw: st.DrawFn) -> PublishCall:
    """Draw an update with a beat of its own island, or none."""
    header = draw(UPDATES)
    beat = draw(st.none() | BEATS)
    who = {"island": header.island, "incarnation": header.incarnation}
    own = None if beat is None else Heartbeat(**(vars(beat) | who))
    return PublishCall(frame_of(header), own)


@st.composite
def agreements(draw: st.DrawFn) -> AgreedCall:
    """Draw what some islands bring for one round, agreed on or not yet."""
    place = {"fragment": draw(FRAGMENTS), "round": draw(NUMBERS)}
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    updates = tuple(sealed(an_update(island=name, **place)) for name in names)
    who = draw(NAMES), draw(NUMBERS)
    if draw(st.booleans()):
        return AgreedCall(*who, updates)
    words = tuple(bytes([at]) * 32 for at, _ in enumerate(names))
    return AgreedCall(*who, updates, frame_of(an_agreed(**place)), words)


TURNS = st.integers(0, MAX_TURN)
DATA = st.builds(
    DataSpec,
    rows=st.none() | TURNS,
    fingerprint=st.text(st.characters(codec="utf-8"), max_size=40),
)
SPANS = st.lists(
    st.tuples(st.integers(0, MAX_TURN - 2**40), st.integers(1, 2**40)), max_size=5
).map(lambda spans: Spans((first, first + length) for first, length in spans))
CLAIMS = st.builds(Claim, spans=SPANS, is_over=st.booleans())

CALLS: st.SearchStrategy[Call] = st.one_of(
    st.builds(
        JoinCall,
        st.builds(
            JoinRequest,
            model=MODELS,
            island=st.none() | NAMES,
            incarnation=st.none() | NUMBERS,
            after=NUMBERS,
            holds=several(HOLDINGS),
        ),
        KEYS,
        KEYS,
    ),
    st.builds(HeartbeatCall, BEATS),
    st.builds(LeaveCall, NAMES, NUMBERS),
    st.builds(OfferCall, UPDATES.map(sealed)),
    publishings(),
    agreements(),
    st.builds(
        OutcomeCall,
        FRAGMENTS,
        NUMBERS,
        st.floats(0.0, 60.0),
        st.none() | BEATS,
        has_body=st.booleans(),
    ),
    st.builds(StateCall, FRAGMENTS),
    st.builds(DataCall, NAMES, NUMBERS, DATA),
    st.builds(
        ClaimCall,
        st.builds(
            Ask,
            island=NAMES,
            incarnation=NUMBERS,
            number=st.integers(1, U64_MAX),
            want=st.integers(1, MAX_WANT),
            start=TURNS,
        ),
    ),
    st.builds(FoundCall, NAMES, NUMBERS, several(STATES), st.just(True)),
    st.builds(
        KeepCall,
        NAMES,
        NUMBERS,
        st.binary(min_size=32, max_size=32).map(bytes.hex),
        NUMBERS,
        st.binary(max_size=64).map(memoryview),
    ),
    st.builds(
        RecoverCall,
        NAMES,
        NUMBERS,
        PROVEN_STATES,
        st.lists(st.just(sealed(an_agreed())), max_size=2).map(tuple),
        st.lists(SIXTEEN, max_size=2).map(tuple),
    ),
)

JOIN = JoinCall(JoinRequest(model=MODEL, island="tokyo-1", after=2), b"key", b"nonce")
OFFER = OfferCall(sealed(an_update()))
CLAIM_CALL = ClaimCall(
    Ask(island="tokyo-1", incarnation=3, number=7, want=2, start=2048)
)
CLAIMED = Claim(spans=Spans([(2048, 4096)]))
DATA_CALL = DataCall("tokyo-1", 3, DataSpec(rows=1_000_000, fingerprint="c0ffee"))
QUESTION = OutcomeCall(2, 7, 2.0, BEAT)
AGREED = frame_of(an_agreed())
NO_BODY = np.empty(0, np.uint8)
PROVEN = st.builds(replace, st.just(AGREED), receipt=RECEIPTS)
PROVEN_HEADER = st.builds(Frame, st.just(AGREED.header), st.just(NO_BODY), RECEIPTS)

REPLIES: st.SearchStrategy[tuple[Call, Reply]] = st.one_of(
    st.tuples(
        st.just(JOIN),
        st.builds(
            JoinReply,
            run=NAMES,
            island=NAMES,
            incarnation=NUMBERS,
            slot=NUMBERS,
            settings=st.sampled_from(SETTINGS),
            epoch=NUMBERS,
            position=POSITIONS,
            is_founder=st.booleans(),
            inner_steps=NUMBERS,
            tokens=NUMBERS,
            spoken_for=several(FRAGMENTS),
            counted=several(
                st.none()
                | st.builds(
                    CountedWork,
                    round=NUMBERS,
                    inner_steps=NUMBERS,
                    tokens=NUMBERS,
                    listed=NUMBERS,
                )
            ),
            held_rows=SPANS.map(Spans.pack),
            last_claim=NUMBERS,
        ),
    ),
    st.tuples(st.sampled_from([HeartbeatCall(BEAT), QUESTION]), POSITIONS),
    st.tuples(
        st.sampled_from([OFFER, PublishCall(frame_of(an_update()))]),
        st.sampled_from(Reception),
    ),
    st.tuples(st.just(QUESTION), st.builds(Outcome, PROVEN, POSITIONS, RECEIPTS)),
    st.tuples(
        st.just(AgreedCall("a", 1, (OFFER.header,))),
        st.builds(Outcome, PROVEN_HEADER, POSITIONS, RECEIPTS)
        | st.sampled_from([Reception.WANTED, Reception.COMMITTED]),
    ),
    st.tuples(
        st.just(QUESTION),
        st.builds(
            Outcome,
            PROVEN_HEADER,
            POSITIONS,
            RECEIPTS,
        ),
    ),
    st.tuples(st.just(StateCall(2)), PROVEN_STATES),
    st.tuples(st.just(DataCall("a", 1, DataSpec(rows=9))), DATA),
    st.tuples(st.just(CLAIM_CALL), CLAIMS),
    st.tuples(st.just(KeepCall("a", 1, "0" * 64, 0)), st.builds(KeepReply, NUMBERS)),
    st.tuples(st.sampled_from([LeaveCall("a", 1), QUESTION]), st.none()),
)
