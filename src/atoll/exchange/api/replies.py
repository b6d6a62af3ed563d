"""Replies of the HTTP API, both ways: outcomes, states, errors, `GET /info`, constants.

The position of an outcome is in a header, `Atoll-Position`, so that the body is the
frame alone and can be fetched again from any byte. A position above
`MAX_POSITION_BYTES` follows the frame instead, and `Atoll-Position-Bytes` has its size.

An error is the same class with the same message on both sides: the code in the body
names it; the status is for proxies in between.

An island reads `GET /info` first, and compares versions there: `protocol` keeps its
key in every version, and nothing else is read when it differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from atoll import errors
from atoll.data import Claim, DataSpec
from atoll.errors import (
    AtollError,
    CorruptError,
    Refused,
    SettingsError,
    Unreachable,
    UsageError,
)
from atoll.exchange import calls
from atoll.exchange.api import request_head
from atoll.exchange.api.bodies import (
    MAX_LARGE_BYTES,
    MAX_SMALL_BYTES,
    NAME,
    Incoming,
    buffers_of,
    choice,
    dump,
    integer,
    listed,
    load,
    number,
    option,
    require_table,
    table,
    text,
)
from atoll.exchange.api.messages import (
    CLAIM,
    DATA,
    MAX_TENSORS,
    POSITION,
    SETTINGS_KEYS,
    TENSOR,
    join_reply_form,
    read_join_reply,
    read_settings,
    settings_form,
)
from atoll.exchange.base import Frame, Outcome
from atoll.fields import JsonField, shown
from atoll.protocol import JoinReply, Position, Reception
from atoll.protocol.model import ConstantCatalogue
from atoll.routes import BodyKind, methods_of
from atoll.settings import RunSettings
from atoll.wire import MAX_HEADER_BYTES, pack
from atoll.wire.digests import Bytes, view_of
from atoll.wire.frame import DIGEST_BYTES

POSITION_HEADER, POSITION_BYTES_HEADER = "Atoll-Position", "Atoll-Position-Bytes"
MAX_POSITION_BYTES = 16 * 1024

_KEEP_REPLY: JsonField[calls.KeepReply] = table(calls.KeepReply, {"bytes": integer()})
_RECEPTION: JsonField[dict[str, Reception]] = table(
    dict, {"reception": choice(Reception)}
)


@dataclass(frozen=True)
class EncodedReply:
    """The status, headers and body of a reply."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: tuple[Bytes, ...] = ()
    """Buffers, one after the other; a frame's body is not copied."""

    @property
    def body_bytes(self) -> int:
        return sum(len(view_of(part)) for part in self.body)


def reply_parts(reply: calls.Reply) -> EncodedReply:
    """Return the HTTP reply for a reply to a call."""
    match reply:
        case None:
            return EncodedReply(204)
        case JoinReply():
            return json_answer(join_reply_form(reply), name="answer to a join")
        case Position():
            return json_answer(POSITION.write(reply), name="position")
        case Reception():
            return json_answer({"reception": reply.value}, name="reception")
        case DataSpec():
            return json_answer(DATA.write(reply), name="data")
        case Claim():
            return json_answer(CLAIM.write(reply), name="claim")
        case calls.KeepReply():
            return json_answer(_KEEP_REPLY.write(reply), name="answer")
        case Frame(receipt=receipt):
            return _with_receipts(_frame_answer(reply), state=receipt)
        case Outcome(agreed, position, receipt):
            answer = _with_position(_frame_answer(agreed), position)
            return _with_receipts(answer, state=receipt, outcome=agreed.receipt)


def not_found_reply(segments: tuple[str, ...]) -> EncodedReply:
    """Return the reply for a path that does not exist, or not with this method."""
    methods = methods_of(segments)
    fact = "There is nothing at this path"
    if methods:
        fact = f"This path takes only {', '.join(methods)}"
    answer = error_parts(UsageError(f"{fact}. docs/http.md lists the paths."))
    allow = {"Allow": ", ".join(methods)} if methods else {}
    return EncodedReply(405 if methods else 404, answer.headers | allow, answer.body)


def json_answer(value: object, *, name: str) -> EncodedReply:
    """Return a reply whose body is JSON."""
    data = dump(value, name=name, max_bytes=MAX_LARGE_BYTES)
    return EncodedReply(200, {"Content-Type": BodyKind.JSON.value}, (data,))


