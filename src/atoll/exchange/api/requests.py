"""Calls as HTTP requests and back.

An upload or a poll carries a heartbeat in one header, `Atoll-Beat`. A heartbeat above
`MAX_BEAT_BYTES`, because the run has very many fragments, is sent before it as a
separate call: see `apart`. A coordinator handles both alike.
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
    """The method, target, headers and body of a request."""

    method: str
    target: str
    headers: dict[str, str] = field(default_factory=dict)
    body: tuple[Bytes, ...] = ()
    """Buffers, one after the other; a frame's body is not copied."""

    @property
    def body_bytes(self) -> int:
        return sum(len(view_of(part)) for part in self.body)


@dataclass(frozen=True)
class Upload:
    """An update whose header has been read, and whose body has not."""

    header: Header
    beat: Heartbeat | None

    def call(self, body: U8) -> PublishCall:
        return PublishCall(Frame(self.header, body), self.beat)


def apart(call: Call) -> tuple[HeartbeatCall | None, Call]:
    """Return a heartbeat to send first, if a header cannot hold it, and the call."""
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
    """Return the HTTP request of a call; `run` names the run that it is meant for.

    `proof` is the proof of the calling island: see `proof_text`.

    Raises:
        UsageError: it is larger than a coordinator accepts.
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
            data = dump(join_form(call), name="join", max_bytes=MAX_LARGE_BYTES)
            name = request.island
            if name is None:
                return _sent("join_unnamed", target_of("join_unnamed"), data)
            return _sent("join", target_of("join", name), data)
        case HeartbeatCall(beat):
            data = dump(BEAT.write(beat), name="heartbeat", max_bytes=MAX_LARGE_BYTES)
            return _sent("heartbeat", target_of("heartbeat", beat.island), data)
        case LeaveCall(island, incarnation):
            target = target_of("leave", island, incarnation=incarnation)
            return _sent("leave", target, body_kind=BodyKind.EMPTY)
        case OfferCall(header):
            target = target_of("offer", header.fragment, header.round, header.island)
            return _sent("offer", target, pack(header), body_kind=BodyKind.HEADER)
        case PublishCall(frame, beat):
            header = frame.header
            target = target_of("publish", header.fragment, header.round, header.island)
            body = buffers_of(frame)
            return _sent("publish", target, *body, body_kind=BodyKind.FRAME, beat=beat)
        case AgreedCall(island, incarnation):
            target = target_of(
                "agreed",
                call.fragment,
                call.round,
                island=island,
                incarnation=incarnation,
            )
            body = gathered_parts(call)
            return _sent("agreed", target, *body, body_kind=BodyKind.FRAMES)
        case OutcomeCall(fragment, round, wait_s, beat):
            target = target_of("outcome", fragment, round, wait_s=wait_s)
            return _sent("outcome", target, body_kind=BodyKind.EMPTY, beat=beat)
        case StateCall(fragment):
            return _sent(
                "state", target_of("state", fragment), body_kind=BodyKind.EMPTY
            )
        case FoundCall(island, incarnation, states):
            target = target_of("found", island=island, incarnation=incarnation)
            body = tuple(part for state in states for part in buffers_of(state))
            return _sent("found", target, *body, body_kind=BodyKind.FRAMES)
        case KeepCall(island, incarnation, digest, first, part):
            target = target_of(
                "keep", digest, island=island, incarnation=incarnation, first=first
            )
            return _sent("keep", target, part, body_kind=BodyKind.BYTES)
        case RecoverCall(island, incarnation, state, outcomes):
            fragment = state.header.fragment
            target = target_of(
                "recover", fragment, island=island, incarnation=incarnation
            )
            body = (*map(pack, outcomes), *buffers_of(state))
            sent = _sent("recover", target, *body, body_kind=BodyKind.FRAMES)
            return replace(sent, headers=sent.headers | _receipts_of(call))


def _sent(
    name: str,
    target: str,
    *body: Bytes,
    body_kind: BodyKind = BodyKind.JSON,
    beat: Heartbeat | None = None,
) -> EncodedRequest:
    headers = {} if body_kind is BodyKind.EMPTY else {"Content-Type": body_kind.value}
    if beat is not None:
        text = _beat_text(beat)
        if len(text) > MAX_BEAT_BYTES:
            raise UsageError(
                f"A beat of {len(text)} bytes is above the limit of {MAX_BEAT_BYTES} "
                "of a header. Send it first as a heartbeat: see `apart`."
            )
        headers[BEAT_HEADER] = text
    return EncodedRequest(method_of(name), target, headers, body)


def _receipts_of(call: RecoverCall) -> dict[str, str]:
    headers = {}
    if call.state.receipt:
        headers[STATE_RECEIPT_HEADER] = call.state.receipt.hex()
    if call.receipts:
        receipts = ", ".join(receipt.hex() for receipt in call.receipts)
        headers[OUTCOME_RECEIPT_HEADER] = receipts
    return headers


def _beat_text(beat: Heartbeat) -> str:
    return dump(BEAT.write(beat), name="beat", max_bytes=MAX_LARGE_BYTES).decode(
        "ascii"
    )


def parse_call(head: RequestHead, body: Incoming) -> Call:
    """Return the call that a request makes, its body read to the end.

    Raises:
        UsageError: a field is wrong, or names another island than the head.
        CorruptError: a frame is wrong, or the body has extra bytes.
    """
    call = _call(head, body)
    body.finish()
    require_claimed(head.claim, *identities_of(call))
    return call


def _call(head: RequestHead, body: Incoming) -> Call:
    match head.route.name:
        case "join":
            return read_join(_json(body, "join"), island=head.island)
        case "join_unnamed":
            return read_join(_json(body, "join"), island=None)
        case "heartbeat":
            beat = BEAT.read(_json(body, "heartbeat"), "beat")
            _require_same("island", beat.island, head.island)
            return HeartbeatCall(beat)
        case "publish":
            upload = parse_upload(head, body)
            return upload.call(body.body(upload.header))
        case "offer":
            return OfferCall(_placed(head, body.header()))
        case "found":
            states = body.frames(max_frames=MAX_FRAGMENTS)
            return FoundCall(head.island, head.incarnation, states, is_given=True)
        case "keep":
            part = body.rest(name="part of a constant", max_bytes=PART_BYTES)
            return KeepCall(
                head.island, head.incarnation, head.digest, head.first, part
            )
        case "recover":
            outcomes, state = body.recovery()
            return recover_call(head, state, outcomes)
        case "agreed":
            return read_gathered(head, body)
        case "leave":
            return LeaveCall(head.island, head.incarnation)
        case "outcome":
            return OutcomeCall(head.fragment, head.round, head.wait_s, head.beat)
        case "state":
            return StateCall(head.fragment)
        case other:
            raise AssertionError(f"the route {other} is no call")


def recover_call(
    head: RequestHead, state: Frame, outcomes: tuple[Header, ...]
) -> RecoverCall:
    """Return the call that uploads a lost state, with the receipts of its request."""
    _require_same("fragment", state.header.fragment, head.fragment)
    receipt = read_receipt(head.headers, STATE_RECEIPT_HEADER)
    receipts = read_receipts(
        head.headers, OUTCOME_RECEIPT_HEADER, max_receipts=MAX_OUTCOMES
    )
    return RecoverCall(
        head.island,
        head.incarnation,
        replace(state, receipt=receipt),
        outcomes,
        tuple(receipts),
    )


def parse_upload(
    head: RequestHead, body: Incoming, *, max_header_bytes: int = MAX_HEADER_BYTES
) -> Upload:
    """Return the header and the beat of an upload; its body is not read yet."""
    beat = head.beat
    if beat is not None:
        _require_same("island", beat.island, head.island)
        require_claimed(head.claim, identity_of(beat))
    header = _placed(head, body.header(max_bytes=max_header_bytes))
    require_claimed(head.claim, identity_of(header))
    return Upload(header, beat)


def _placed(head: RequestHead, header: Header) -> Header:
    """Return a header, if it belongs to the path of its request."""
    _require_same("fragment", header.fragment, head.fragment)
    _require_same("round", header.round, head.round)
    _require_same("island", header.island, head.island)
    return header


def _json(body: Incoming, name: str) -> object:
    data = body.rest(name=name, max_bytes=MAX_LARGE_BYTES)
    return load(data, name=name, max_bytes=MAX_LARGE_BYTES)


def _require_same(field: str, in_body: object, in_path: object) -> None:
    if in_body != in_path:
        raise UsageError(
            f"{field}={shown(in_body)} in the body is not {shown(in_path)}, as in the "
            "path. Send it to its own path."
        )
