"""The characters of names and reasons: one rule for every string on the wire.

The refused characters are listed here one by one, because Python's notion of printable
changes with its Unicode tables, and two readers must never disagree.
"""

from __future__ import annotations

import re
from functools import lru_cache

from atoll.errors import CorruptError

FETCH_AGAIN = "Discard these bytes and fetch the frame again."

MAX_NAME_BYTES = 128
MAX_REASON_BYTES = 512

# Control characters, and those that reorder or break a line on a terminal.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def name_fault(value: str, *, field: str) -> str | None:
    """Return the fault of `value` as the name of an island or run, if any.

    Names become parts of paths and object keys, hence no slash, dot or double dot.
    """
    if fault := _text_fault(value, field=field, max_bytes=MAX_NAME_BYTES):
        return fault
    if not value:
        return f"{field} must be a name of 1 to {MAX_NAME_BYTES} bytes, but is empty"
    if "/" in value or value in (".", ".."):
        return f"{field}={value!r} must not contain '/' nor be '.' or '..'"
    return None


def new_name_fault(value: str, *, field: str) -> str | None:
    """Return the fault of `value` as the name of an island that joins, if any.

    A backslash is refused too: no HTTP path may hold one, so such an island could join
    and would never be served. Frames and records that hold one are still read.
    """
    if "\\" in value:
        return f"{field}={value!r} must not contain a backslash"
    return name_fault(value, field=field)


def reason_fault(value: str, *, field: str) -> str | None:
    """Return the fault of `value` as a reason, if any; an empty reason is valid."""
    return _text_fault(value, field=field, max_bytes=MAX_REASON_BYTES)


def as_reason(text: str) -> str:
    """Return `text` as a reason that a frame can carry: printable, and cut to fit."""
    printable = _UNPRINTABLE.sub(" ", text).encode(errors="replace")
    return printable[:MAX_REASON_BYTES].decode(errors="ignore")


def decode_text(data: bytes, *, field: str) -> str:
    """Return `data` as text, or raise CorruptError if it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise CorruptError(
            f"{field} is not UTF-8 at its byte {exc.start}. {FETCH_AGAIN}"
        ) from exc


def _text_fault(value: str, *, field: str, max_bytes: int) -> str | None:
    if len(value) > _SHORT:
        return _judge_text(value, field, max_bytes)
    return _judge_short(value, field, max_bytes)


def _judge_text(value: str, field: str, max_bytes: int) -> str | None:
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError:
        return f"{field}={value!r} contains a surrogate, which UTF-8 cannot say"
    if size_bytes > max_bytes:
        return (
            f"{field} has {size_bytes} bytes of UTF-8, above the limit of {max_bytes}"
        )
    if unprintable := _UNPRINTABLE.search(value):
        return f"{field}={value!r} contains {unprintable[0]!r}, which is not printable"
    return None


# The same few names come with every frame; long texts are not worth keeping.
_SHORT = 64
_judge_short = lru_cache(maxsize=4096)(_judge_text)