def _frame_answer(frame: Frame) -> EncodedReply:
    """Return a frame, or only its header if the run no longer has the body."""
    packed = pack(frame.header)
    has_body = len(frame.body) or not frame.header.body_bytes
    kind = BodyKind.FRAME if has_body else BodyKind.HEADER
    etag = f'"{packed[-DIGEST_BYTES:].hex()}"'
    body = buffers_of(frame) if has_body else (packed,)
    return EncodedReply(200, {"ETag": etag, "Content-Type": kind.value}, body)


def receipt_headers(*, state: bytes = b"", outcome: bytes = b"") -> dict[str, str]:
    """Return the headers with receipts; none for an empty receipt."""
    receipts = {
        request_head.STATE_RECEIPT_HEADER: state,
        request_head.OUTCOME_RECEIPT_HEADER: outcome,
    }
    return {name: receipt.hex() for name, receipt in receipts.items() if receipt}


def _with_receipts(
    answer: EncodedReply, *, state: bytes = b"", outcome: bytes = b""
) -> EncodedReply:
    receipts = receipt_headers(state=state, outcome=outcome)
    return replace(answer, headers=answer.headers | receipts)


def _with_position(answer: EncodedReply, position: Position) -> EncodedReply:
    data = dump(POSITION.write(position), name="position", max_bytes=MAX_LARGE_BYTES)
    if len(data) <= MAX_POSITION_BYTES:
        header = {POSITION_HEADER: data.decode("ascii")}
        return replace(answer, headers=answer.headers | header)
    header = {POSITION_BYTES_HEADER: str(len(data))}
    headers = answer.headers | header
    return replace(answer, headers=headers, body=(*answer.body, data))


