"""Calls as HTTP requests and back.

A beat rides on a publishing or a question in one header, `Atoll-Beat`. One that is
above `MAX_BEAT_BYTES`, because the run has very many fragments, goes ahead as a
heartbeat of its own: `apart` says so, and a coordinator does the same for both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from urllib.parse import quote

from atoll.errors import UsageError
from atoll.exchange.api.fields import MAX_LARGE_BYTES, dump, load
from atoll.exchange.api.frames import (
    MAX_OUTCOMES,
    Incoming,
    buffers_of,
    gathered_parts,
    read_gathered,
)
from atoll.exchange.api.messages import BEAT, MAX_FRAGMENTS, join_form, read_join
from atoll.exchange.api.routes import (
    BEAT_HEADER,
    MAX_BEAT_BYTES,
    OUTCOME_RECEIPT_HEADER,
    PROOF_HEADER,
    PROTOCOL,
    PROTOCOL_HEADER,
    RUN_HEADER,
    STATE_RECEIPT_HEADER,
    BodyKind,
    RequestHead,
    identities_of,
    identity_of,
    method_of,
    read_receipt,
    read_receipts,
    require_claimed,
    target_of,
)
from atoll.exchange.base import PART_BYTES, U8, Frame
from atoll.exchange.calls import (
    AgreedCall,
    Call,
    FoundCall,
    HeartbeatCall,
    JoinCall,
    KeepCall,
    LeaveCall,
    OfferCall,
    OutcomeCall,
    PublishCall,
    RecoverCall,
    StateCall,
)
from atoll.protocol import Heartbeat
from atoll.settings.rules import shown
from atoll.wire import MAX_HEADER_BYTES, Header, pack
from atoll.wire.digests import Bytes, view_of


@dataclass(frozen=True)
class EncodedRequest:
    """A request that is ready to go."""

    method: str
    target: str
    headers: dict[str, str] = field(default_factory=dict)
    body: tuple[Bytes, ...] = ()
    """Buffers, one after the other; a frame's body is not copied."""

    @property
    def body_bytes(self) -> int:
        return sum(len(view_of(each)) for each in self.body)


@dataclass(frozen=True)
class Upload:
    """An update whose header has been read, and whose body is still to come."""

    header: Header
    beat: Heartbeat | None

    def call(self, body: U8) -> PublishCall:
        return PublishCall(Frame(self.header, body), self.beat)


def apart(call: Call) -> tuple[HeartbeatCall | None, Call]:
    """Return the heartbeat that must go ahead, if its beat is too large to ride."""
    match call:
        case (
            PublishCall(beat=Heartbeat() as beat)
            | OutcomeCall(beat=Heartbeat() as beat)
        ):
            if len(_beat_text(beat)) > MAX_BEAT_BYTES:
                return HeartbeatCall(beat), replace(call, beat=None)
    return None, call


def to_request(
    call: Call, *, run: str | None = None, proof: str | None = None
) -> EncodedRequest:
    """Return the request that asks for this; `run` names whom it is meant for.

    `proof` is that of the island that the call speaks for: see `proof_text`.

    Raises:
        UsageError: it is more than a coordinator would take.
    """
    sent = _request(call)
    headers = {PROTOCOL_HEADER: str(PROTOCOL)}
    if run is not None:
        headers[RUN_HEADER] = quote(run, safe="")
    if proof is not None:
        headers[PROOF_HEADER] = proof
    return replace(sent, headers=headers | sent.headers)


def _request(call: Call) -> EncodedRequest:
    match call:
        case JoinCall(request):
            data = dump(join_form(call), what="joining", most=MAX_LARGE_BYTES)
            name = request.island
            if name is None:
                return _sent("join_unnamed", target_of("join_unnamed"), data)
            return _sent("join", target_of("join", name), data)
        case HeartbeatCall(beat):
            data = dump(BEAT.write(beat), what="heartbeat", most=MAX_LARGE_BYTES)
            return _sent("heartbeat", target_of("heartbeat", beat.island), data)
        case LeaveCall(island, incarnation):
            target = target_of("leave", island, incarnation=incarnation)
            return _sent("leave", target, takes=BodyKind.NOTHING)
        case OfferCall(header):
            place = (header.fragment, header.round, header.island)
            target = target_of("offer", *place)
            return _sent("offer", target, pack(header), takes=BodyKind.HEADER)
        case PublishCall(frame, beat):
            header = frame.header
            place = (header.fragment, header.round, header.island)
            target, body = target_of("publish", *place), buffers_of(frame)
            return _sent("publish", target, *body, takes=BodyKind.FRAME, beat=beat)
        case AgreedCall(island, incarnation):
            target = target_of(
                "agreed",
                call.fragment,
                call.round,
                island=island,
                incarnation=incarnation,
            )
            body = gathered_parts(call)
            return _sent("agreed", target, *body, takes=BodyKind.FRAMES)
        case OutcomeCall(fragment, round, wait_s, beat):
            target = target_of("outcome", fragment, round, wait_s=wait_s)
            return _sent("outcome", target, takes=BodyKind.NOTHING, beat=beat)
        case StateCall(fragment):
            return _sent("state", target_of("state", fragment), takes=BodyKind.NOTHING)
        case FoundCall(island, incarnation, states):
            target = target_of("found", island=island, incarnation=incarnation)
            body = tuple(part for each in states for part in buffers_of(each))
            return _sent("found", target, *body, takes=BodyKind.FRAMES)
        case KeepCall(island, incarnation, digest, first, part):
            target = target_of(
                "keep", digest, island=island, incarnation=incarnation, first=first
            )
            return _sent("keep", target, part, takes=BodyKind.BYTES)
        case RecoverCall(island, incarnation, state, outcomes):
            number = state.header.fragment
            target = target_of(
                "recover", number, island=island, incarnation=incarnation
            )
            body = (*map(pack, outcomes), *buffers_of(state))
            sent = _sent("recover", target, *body, takes=BodyKind.FRAMES)
            return replace(sent, headers=sent.headers | _receipts_of(call))


