"""Replies as HTTP answers and back.

The position of an outcome rides in a header, `Atoll-Position`, so that the body is the
frame alone and can be fetched again from any byte. A position that is above
`MAX_POSITION_BYTES` follows the frame instead, and `Atoll-Position-Bytes` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from atoll.errors import CorruptError, SettingsError, Unreachable, UsageError
from atoll.exchange.base import Frame, Outcome
from atoll.exchange.calls import (
    AgreedCall,
    Call,
    FoundCall,
    HeartbeatCall,
    JoinCall,
    KeepCall,
    Kept,
    OfferCall,
    OutcomeCall,
    PublishCall,
    RecoverCall,
    Reply,
    StateCall,
)
from atoll.exchange.forms.failures import failure_parts, read_failure
from atoll.exchange.forms.fields import Field, choice, table, whole
from atoll.exchange.forms.frames import Incoming, buffers_of
from atoll.exchange.forms.heads import (
    OUTCOME_RECEIPT_HEADER,
    STATE_RECEIPT_HEADER,
    read_receipt,
    whole_text,
)
from atoll.exchange.forms.messages import POSITION, join_reply_form, read_join_reply
from atoll.exchange.forms.routes import Takes, methods_of
from atoll.exchange.forms.text import MAX_LARGE_BYTES, MAX_SMALL_BYTES, dump, load
from atoll.protocol import JoinReply, Position, Reception
from atoll.settings.rules import shown
from atoll.wire import pack
from atoll.wire.digests import Bytes, view_of
from atoll.wire.layout import DIGEST_BYTES

POSITION_HEADER, POSITION_BYTES_HEADER = "Atoll-Position", "Atoll-Position-Bytes"
MAX_POSITION_BYTES = 16 * 1024

_KEPT: Field[Kept] = table(Kept, {"bytes": whole()})
_RECEPTION: Field[dict[str, Reception]] = table(dict, {"reception": choice(Reception)})


@dataclass(frozen=True)
class Answer:
    """An answer that is ready to go."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: tuple[Bytes, ...] = ()
    """Buffers, one after the other; a frame's body is not copied."""

    @property
    def body_bytes(self) -> int:
        return sum(len(view_of(each)) for each in self.body)


def reply_parts(reply: Reply) -> Answer:
    """Return the answer that says this."""
    match reply:
        case None:
            return Answer(204)
        case JoinReply():
            return json_answer(join_reply_form(reply), what="answer to a joining")
        case Position():
            return json_answer(POSITION.write(reply), what="position")
        case Reception():
            return json_answer({"reception": reply.value}, what="reception")
        case Kept():
            return json_answer(_KEPT.write(reply), what="answer")
        case Frame(receipt=receipt):
            return _with_receipts(_frame_answer(reply), state=receipt)
        case Outcome(agreed, position, receipt):
            answer = _with_position(_frame_answer(agreed), position)
            return _with_receipts(answer, state=receipt, outcome=agreed.receipt)


def error_parts(error: Exception) -> Answer:
    """Return the answer that says what went wrong."""
    status, headers, body = failure_parts(error)
    return Answer(status, headers, (body,))


def nowhere_parts(target: str) -> Answer:
    """Return the answer for a path that is not there, or not with this method."""
    methods = methods_of(target)
    fact = "There is nothing at this path"
    if methods:
        fact = f"This path takes only {', '.join(methods)}"
    answer = error_parts(UsageError(f"{fact}. docs/http.md lists what there is."))
    allow = {"Allow": ", ".join(methods)} if methods else {}
    return Answer(405 if methods else 404, answer.headers | allow, answer.body)


def json_answer(value: object, *, what: str) -> Answer:
    """Return an answer whose body is JSON."""
    data = dump(value, what=what, most=MAX_LARGE_BYTES)
    return Answer(200, {"Content-Type": Takes.JSON.value}, (data,))


def _frame_answer(frame: Frame) -> Answer:
    """Return a frame, or its header alone when the body is kept no more."""
    packed = pack(frame.header)
    headers = {"ETag": f'"{packed[-DIGEST_BYTES:].hex()}"'}
    if frame.header.body_bytes and not len(frame.body):
        return Answer(200, headers | {"Content-Type": Takes.HEADER.value}, (packed,))
    body = buffers_of(frame)
    return Answer(200, headers | {"Content-Type": Takes.FRAME.value}, body)