def parse_reply(
    call: calls.Call, status: int, headers: Mapping[str, str], body: Incoming
) -> calls.Reply:
    """Return the reply to a call, or raise the error that the coordinator raised.

    Header names are lower-case.

    Raises:
        CorruptError: the reply is in our form, and wrong.
        Unreachable: it is not in our form: a proxy or another program sent it.
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


def _read(
    call: calls.Call, kind: str, headers: Mapping[str, str], body: Incoming
) -> calls.Reply:
    match call:
        case calls.JoinCall() if kind == BodyKind.JSON:
            return read_join_reply(_json(body), "joined")
        case calls.FoundCall() | calls.RecoverCall() | calls.HeartbeatCall() if (
            kind == BodyKind.JSON
        ):
            return POSITION.read(_json(body), "position")
        case calls.OfferCall() | calls.PublishCall() | calls.AgreedCall() if (
            kind == BodyKind.JSON
        ):
            form = _json(body, max_bytes=MAX_SMALL_BYTES)
            return _RECEPTION.read(form, "answer")["reception"]
        case calls.KeepCall() if kind == BodyKind.JSON:
            return _KEEP_REPLY.read(_json(body, max_bytes=MAX_SMALL_BYTES), "kept")
        case calls.DataCall() if kind == BodyKind.JSON:
            return DATA.read(_json(body, max_bytes=MAX_SMALL_BYTES), "data")
        case calls.ClaimCall() if kind == BodyKind.JSON:
            return CLAIM.read(_json(body), "claim")
        case calls.OutcomeCall() if kind == BodyKind.JSON:
            return POSITION.read(_json(body), "position")
        case calls.OutcomeCall() | calls.AgreedCall() if kind == BodyKind.FRAME:
            return _outcome(body.frame(), headers, body)
        case calls.OutcomeCall() | calls.AgreedCall() if kind == BodyKind.HEADER:
            agreed = Frame(body.header(), np.empty(0, np.uint8))
            return _outcome(agreed, headers, body)
        case calls.StateCall() if kind == BodyKind.FRAME:
            receipt = request_head.read_receipt(
                headers, request_head.STATE_RECEIPT_HEADER
            )
            return replace(body.frame(), receipt=receipt)
    raise Unreachable(
        f"A body of type {shown(kind)} came back, and not from a coordinator of Atoll. "
        "Check the address, and any proxy on the route."
    )


def _outcome(agreed: Frame, headers: Mapping[str, str], body: Incoming) -> Outcome:
    receipt = request_head.read_receipt(headers, request_head.OUTCOME_RECEIPT_HEADER)
    return Outcome(
        replace(agreed, receipt=receipt),
        _position(headers, body),
        request_head.read_receipt(headers, request_head.STATE_RECEIPT_HEADER),
    )


def _json(body: Incoming, *, max_bytes: int = MAX_LARGE_BYTES) -> object:
    data = body.rest(name="answer", max_bytes=max_bytes)
    return load(data, name="answer", max_bytes=max_bytes)


def _position(headers: Mapping[str, str], body: Incoming) -> Position:
    """Return the position of an outcome, from a header or from the end of the body."""
    text = headers.get(POSITION_HEADER.lower())
    if text is None:
        size = headers.get(POSITION_BYTES_HEADER.lower(), "0")
        size_bytes = request_head.whole_text(
            size, POSITION_BYTES_HEADER, high=MAX_LARGE_BYTES
        )
        data: Bytes = body.rest(name="position", max_bytes=size_bytes)
    else:
        data = text.encode(errors="replace")
    value = load(data, name="position", max_bytes=MAX_LARGE_BYTES)
    return POSITION.read(value, "position")


MAX_MESSAGE_BYTES = 8192
MAX_TARGET_BYTES = 512
TARGET = text(MAX_TARGET_BYTES, min_bytes=1)
"""The URL of a run that has moved."""

_COUNT = integer()
RETRY_AFTER_S = 1


@dataclass(frozen=True)
class Failure:
    """The code and the status of one class of errors."""

    code: str
    kind: type[Exception]
    status: int
    extra: str = ""
    """Its attribute besides the message, if any."""

    rule: JsonField[Any] = _COUNT
    """The rule of that attribute."""


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
_BY_KIND = {failure.kind: failure for failure in FAILURES}
_BY_CODE = {failure.code: failure for failure in FAILURES}

FAULT = "fault"
"""The code of an unexpected exception: a fault of the coordinator."""

_ERROR: dict[str, JsonField[Any]] = {
    "error": text(64, min_bytes=1),
    "message": text(MAX_MESSAGE_BYTES),
}


def error_parts(error: Exception) -> EncodedReply:
    """Return the HTTP reply for an error; the text of a foreign one is not sent."""
    failure = _failure_of(error)
    if failure is None:
        form: dict[str, Any] = {
            "error": FAULT,
            "message": "The coordinator failed at this call. Its log has the reason.",
        }
        status = 500
    else:
        form = {"error": failure.code, "message": _shortened(str(error))}
        status = failure.status
        if failure.extra:
            form[failure.extra] = getattr(error, failure.extra)
    headers = {"Content-Type": BodyKind.JSON.value}
    if status in (500, 503, 507):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return EncodedReply(status, headers, (dump(form, name="error"),))


def read_failure(status: int, content_type: str, body: Incoming) -> Exception:
    """Return the error of a reply.

    A reply that is not in our form came from a proxy, or from another program at this
    address: the coordinator is then unreachable.
    """
    if content_type != "application/json" or body.left_bytes > MAX_SMALL_BYTES:
        return _stranger(status)
    data = body.rest(name="error", max_bytes=MAX_SMALL_BYTES)
    try:
        return _read_error(load(data, name="error"), status)
    except UsageError:
        return _stranger(status)


def _read_error(value: object, status: int) -> Exception:
    form = require_table(value, "error")
    failure = _BY_CODE.get(str(form.get("error")))
    extra = {failure.extra: failure.rule} if failure and failure.extra else {}
    rule: JsonField[dict[str, Any]] = table(dict, _ERROR | extra)
    fields = rule.read(form, "error")
    message = fields["message"]
    if failure is None:
        kind = Unreachable if status >= 500 else Refused
        return kind(message)
    return failure.kind(message, **{key: fields[key] for key in extra})


def _failure_of(error: Exception) -> Failure | None:
    """Return the row of an error's class, or of its nearest base class in the table."""
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
        "Check the address, and any proxy on the route."
    )


AUTHORITY = "run"
"""The owner of the settings."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a coordinator."""

    body_bytes: int
    """Limit of a frame's body: the present `limits.max_body_bytes`."""

    header_bytes: int = MAX_HEADER_BYTES
    json_bytes: int = MAX_LARGE_BYTES
    beat_bytes: int = request_head.MAX_BEAT_BYTES
    wait_s: float = request_head.MAX_WAIT_S


