"""Replies of the HTTP API, both ways: outcomes, states, errors, `GET /info`, constants.

The position of an outcome is in a header, `Atoll-Position`, so that the body is the
frame alone and can be fetched again from any byte. A position above
`MAX_POSITION_BYTES` follows the frame instead, and `Atoll-Position-Bytes` has its size.

An error is the same class with the same message on both sides: the code in the body
names it; the status is for proxies in between.

An island reads `GET /info` first, and compares versions there: `protocol` stays in its
position in every version, and nothing else is read when it differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from atoll import errors
from atoll.errors import (
    AtollError,
    CorruptError,
    Refused,
    SettingsError,
    Unreachable,
    UsageError,
)
from atoll.exchange.api.fields import (
    MAX_LARGE_BYTES,
    MAX_SMALL_BYTES,
    NAME,
    JsonField,
    choice,
    dump,
    listed,
    load,
    number,
    require_table,
    table,
    text,
    whole,
    words,
)
from atoll.exchange.api.frames import Incoming, buffers_of
from atoll.exchange.api.messages import (
    MAX_TENSORS,
    POSITION,
    SETTINGS_KEYS,
    TENSOR,
    join_reply_form,
    read_join_reply,
    read_settings,
    settings_form,
)
from atoll.exchange.api.routes import (
    MAX_BEAT_BYTES,
    MAX_WAIT_S,
    OUTCOME_RECEIPT_HEADER,
    PROTOCOL,
    STATE_RECEIPT_HEADER,
    BodyKind,
    methods_of,
    read_receipt,
    whole_text,
)
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
from atoll.protocol import JoinReply, Position, Reception
from atoll.protocol.model import ConstantCatalogue
from atoll.settings import RunSettings
from atoll.settings.rules import shown
from atoll.wire import MAX_HEADER_BYTES, pack
from atoll.wire.digests import Bytes, view_of
from atoll.wire.frame import DIGEST_BYTES

POSITION_HEADER, POSITION_BYTES_HEADER = "Atoll-Position", "Atoll-Position-Bytes"
MAX_POSITION_BYTES = 16 * 1024

_KEPT: JsonField[Kept] = table(Kept, {"bytes": whole()})
_RECEPTION: JsonField[dict[str, Reception]] = table(
    dict, {"reception": choice(Reception)}
)


@dataclass(frozen=True)
class EncodedReply:
    """An answer that is ready to go."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: tuple[Bytes, ...] = ()
    """Buffers, one after the other; a frame's body is not copied."""

    @property
    def body_bytes(self) -> int:
        return sum(len(view_of(each)) for each in self.body)


def reply_parts(reply: Reply) -> EncodedReply:
    """Return the answer that says this."""
    match reply:
        case None:
            return EncodedReply(204)
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


def error_parts(error: Exception) -> EncodedReply:
    """Return the answer that says what went wrong."""
    status, headers, body = failure_parts(error)
    return EncodedReply(status, headers, (body,))


def nowhere_parts(target: str) -> EncodedReply:
    """Return the answer for a path that is not there, or not with this method."""
    methods = methods_of(target)
    fact = "There is nothing at this path"
    if methods:
        fact = f"This path takes only {', '.join(methods)}"
    answer = error_parts(UsageError(f"{fact}. docs/http.md lists what there is."))
    allow = {"Allow": ", ".join(methods)} if methods else {}
    return EncodedReply(405 if methods else 404, answer.headers | allow, answer.body)


def json_answer(value: object, *, what: str) -> EncodedReply:
    """Return an answer whose body is JSON."""
    data = dump(value, what=what, most=MAX_LARGE_BYTES)
    return EncodedReply(200, {"Content-Type": BodyKind.JSON.value}, (data,))


