"""Calls as HTTP requests and back.

An upload or a poll carries a heartbeat in one header, `Atoll-Beat`. A heartbeat above
`MAX_BEAT_BYTES`, because the run has very many fragments, is sent before it as a
separate call: see `apart`. A coordinator handles both alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from urllib.parse import quote

from atoll.errors import UsageError
from atoll.exchange import calls
from atoll.exchange.api import routes
from atoll.exchange.api.fields import MAX_LARGE_BYTES, dump, load
from atoll.exchange.api.frames import (
    MAX_OUTCOMES,
    Incoming,
    buffers_of,
    gathered_parts,
    read_gathered,
)
from atoll.exchange.api.messages import BEAT, MAX_FRAGMENTS, join_form, read_join
from atoll.exchange.base import PART_BYTES, U8, Frame
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

    def call(self, body: U8) -> calls.PublishCall:
        return calls.PublishCall(Frame(self.header, body), self.beat)


def apart(call: calls.Call) -> tuple[calls.HeartbeatCall | None, calls.Call]:
    """Return a heartbeat to send first, if a header cannot hold it, and the call."""
    match call:
        case (
            calls.PublishCall(beat=Heartbeat() as beat)
            | calls.OutcomeCall(beat=Heartbeat() as beat)
        ):
            if len(_beat_text(beat)) > routes.MAX_BEAT_BYTES:
                return calls.HeartbeatCall(beat), replace(call, beat=None)
    return None, call


def to_request(
    call: calls.Call, *, run: str | None = None, proof: str | None = None
) -> EncodedRequest:
    """Return the HTTP request of a call; `run` names the run that it is meant for.

    `proof` is the proof of the calling island: see `proof_text`.

    Raises:
        UsageError: it is larger than a coordinator accepts.
    """
    sent = _request(call)
    headers = {routes.PROTOCOL_HEADER: str(routes.PROTOCOL)}
    if run is not None:
        headers[routes.RUN_HEADER] = quote(run, safe="")
    if proof is not None:
        headers[routes.PROOF_HEADER] = proof
    return replace(sent, headers=headers | sent.headers)


def _request(call: calls.Call) -> EncodedRequest:
    match call:
        case calls.JoinCall(request):
            data = dump(join_form(call), name="join", max_bytes=MAX_LARGE_BYTES)
            name = request.island
            if name is None:
                return _encode("join_unnamed", routes.target_of("join_unnamed"), data)
            return _encode("join", routes.target_of("join", name), data)
        case calls.HeartbeatCall(beat):
            data = dump(BEAT.write(beat), name="heartbeat", max_bytes=MAX_LARGE_BYTES)
            return _encode(
                "heartbeat", routes.target_of("heartbeat", beat.island), data
            )
        case calls.LeaveCall(island, incarnation):
            target = routes.target_of("leave", island, incarnation=incarnation)
            return _encode("leave", target, body_kind=routes.BodyKind.EMPTY)
        case calls.OfferCall(header):
            target = routes.target_of(
                "offer", header.fragment, header.round, header.island
            )
            return _encode(
                "offer", target, pack(header), body_kind=routes.BodyKind.HEADER
            )
        case calls.PublishCall(frame, beat):
            header = frame.header
            target = routes.target_of(
                "publish", header.fragment, header.round, header.island
            )
            body = buffers_of(frame)
            return _encode(
                "publish", target, *body, body_kind=routes.BodyKind.FRAME, beat=beat
            )
        case calls.AgreedCall(island, incarnation):
            target = routes.target_of(
                "agreed",
                call.fragment,
                call.round,
                island=island,
                incarnation=incarnation,
            )
            body = gathered_parts(call)
            return _encode("agreed", target, *body, body_kind=routes.BodyKind.FRAMES)
        case calls.OutcomeCall(fragment, round, wait_s, beat):
            target = routes.target_of("outcome", fragment, round, wait_s=wait_s)
            return _encode(
                "outcome", target, body_kind=routes.BodyKind.EMPTY, beat=beat
            )
        case calls.StateCall(fragment):
            return _encode(
                "state",
                routes.target_of("state", fragment),
                body_kind=routes.BodyKind.EMPTY,
            )
        case calls.FoundCall(island, incarnation, states):
            target = routes.target_of("found", island=island, incarnation=incarnation)
            body = tuple(part for state in states for part in buffers_of(state))
            return _encode("found", target, *body, body_kind=routes.BodyKind.FRAMES)
        case calls.KeepCall(island, incarnation, digest, first, part):
            target = routes.target_of(
                "keep", digest, island=island, incarnation=incarnation, first=first
            )
            return _encode("keep", target, part, body_kind=routes.BodyKind.BYTES)
        case calls.RecoverCall(island, incarnation, state, outcomes):
            fragment = state.header.fragment
            target = routes.target_of(
                "recover", fragment, island=island, incarnation=incarnation
            )
            body = (*map(pack, outcomes), *buffers_of(state))
            sent = _encode("recover", target, *body, body_kind=routes.BodyKind.FRAMES)
            return replace(sent, headers=sent.headers | _receipts_of(call))


def _encode(
    name: str,
    target: str,
    *body: Bytes,
    body_kind: routes.BodyKind = routes.BodyKind.JSON,
    beat: Heartbeat | None = None,
) -> EncodedRequest:
    headers = (
        {} if body_kind is routes.BodyKind.EMPTY else {"Content-Type": body_kind.value}
    )
    if beat is not None:
        text = _beat_text(beat)
        if len(text) > routes.MAX_BEAT_BYTES:
            raise UsageError(
                f"A beat of {len(text)} bytes is above the limit of "
                f"{routes.MAX_BEAT_BYTES} of a header. Send it first as a heartbeat: "
                "see `apart`."
            )
        headers[routes.BEAT_HEADER] = text
    return EncodedRequest(routes.method_of(name), target, headers, body)


def _receipts_of(call: calls.RecoverCall) -> dict[str, str]:
    headers = {}
    if call.state.receipt:
        headers[routes.STATE_RECEIPT_HEADER] = call.state.receipt.hex()
    if call.receipts:
        receipts = ", ".join(receipt.hex() for receipt in call.receipts)
        headers[routes.OUTCOME_RECEIPT_HEADER] = receipts
    return headers


def _beat_text(beat: Heartbeat) -> str:
    return dump(BEAT.write(beat), name="beat", max_bytes=MAX_LARGE_BYTES).decode(
        "ascii"
    )


def parse_call(head: routes.RequestHead, body: Incoming) -> calls.Call:
    """Return the call that a request makes, its body read to the end.

    Raises:
        UsageError: a field is wrong, or names another island than the head.
        CorruptError: a frame is wrong, or the body has extra bytes.
    """
    call = _call(head, body)
    body.finish()
    routes.require_claimed(head.claim, *routes.identities_of(call))
    return call


def _call(head: routes.RequestHead, body: Incoming) -> calls.Call:
    match head.route.name:
        case "join":
            return read_join(_json(body, "join"), island=head.island)
        case "join_unnamed":
            return read_join(_json(body, "join"), island=None)
        case "heartbeat":
            beat = BEAT.read(_json(body, "heartbeat"), "beat")
            _require_same("island", beat.island, head.island)
            return calls.HeartbeatCall(beat)
        case "publish":
            upload = parse_upload(head, body)
            return upload.call(body.body(upload.header))
        case "offer":
            return calls.OfferCall(_placed(head, body.header()))
        case "found":
            states = body.frames(max_frames=MAX_FRAGMENTS)
            return calls.FoundCall(head.island, head.incarnation, states, is_given=True)
        case "keep":
            part = body.rest(name="part of a constant", max_bytes=PART_BYTES)
            return calls.KeepCall(
                head.island, head.incarnation, head.digest, head.first, part
            )
        case "recover":
            outcomes, state = body.recovery()
            return recover_call(head, state, outcomes)
        case "agreed":
            return read_gathered(head, body)
        case "leave":
            return calls.LeaveCall(head.island, head.incarnation)
        case "outcome":
            return calls.OutcomeCall(head.fragment, head.round, head.wait_s, head.beat)
        case "state":
            return calls.StateCall(head.fragment)
        case other:
            raise AssertionError(f"the route {other} is no call")


def recover_call(
    head: routes.RequestHead, state: Frame, outcomes: tuple[Header, ...]
) -> calls.RecoverCall:
    """Return the call that uploads a lost state, with the receipts of its request."""
    _require_same("fragment", state.header.fragment, head.fragment)
    receipt = routes.read_receipt(head.headers, routes.STATE_RECEIPT_HEADER)
    receipts = routes.read_receipts(
        head.headers, routes.OUTCOME_RECEIPT_HEADER, max_receipts=MAX_OUTCOMES
    )
    return calls.RecoverCall(
        head.island,
        head.incarnation,
        replace(state, receipt=receipt),
        outcomes,
        tuple(receipts),
    )


def parse_upload(
    head: routes.RequestHead,
    body: Incoming,
    *,
    max_header_bytes: int = MAX_HEADER_BYTES,
) -> Upload:
    """Return the header and the beat of an upload; its body is not read yet."""
    beat = head.beat
    if beat is not None:
        _require_same("island", beat.island, head.island)
        routes.require_claimed(head.claim, routes.identity_of(beat))
    header = _placed(head, body.header(max_bytes=max_header_bytes))
    routes.require_claimed(head.claim, routes.identity_of(header))
    return Upload(header, beat)


def _placed(head: routes.RequestHead, header: Header) -> Header:
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
