"""Calls as HTTP requests and back.

An upload or a poll carries a heartbeat in one header, `Atoll-Beat`. A heartbeat above
`MAX_BEAT_BYTES`, because the run has very many fragments, is sent before it as a
separate call: see `apart`. A coordinator handles both alike.

Islands that have reduced a round among themselves send one body: the headers of their
updates; then, if they have agreed, the agreed frame and a voucher of each of them, in
the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import quote

from atoll.errors import UsageError
from atoll.exchange import calls
from atoll.exchange.api import request_head
from atoll.exchange.api.bodies import (
    MAX_LARGE_BYTES,
    MAX_OUTCOMES,
    Incoming,
    buffers_of,
    dump,
    load,
    require_target_name,
)
from atoll.exchange.api.messages import (
    BEAT,
    DATA,
    MAX_FRAGMENTS,
    ask_form,
    join_form,
    read_ask,
    read_join,
)
from atoll.exchange.api.request_head import RequestHead
from atoll.exchange.base import PART_BYTES, U8, Frame
from atoll.fields import shown
from atoll.protocol import Heartbeat
from atoll.routes import ROUTE, BodyKind
from atoll.wire import MAX_HEADER_BYTES, FrameKind, Header, pack
from atoll.wire.digests import Bytes, view_of
from atoll.wire.frame import VOUCHER_BYTES


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
            if len(_beat_text(beat)) > request_head.MAX_BEAT_BYTES:
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
    headers = {request_head.PROTOCOL_HEADER: str(request_head.PROTOCOL)}
    if run is not None:
        headers[request_head.RUN_HEADER] = quote(run, safe="")
    if proof is not None:
        headers[request_head.PROOF_HEADER] = proof
    return replace(sent, headers=headers | sent.headers)


def _request(call: calls.Call) -> EncodedRequest:
    match call:
        case calls.JoinCall(request):
            data = dump(join_form(call), name="join", max_bytes=MAX_LARGE_BYTES)
            if request.island is None:
                return _encode("join_unnamed", body=(data,))
            return _encode("join", request.island, body=(data,))
        case calls.HeartbeatCall(beat):
            data = dump(BEAT.write(beat), name="heartbeat", max_bytes=MAX_LARGE_BYTES)
            return _encode("heartbeat", beat.island, body=(data,))
        case calls.LeaveCall(island, incarnation):
            return _encode("leave", island, query={"incarnation": incarnation})
        case calls.OfferCall(header):
            return _encode("offer", *_position_of(header), body=(pack(header),))
        case calls.PublishCall(frame, beat):
            body = buffers_of(frame)
            return _encode("publish", *_position_of(frame.header), body=body, beat=beat)
        case calls.AgreedCall(fragment=fragment, round=round):
            body = gathered_parts(call)
            return _encode("agreed", fragment, round, body=body, query=_sender_of(call))
        case calls.OutcomeCall(fragment, round, wait_s, beat, has_body):
            query = {"wait_s": wait_s} if has_body else {"wait_s": wait_s, "body": 0}
            return _encode("outcome", fragment, round, beat=beat, query=query)
        case calls.StateCall(fragment):
            return _encode("state", fragment)
        case calls.FoundCall(states=states):
            body = tuple(part for state in states for part in buffers_of(state))
            return _encode("found", body=body, query=_sender_of(call))
        case calls.KeepCall(digest=digest, first=first, part=part):
            sender = _sender_of(call)
            return _encode(
                "keep", digest, body=(part,), query={**sender, "first": first}
            )
        case calls.DataCall(data=data_spec):
            data = dump(DATA.write(data_spec), name="data")
            return _encode("open_data", body=(data,), query=_sender_of(call))
        case calls.ClaimCall(ask):
            data = dump(ask_form(ask), name="claim")
            return _encode("claim", body=(data,), query=_sender_of(call))
        case calls.RecoverCall(state=state, outcomes=outcomes):
            body = (*map(pack, outcomes), *buffers_of(state))
            fragment = state.header.fragment
            sent = _encode("recover", fragment, body=body, query=_sender_of(call))
            return replace(sent, headers=sent.headers | _receipts_of(call))


def _position_of(header: Header) -> tuple[int, int, str]:
    return header.fragment, header.round, header.island


def _sender_of(
    call: (
        calls.AgreedCall
        | calls.FoundCall
        | calls.KeepCall
        | calls.DataCall
        | calls.ClaimCall
        | calls.RecoverCall
    ),
) -> dict[str, str | float]:
    return {"island": call.island, "incarnation": call.incarnation}


def _encode(
    name: str,
    *values: str | int,
    body: tuple[Bytes, ...] = (),
    beat: Heartbeat | None = None,
    query: Mapping[str, str | float] | None = None,
) -> EncodedRequest:
    """Return the request of a route; `values` are those of its path, in order.

    Raises:
        UsageError: an island's name is invalid, or the beat is too long.
    """
    route, headers = ROUTE[name], {}
    for value in (*values, *(query or {}).values()):
        if isinstance(value, str):
            require_target_name(value, "island")
    if route.body is not BodyKind.EMPTY:
        headers["Content-Type"] = route.body.value
    if beat is not None:
        text = _beat_text(beat)
        if len(text) > request_head.MAX_BEAT_BYTES:
            raise UsageError(
                f"A beat of {len(text)} bytes is above the limit of "
                f"{request_head.MAX_BEAT_BYTES} of a header. Send it first as a "
                "heartbeat: see `apart`."
            )
        headers[request_head.BEAT_HEADER] = text
    target = route.target(*values, **(query or {}))
    return EncodedRequest(route.method, target, headers, body)


def _receipts_of(call: calls.RecoverCall) -> dict[str, str]:
    headers = {}
    if call.state.receipt:
        headers[request_head.STATE_RECEIPT_HEADER] = call.state.receipt.hex()
    if call.receipts:
        receipts = ", ".join(receipt.hex() for receipt in call.receipts)
        headers[request_head.OUTCOME_RECEIPT_HEADER] = receipts
    return headers


def _beat_text(beat: Heartbeat) -> str:
    return dump(BEAT.write(beat), name="beat", max_bytes=MAX_LARGE_BYTES).decode(
        "ascii"
    )


def parse_call(head: RequestHead, body: Incoming) -> calls.Call:
    """Return the call that a request makes, its body read to the end.

    Raises:
        UsageError: a field is wrong, or names another island than the head.
        CorruptError: a frame is wrong, or the body has extra bytes.
    """
    call = _call(head, body)
    body.finish()
    request_head.require_claimed(head.claim, *request_head.identities_of(call))
    return call


def _call(head: RequestHead, body: Incoming) -> calls.Call:
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
        case "open_data":
            data = DATA.read(_json(body, "data"), "data")
            return calls.DataCall(head.island, head.incarnation, data)
        case "claim":
            form = _json(body, "claim")
            ask = read_ask(form, island=head.island, incarnation=head.incarnation)
            return calls.ClaimCall(ask)
        case "leave":
            return calls.LeaveCall(head.island, head.incarnation)
        case "outcome":
            return calls.OutcomeCall(
                head.fragment,
                head.round,
                head.wait_s,
                head.beat,
                has_body=head.has_body,
            )
        case "state":
            return calls.StateCall(head.fragment)
        case other:
            raise AssertionError(f"the route {other} is no call")


def recover_call(
    head: RequestHead, state: Frame, outcomes: tuple[Header, ...]
) -> calls.RecoverCall:
    """Return the call that uploads a lost state, with the receipts of its request."""
    _require_same("fragment", state.header.fragment, head.fragment)
    receipt = request_head.read_receipt(head.headers, request_head.STATE_RECEIPT_HEADER)
    receipts = request_head.read_receipts(
        head.headers, request_head.OUTCOME_RECEIPT_HEADER, max_receipts=MAX_OUTCOMES
    )
    return calls.RecoverCall(
        head.island,
        head.incarnation,
        replace(state, receipt=receipt),
        outcomes,
        tuple(receipts),
    )


def parse_upload(
    head: RequestHead,
    body: Incoming,
    *,
    max_header_bytes: int = MAX_HEADER_BYTES,
) -> Upload:
    """Return the header and the beat of an upload; its body is not read yet."""
    beat = head.beat
    if beat is not None:
        _require_same("island", beat.island, head.island)
        request_head.require_claimed(head.claim, request_head.identity_of(beat))
    header = _placed(head, body.header(max_bytes=max_header_bytes))
    request_head.require_claimed(head.claim, request_head.identity_of(header))
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


MAX_GATHERED = 4096
"""The most islands of one collective."""


def gathered_parts(call: calls.AgreedCall) -> tuple[Bytes, ...]:
    """Return the body of a call, without a copy of the agreed frame's."""
    heads = tuple(pack(header) for header in call.updates)
    if call.agreed is None:
        return heads
    return (*heads, *buffers_of(call.agreed), *call.vouchers)