def _frame_answer(frame: Frame) -> EncodedReply:
    """Return a frame, or its header alone when the body is kept no more."""
    packed = pack(frame.header)
    headers = {"ETag": f'"{packed[-DIGEST_BYTES:].hex()}"'}
    if frame.header.body_bytes and not len(frame.body):
        return EncodedReply(
            200, headers | {"Content-Type": BodyKind.HEADER.value}, (packed,)
        )
    body = buffers_of(frame)
    return EncodedReply(200, headers | {"Content-Type": BodyKind.FRAME.value}, body)


def receipt_headers(*, state: bytes = b"", outcome: bytes = b"") -> dict[str, str]:
    """Return the headers that carry receipts; none for an empty one."""
    receipts = {STATE_RECEIPT_HEADER: state, OUTCOME_RECEIPT_HEADER: outcome}
    return {name: each.hex() for name, each in receipts.items() if each}


def _with_receipts(
    answer: EncodedReply, *, state: bytes = b"", outcome: bytes = b""
) -> EncodedReply:
    headers = receipt_headers(state=state, outcome=outcome)
    return EncodedReply(answer.status, answer.headers | headers, answer.body)


def _with_position(answer: EncodedReply, position: Position) -> EncodedReply:
    said = dump(POSITION.write(position), what="position", most=MAX_LARGE_BYTES)
    if len(said) <= MAX_POSITION_BYTES:
        headers = answer.headers | {POSITION_HEADER: said.decode("ascii")}
        return EncodedReply(answer.status, headers, answer.body)
    headers = answer.headers | {POSITION_BYTES_HEADER: str(len(said))}
    return EncodedReply(answer.status, headers, (*answer.body, said))


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
        case JoinCall() if kind == BodyKind.JSON:
            return read_join_reply(_json(body), "joined")
        case FoundCall() | RecoverCall() | HeartbeatCall() if kind == BodyKind.JSON:
            return POSITION.read(_json(body), "position")
        case OfferCall() | PublishCall() | AgreedCall() if kind == BodyKind.JSON:
            said = _json(body, most=MAX_SMALL_BYTES)
            return _RECEPTION.read(said, "answer")["reception"]
        case KeepCall() if kind == BodyKind.JSON:
            return _KEPT.read(_json(body, most=MAX_SMALL_BYTES), "kept")
        case OutcomeCall() if kind == BodyKind.JSON:
            return POSITION.read(_json(body), "position")
        case OutcomeCall() | AgreedCall() if kind == BodyKind.FRAME:
            return _outcome(body.frame(), headers, body)
        case OutcomeCall() | AgreedCall() if kind == BodyKind.HEADER:
            agreed = Frame(body.header(), np.empty(0, np.uint8))
            return _outcome(agreed, headers, body)
        case StateCall() if kind == BodyKind.FRAME:
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


MAX_MESSAGE_BYTES = 8192
MAX_TARGET_BYTES = 512
TARGET = text(MAX_TARGET_BYTES, least=1)
"""Where a run has moved."""

_COUNT = whole()
RETRY_AFTER_S = 1


@dataclass(frozen=True)
class Failure:
    """One kind of error, and how it travels."""

    code: str
    kind: type[Exception]
    status: int
    extra: str = ""
    """The attribute that it has beside its message."""

    rule: JsonField[Any] = _COUNT
    """What that attribute may be."""


FAILURES = (
    Failure("usage", errors.UsageError, 400),
    Failure("settings", errors.SettingsError, 400),
    Failure("model", errors.ModelError, 409),
    Failure("non_finite", errors.NonFinite, 422, extra="index"),
    Failure("no_such_file", errors.NoSuchFile, 404),
    Failure("remote", errors.RemoteError, 503),
    Failure("unreachable", errors.Unreachable, 503),
    Failure("lease_lost", errors.LeaseLost, 410),
    Failure("outcome_lost", errors.OutcomeLost, 410),
    Failure("refused", errors.Refused, 409),
    Failure("moved", errors.RunMoved, 410, extra="target", rule=TARGET),
    Failure("name_known", errors.NameKnown, 409, extra="incarnation"),
    Failure("founding_lost", errors.FoundingLost, 409),
    Failure("disk", errors.DiskError, 503),
    Failure("disk_full", errors.DiskFull, 507),
    Failure("disk_denied", errors.DiskDenied, 503),
    Failure("corrupt", errors.CorruptError, 400),
    Failure("run_ended", errors.RunEnded, 410),
    Failure("error", errors.AtollError, 500),
)
_BY_KIND = {each.kind: each for each in FAILURES}
_BY_CODE = {each.code: each for each in FAILURES}