@dataclass(frozen=True, kw_only=True)
class Info:
    """The reply to `GET /info`: a run, as an island sees it before it joins."""

    run: str
    version: str
    """The coordinator's version of Atoll: for messages, never compared."""

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
        "body_bytes": integer(),
        "header_bytes": integer(),
        "json_bytes": integer(),
        "beat_bytes": integer(),
        "wait_s": number(),
    },
)
_PLAIN: dict[str, JsonField[Any]] = {
    "run": NAME,
    "version": text(64, min_bytes=1),
    "epoch": integer(),
    "model_fingerprint": text(64),
    "lease_s": number(),
    "heartbeat_s": number(),
    "limits": _LIMITS,
}
_INFO: JsonField[dict[str, Any]] = table(
    dict,
    {
        "protocol": integer(),
        "settings_authority": option(AUTHORITY),
        "fingerprint": text(128),
        **_PLAIN,
    },
)


def info_form(info: Info) -> dict[str, Any]:
    """Return the JSON of an info: it has every setting, and no null."""
    form = {key: rule.write(getattr(info, key)) for key, rule in _PLAIN.items()}
    return {
        "protocol": request_head.PROTOCOL,
        "settings_authority": AUTHORITY,
        **form,
        "fingerprint": info.settings.fingerprint,
        **settings_form(info.settings),
    }


def info_parts(info: Info) -> EncodedReply:
    """Return the reply to `GET /info`."""
    return json_answer(info_form(info), name="info")


def parse_info(data: Bytes) -> Info:
    """Return the info of a run.

    Raises:
        SettingsError: a setting is missing, unknown here or means something else; it
            is named.
        UsageError: this is no coordinator, or one with another protocol.
    """
    form = dict(
        require_table(load(data, name="info", max_bytes=MAX_LARGE_BYTES), "info")
    )
    _require_protocol(form)
    settings = read_settings(
        {key: form.pop(key) for key in SETTINGS_KEYS & form.keys()}, "info"
    )
    fields = _INFO.read(form, "info")
    _require_fingerprint(settings, fields["fingerprint"])
    info = Info(settings=settings, **{key: fields[key] for key in _PLAIN})
    if not 0.0 < info.heartbeat_s < info.lease_s:
        raise UsageError(
            f"info.heartbeat_s={info.heartbeat_s} must be above 0 and below "
            f"info.lease_s={info.lease_s}. Run a coordinator that is not altered."
        )
    return info


def _require_protocol(form: dict[str, Any]) -> None:
    protocol = form.get("protocol")
    if protocol is None:
        raise UsageError(
            "The server at this address does not state its protocol: it is no "
            "coordinator of Atoll. Check the address."
        )
    if protocol != request_head.PROTOCOL or type(protocol) is not int:
        raise UsageError(
            f"The coordinator speaks protocol {shown(protocol)} (Atoll "
            f"{shown(form.get('version'))}), and this island {request_head.PROTOCOL}. "
            "Run the same version of Atoll on both sides."
        )


def _require_fingerprint(settings: RunSettings, remote: str) -> None:
    """Refuse equal values with another meaning, e.g. after a default has changed."""
    if settings.fingerprint != remote:
        raise SettingsError(
            f"The run's settings have fingerprint {shown(remote)} at the coordinator "
            f"and {settings.fingerprint} here: they mean something else to this "
            "version of Atoll. Run the same version on both sides."
        )


DIGESTS: JsonField[tuple[str, ...]] = listed(text(128), max_items=MAX_TENSORS)
CATALOGUE: JsonField[ConstantCatalogue] = table(
    ConstantCatalogue,
    {"constants": listed(TENSOR, max_items=MAX_TENSORS), "kept": DIGESTS},
)


def catalogue_parts(catalogue: ConstantCatalogue) -> EncodedReply:
    """Return the reply that lists constants."""
    return json_answer(CATALOGUE.write(catalogue), name="constants")


def parse_catalogue(data: Bytes) -> ConstantCatalogue:
    """Return the list that a coordinator has sent.

    Raises:
        UsageError: it is none.
    """
    return CATALOGUE.read(
        load(data, name="constants", max_bytes=MAX_LARGE_BYTES), "answer"
    )