def _sent(
    name: str,
    target: str,
    *body: Bytes,
    takes: BodyKind = BodyKind.JSON,
    beat: Heartbeat | None = None,
) -> EncodedRequest:
    headers = {} if takes is BodyKind.NOTHING else {"Content-Type": takes.value}
    if beat is not None:
        said = _beat_text(beat)
        if len(said) > MAX_BEAT_BYTES:
            raise UsageError(
                f"A beat of {len(said)} bytes is above the limit of {MAX_BEAT_BYTES} "
                "of a header. Send it ahead as a heartbeat, as `apart` says."
            )
        headers[BEAT_HEADER] = said
    return EncodedRequest(method_of(name), target, headers, body)


def _receipts_of(call: RecoverCall) -> dict[str, str]:
    headers = {}
    if call.state.receipt:
        headers[STATE_RECEIPT_HEADER] = call.state.receipt.hex()
    if call.receipts:
        shown = ", ".join(each.hex() for each in call.receipts)
        headers[OUTCOME_RECEIPT_HEADER] = shown
    return headers


def _beat_text(beat: Heartbeat) -> str:
    return dump(BEAT.write(beat), what="beat", most=MAX_LARGE_BYTES).decode("ascii")


def parse_call(asked: RequestHead, body: Incoming) -> Call:
    """Return the call that a request makes, its body read to the end.

    Raises:
        UsageError: a field is wrong, or it speaks for another island than its head.
        CorruptError: a frame is, or the body is longer than what it holds.
    """
    call = _call(asked, body)
    body.finish()
    require_claimed(asked.claim, *identities_of(call))
    return call


def _call(asked: RequestHead, body: Incoming) -> Call:
    match asked.route.name:
        case "join":
            return read_join(_json(body, "joining"), island=asked.island)
        case "join_unnamed":
            return read_join(_json(body, "joining"), island=None)
        case "heartbeat":
            beat = BEAT.read(_json(body, "heartbeat"), "beat")
            _require_same("island", beat.island, asked.island)
            return HeartbeatCall(beat)
        case "publish":
            upload = parse_upload(asked, body)
            return upload.call(body.body(upload.header))
        case "offer":
            return OfferCall(_placed(asked, body.header()))
        case "found":
            states = body.frames(most=MAX_FRAGMENTS)
            return FoundCall(asked.island, asked.incarnation, states, is_given=True)
        case "keep":
            who = asked.island, asked.incarnation
            part = body.rest(what="part of a constant", most=PART_BYTES)
            return KeepCall(*who, asked.digest, asked.first, part)
        case "recover":
            outcomes, state = body.recovery()
            return recover_call(asked, state, outcomes)
        case "agreed":
            return read_gathered(asked, body)
        case "leave":
            return LeaveCall(asked.island, asked.incarnation)
        case "outcome":
            question = asked.fragment, asked.round, asked.wait_s
            return OutcomeCall(*question, asked.beat)
        case "state":
            return StateCall(asked.fragment)
        case other:
            raise AssertionError(f"the route {other} is no call")


def recover_call(
    asked: RequestHead, state: Frame, outcomes: tuple[Header, ...]
) -> RecoverCall:
    """Return the call that brings a lost state, with the receipts of its request."""
    _require_same("fragment", state.header.fragment, asked.fragment)
    receipt = read_receipt(asked.headers, STATE_RECEIPT_HEADER)
    receipts = read_receipts(asked.headers, OUTCOME_RECEIPT_HEADER, most=MAX_OUTCOMES)
    return RecoverCall(
        asked.island,
        asked.incarnation,
        replace(state, receipt=receipt),
        outcomes,
        tuple(receipts),
    )


def parse_upload(
    asked: RequestHead, body: Incoming, *, max_header_bytes: int = MAX_HEADER_BYTES
) -> Upload:
    """Return what an update's request says before its body, which is not read yet."""
    beat = asked.beat
    if beat is not None:
        _require_same("island", beat.island, asked.island)
        require_claimed(asked.claim, identity_of(beat))
    header = _placed(asked, body.header(most=max_header_bytes))
    require_claimed(asked.claim, identity_of(header))
    return Upload(header, beat)


def _placed(asked: RequestHead, header: Header) -> Header:
    """Return a header that belongs where it was put."""
    _require_same("fragment", header.fragment, asked.fragment)
    _require_same("round", header.round, asked.round)
    _require_same("island", header.island, asked.island)
    return header


def _json(body: Incoming, what: str) -> object:
    data = body.rest(what=what, most=MAX_LARGE_BYTES)
    return load(data, what=what, most=MAX_LARGE_BYTES)


def _require_same(what: str, said: object, path: object) -> None:
    if said != path:
        raise UsageError(
            f"{what}={shown(said)} in the body is not {shown(path)}, as the path says. "
            "Send it to its own path."
        )