FAULT = "fault"
"""The code of an error that nobody meant to raise: a fault of the coordinator."""

_WORDS: dict[str, JsonField[Any]] = {
    "error": text(64, least=1),
    "message": text(MAX_MESSAGE_BYTES),
}


def failure_parts(error: Exception) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body for an error; a stranger's words stay here."""
    failure = _failure_of(error)
    if failure is None:
        said: dict[str, Any] = {
            "error": FAULT,
            "message": "The coordinator failed at this call. Its own log says why.",
        }
        status = 500
    else:
        said = {"error": failure.code, "message": _shortened(str(error))}
        status = failure.status
        if failure.extra:
            said[failure.extra] = getattr(error, failure.extra)
    headers = {"Content-Type": "application/json"}
    if status in (500, 503, 507):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return status, headers, dump(said, what="error")


def read_failure(status: int, content_type: str, body: Incoming) -> Exception:
    """Return the error that a reply stands for.

    A reply that is not in our form came from somebody in between, or from another
    program at this address: the coordinator is then unreachable.
    """
    if content_type != "application/json" or body.left_bytes > MAX_SMALL_BYTES:
        return _stranger(status)
    data = body.rest(what="error", most=MAX_SMALL_BYTES)
    try:
        return _read_error(load(data, what="error"), status)
    except UsageError:
        return _stranger(status)


def _read_error(value: object, status: int) -> Exception:
    said = require_table(value, "error")
    failure = _BY_CODE.get(str(said.get("error")))
    extra = {failure.extra: failure.rule} if failure and failure.extra else {}
    form: JsonField[dict[str, Any]] = table(dict, _WORDS | extra)
    found = form.read(said, "error")
    message = found["message"]
    if failure is None:
        kind = Unreachable if status >= 500 else Refused
        return kind(message)
    return failure.kind(message, **{key: found[key] for key in extra})


def _failure_of(error: Exception) -> Failure | None:
    """Return how an error travels: as its own kind, or as the nearest known above."""
    kinds = [kind for kind in type(error).__mro__ if kind in _BY_KIND]
    return _BY_KIND[kinds[0]] if kinds else None