def read_gathered(head: RequestHead, body: Incoming) -> calls.AgreedCall:
    """Return the call of a body that `gathered_parts` has written.

    Raises:
        UsageError: it has too few or too many headers, or those of another round.
        CorruptError: a header is wrong, or the body has extra bytes.
    """
    updates: list[Header] = []
    agreed: Frame | None = None
    vouchers: tuple[bytes, ...] = ()
    while body.left_bytes and agreed is None:
        header = body.header()
        _require_path(head, header)
        if header.kind is FrameKind.AGREED and updates:
            agreed = Frame(header, body.body(header))
            vouchers = _vouchers(body, len(updates))
        else:
            _require_update(header, len(updates))
            updates.append(header)
    if not updates:
        raise UsageError("The body has no update. Send the header of at least one.")
    return calls.AgreedCall(
        head.island, head.incarnation, tuple(updates), agreed, vouchers
    )


def _vouchers(body: Incoming, count: int) -> tuple[bytes, ...]:
    data = view_of(body.take(count * VOUCHER_BYTES)).tobytes()
    starts = range(0, len(data), VOUCHER_BYTES)
    return tuple(data[start : start + VOUCHER_BYTES] for start in starts)


def _require_path(head: RequestHead, header: Header) -> None:
    if (header.fragment, header.round) != (head.fragment, head.round):
        raise UsageError(
            f"The {header.name} does not belong to fragment {head.fragment}, round "
            f"{head.round}, which are in the path. Send it to its own path."
        )


def _require_update(header: Header, before: int) -> None:
    if header.kind is not FrameKind.UPDATE:
        raise UsageError(
            f"The {header.name} is in the position of an update's header. "
            "Send the updates' headers, then the agreed frame."
        )
    if before == MAX_GATHERED:
        raise UsageError(
            f"The body has more than {MAX_GATHERED} updates. "
            "Let fewer islands share a collective."
        )
