"""The target of a request, taken apart: what is not plain is refused, not repaired."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote_to_bytes

from atoll.http.problem import Problem

MAX_SEGMENT_BYTES: Final = 255
MAX_QUERY_KEYS: Final = 32

_ESCAPES = re.compile(r"%(?![0-9A-Fa-f]{2})")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f/\\]")


def parse(
    target: str, *, max_path_bytes: int
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the decoded segments of the path and the query.

    Raises:
        Problem: a segment is empty, `.` or `..`, holds a slash, a backslash or a
            control character, encoded or not, is too long or not UTF-8; a key of the
            query is given twice.
    """
    path, _, query = target.partition("?")
    if len(path) > max_path_bytes:
        raise Problem(
            414,
            "path",
            f"The path has {len(path)} bytes; {max_path_bytes} are allowed.",
        )
    if not path.startswith("/"):
        raise Problem(400, "path", "The target must be a path that starts with '/'.")
    raw = [] if path == "/" else path[1:].split("/")
    return tuple(_segment(each) for each in raw), dict(_pairs(query))


def _segment(raw: str) -> str:
    text = _decode(raw)
    if text in {"", ".", ".."} or _UNSAFE.search(text):
        raise Problem(400, "path", f"The path holds the segment {text!r}.")
    if len(text.encode()) > MAX_SEGMENT_BYTES:
        raise Problem(
            400, "path", f"A segment of the path is longer than {MAX_SEGMENT_BYTES}."
        )
    return text


def _pairs(query: str) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        key, _, value = (_decode(part.replace("+", " ")) for part in _parted(pair))
        if key in found or len(found) >= MAX_QUERY_KEYS:
            raise Problem(400, "query", f"The query holds {key!r} twice, or too much.")
        found[key] = value
    return found


def _parted(pair: str) -> tuple[str, str, str]:
    return pair.partition("=")


def _decode(raw: str) -> str:
    if _ESCAPES.search(raw):
        raise Problem(400, "escape", "A '%' is not followed by two hex digits.")
    try:
        return unquote_to_bytes(raw).decode("utf-8")
    except UnicodeDecodeError:
        raise Problem(400, "escape", "The target is not UTF-8.") from None