def _shortened(message: str) -> str:
    data = message.encode(errors="replace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return data.decode()
    return data[: MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "..."


def _stranger(status: int) -> AtollError:
    return Unreachable(
        f"Status {status} came back, and not from a coordinator of Atoll. "
        "Check the address, and what stands in between."
    )


AUTHORITY = "run"
"""Who owns the settings: nobody else can be asked for them."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a coordinator takes at most."""

    body_bytes: int
    """Of a frame's body, as `limits.max_body_bytes` has it now."""

    header_bytes: int = MAX_HEADER_BYTES
    json_bytes: int = MAX_LARGE_BYTES
    beat_bytes: int = MAX_BEAT_BYTES
    wait_s: float = MAX_WAIT_S


@dataclass(frozen=True, kw_only=True)
class Info:
    """A run, before one takes part in it."""

    run: str
    version: str
    """Of Atoll, at the coordinator: for messages, never compared."""

    settings: RunSettings
    epoch: int
    model_fingerprint: str
    """Empty until the run is founded."""

    lease_s: float
    heartbeat_s: float
    limits: Limits


_LIMITS = table(
    Limits,
    {
        "body_bytes": whole(),
        "header_bytes": whole(),
        "json_bytes": whole(),
        "beat_bytes": whole(),
        "wait_s": number(),
    },
)
_PLAIN: dict[str, JsonField[Any]] = {
    "run": NAME,
    "version": text(64, least=1),
    "epoch": whole(),
    "model_fingerprint": text(64),
    "lease_s": number(),
    "heartbeat_s": number(),
    "limits": _LIMITS,
}
_SAID: JsonField[dict[str, Any]] = table(
    dict,
    {
        "protocol": whole(),
        "settings_authority": words(AUTHORITY),
        "fingerprint": text(128),
        **_PLAIN,
    },
)


def info_form(info: Info) -> dict[str, Any]:
    """Return the whole form: every setting is in it, and nothing is null."""
    said = {key: rule.write(getattr(info, key)) for key, rule in _PLAIN.items()}
    return {
        "protocol": PROTOCOL,
        "settings_authority": AUTHORITY,
        **said,
        "fingerprint": info.settings.fingerprint,
        **settings_form(info.settings),
    }


def info_parts(info: Info) -> EncodedReply:
    """Return the answer to `GET /info`."""
    return json_answer(info_form(info), what="info")


def parse_info(data: Bytes) -> Info:
    """Return what a run says of itself.

    Raises:
        SettingsError: a setting is missing, unknown here or means something else; it
            is named.
        UsageError: this is no coordinator, or one that speaks another protocol.
    """
    said = dict(require_table(load(data, what="info", most=MAX_LARGE_BYTES), "info"))
    _require_protocol(said)
    settings = read_settings(
        {key: said.pop(key) for key in SETTINGS_KEYS & said.keys()}, "info"
    )
    found = _SAID.read(said, "info")
    _require_fingerprint(settings, found["fingerprint"])
    info = Info(settings=settings, **{key: found[key] for key in _PLAIN})
    if not 0.0 < info.heartbeat_s < info.lease_s:
        raise UsageError(
            f"info.heartbeat_s={info.heartbeat_s} must be above 0 and below "
            f"info.lease_s={info.lease_s}. Run a coordinator that is not altered."
        )
    return info


def _require_protocol(said: dict[str, Any]) -> None:
    spoken = said.get("protocol")
    if spoken is None:
        raise UsageError(
            "What answers at this address does not say which protocol it speaks: it is "
            "no coordinator of Atoll. Check the address."
        )
    if spoken != PROTOCOL or type(spoken) is not int:
        raise UsageError(
            f"The coordinator speaks protocol {shown(spoken)} (Atoll "
            f"{shown(said.get('version'))}), and this island {PROTOCOL}. "
            "Run the same version of Atoll on both sides."
        )


def _require_fingerprint(settings: RunSettings, said: str) -> None:
    """Refuse settings that look the same and are not: a default that has moved."""
    if settings.fingerprint != said:
        raise SettingsError(
            f"The run's settings have fingerprint {shown(said)} at the coordinator and "
            f"{settings.fingerprint} here: they mean something else to this version of "
            "Atoll. Run the same version on both sides."
        )


DIGESTS: JsonField[tuple[str, ...]] = listed(text(128), most=MAX_TENSORS)
CATALOGUE: JsonField[ConstantCatalogue] = table(
    ConstantCatalogue, {"constants": listed(TENSOR, most=MAX_TENSORS), "kept": DIGESTS}
)


def catalogue_parts(catalogue: ConstantCatalogue) -> EncodedReply:
    """Return the answer that lists constants."""
    return json_answer(CATALOGUE.write(catalogue), what="constants")


def parse_catalogue(data: Bytes) -> ConstantCatalogue:
    """Return the list that a coordinator has told.

    Raises:
        UsageError: it is none.
    """
    return CATALOGUE.read(load(data, what="constants", most=MAX_LARGE_BYTES), "answer")
