"""What went wrong, over HTTP: the same error on both sides, with the same words.

The code in the body says which error it is; the status is for everybody in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atoll import errors
from atoll.errors import AtollError, Refused, Unreachable, UsageError
from atoll.exchange.forms.fields import Field, require_table, table, text, whole
from atoll.exchange.forms.frames import Incoming
from atoll.exchange.forms.text import MAX_SMALL_BYTES, dump, load

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

    rule: Field[Any] = _COUNT
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

_WORDS: dict[str, Field[Any]] = {
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
        return _read(load(data, what="error"), status)
    except UsageError:
        return _stranger(status)


def _read(value: object, status: int) -> Exception:
    said = require_table(value, "error")
    failure = _BY_CODE.get(str(said.get("error")))
    extra = {failure.extra: failure.rule} if failure and failure.extra else {}
    form: Field[dict[str, Any]] = table(dict, _WORDS | extra)
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