def receipt_headers(*, state: bytes = b"", outcome: bytes = b"") -> dict[str, str]:
    """Return the headers that carry receipts; none for an empty one."""
    receipts = {STATE_RECEIPT_HEADER: state, OUTCOME_RECEIPT_HEADER: outcome}
    return {name: each.hex() for name, each in receipts.items() if each}


def _with_receipts(
    answer: Answer, *, state: bytes = b"", outcome: bytes = b""
) -> Answer:
    headers = receipt_headers(state=state, outcome=outcome)
    return Answer(answer.status, answer.headers | headers, answer.body)


def _with_position(answer: Answer, position: Position) -> Answer:
    said = dump(POSITION.write(position), what="position", most=MAX_LARGE_BYTES)
    if len(said) <= MAX_POSITION_BYTES:
        headers = answer.headers | {POSITION_HEADER: said.decode("ascii")}
        return Answer(answer.status, headers, answer.body)
    headers = answer.headers | {POSITION_BYTES_HEADER: str(len(said))}
    return Answer(answer.status, headers, (*answer.body, said))


def parse_reply(
    call: Call, status: int, headers: Mapping[str, str], body: Incoming
) -> Reply:
    """Return what was answered to a call, or raise what the coordinator raised.

    Header names are lower-case.

    Raises:
        CorruptError: the answer is in our form, and wrong.
        Unreachable: it is not in our form: it came from somebody in between.
        SettingsError: the run's settings are not those that this version knows.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if status not in (200, 204):
        raise read_failure(status, kind, body)
    try:
        reply = None if status == 204 else _read(call, kind, headers, body)
    except SettingsError:
        raise
    except UsageError as exc:
        raise CorruptError(f"The coordinator's answer is wrong: {exc}") from exc
    body.finish()
    return reply


def _read(call: Call, kind: str, headers: Mapping[str, str], body: Incoming) -> Reply:
    match call:
        case JoinCall() if kind == Takes.JSON:
            return read_join_reply(_json(body), "joined")
        case FoundCall() | RecoverCall() | HeartbeatCall() if kind == Takes.JSON:
            return POSITION.read(_json(body), "position")
        case OfferCall() | PublishCall() | AgreedCall() if kind == Takes.JSON:
            said = _json(body, most=MAX_SMALL_BYTES)
            return _RECEPTION.read(said, "answer")["reception"]
        case KeepCall() if kind == Takes.JSON:
            return _KEPT.read(_json(body, most=MAX_SMALL_BYTES), "kept")
        case OutcomeCall() if kind == Takes.JSON:
            return POSITION.read(_json(body), "position")
        case OutcomeCall() | AgreedCall() if kind == Takes.FRAME:
            return _outcome(body.frame(), headers, body)
        case OutcomeCall() | AgreedCall() if kind == Takes.HEADER:
            agreed = Frame(body.header(), np.empty(0, np.uint8))
            return _outcome(agreed, headers, body)
        case StateCall() if kind == Takes.FRAME:
            receipt = read_receipt(headers, STATE_RECEIPT_HEADER)
            return replace(body.frame(), receipt=receipt)
    raise Unreachable(
        f"A body of type {shown(kind)} came back, and not from a coordinator of Atoll. "
        "Check the address, and what stands in between."
    )


def _outcome(agreed: Frame, headers: Mapping[str, str], body: Incoming) -> Outcome:
    receipt = read_receipt(headers, OUTCOME_RECEIPT_HEADER)
    return Outcome(
        replace(agreed, receipt=receipt),
        _position(headers, body),
        read_receipt(headers, STATE_RECEIPT_HEADER),
    )


def _json(body: Incoming, *, most: int = MAX_LARGE_BYTES) -> object:
    return load(body.rest(what="answer", most=most), what="answer", most=most)


def _position(headers: Mapping[str, str], body: Incoming) -> Position:
    """Return the position that comes with an outcome, in a header or behind it."""
    said = headers.get(POSITION_HEADER.lower())
    if said is None:
        size = headers.get(POSITION_BYTES_HEADER.lower(), "0")
        most = whole_text(size, POSITION_BYTES_HEADER, high=MAX_LARGE_BYTES)
        data: Bytes = body.rest(what="position", most=most)
    else:
        data = said.encode(errors="replace")
    value = load(data, what="position", most=MAX_LARGE_BYTES)
    return POSITION.read(value, "position")
