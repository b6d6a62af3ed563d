"""Bodies of the HTTP API: frames in order, and JSON parsed without guessing.

The reader of a body gives `Incoming` a function that returns the next bytes: from a
connection, or from memory. A size that a header declares is checked against the rest of
the body before memory is reserved for it.

JSON that another process sends, or has stored:
Rule 1: size, depth and the number of values are counted in the raw bytes, before
        they are parsed.
Rule 2: a table has each key once, and a number is finite.
Rule 3: no message repeats the text itself, which may hold an island's key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np

from atoll import wire
from atoll.errors import CorruptError, UsageError
from atoll.exchange.base import U8, Frame
from atoll.fields import FieldLanguage, JsonField, shown
from atoll.wire.digests import Bytes, view_of
from atoll.wire.roster import FETCH_AGAIN, name_fault, new_name_fault

Read = Callable[[int], Bytes]
"""Returns exactly that many bytes of the body, or raises `Unreachable`."""

MAX_OUTCOMES = 2
"""An island keeps, and uploads, at most the last two outcomes of each fragment."""


class Incoming:
    """The body of one request or reply."""

    def __init__(
        self, read: Read, total_bytes: int, *, max_body_bytes: int = wire.MAX_BODY_BYTES
    ) -> None:
        self._read, self.left_bytes = read, total_bytes
        self._max_body_bytes = max_body_bytes

    @classmethod
    def of(cls, data: Bytes, *, max_body_bytes: int = wire.MAX_BODY_BYTES) -> Incoming:
        """Return a body that is in memory; frames taken from it are views."""
        view, end = view_of(data), 0

        def read(size: int) -> Bytes:
            nonlocal end
            start, end = end, end + size
            return view[start:end]

        return cls(read, len(view), max_body_bytes=max_body_bytes)

    def take(self, size_bytes: int) -> Bytes:
        """Return the next bytes.

        Raises:
            CorruptError: the body has fewer.
        """
        if size_bytes > self.left_bytes:
            raise CorruptError(
                f"{self.left_bytes} bytes are left of a body whose next part has "
                f"{size_bytes}. {FETCH_AGAIN}"
            )
        self.left_bytes -= size_bytes
        return self._read(size_bytes)

    def rest(self, *, name: str, max_bytes: int) -> Bytes:
        """Return all remaining bytes, unless they are above a limit."""
        if self.left_bytes > max_bytes:
            raise UsageError(
                f"The {name} has {self.left_bytes} bytes, above the limit of "
                f"{max_bytes}. docs/http.md states the limits."
            )
        return self.take(self.left_bytes)

    def header(self, *, max_bytes: int = wire.MAX_HEADER_BYTES) -> wire.Header:
        """Return the next header; its body, if one follows, is not taken yet.

        `max_bytes` is the most that a header of the fragment can have.
        """
        prefix = view_of(self.take(wire.PREFIX_BYTES)).tobytes()
        limits = {
            "max_header_bytes": min(
                max_bytes, wire.MAX_HEADER_BYTES, wire.PREFIX_BYTES + self.left_bytes
            ),
            "max_body_bytes": self._max_body_bytes,
        }
        length = wire.header_length(prefix, **limits)
        rest = view_of(self.take(length - wire.PREFIX_BYTES))
        return wire.unpack(prefix + rest.tobytes(), **limits)

    def body(self, header: wire.Header) -> U8:
        """Return the body that a header announces; it is not verified here."""
        view = view_of(self.take(header.body_bytes))
        return np.frombuffer(view, np.uint8) if len(view) else np.empty(0, np.uint8)

    def expect(self, header: wire.Header) -> None:
        """Return if exactly a header's body remains; the caller reads it elsewhere.

        Raises:
            CorruptError: the body has fewer bytes, or more.
        """
        self.leave(header)
        self.finish()

    def leave(self, header: wire.Header) -> None:
        """Return if a header's body can follow; the caller reads it elsewhere.

        Raises:
            CorruptError: the body has fewer bytes.
        """
        if header.body_bytes > self.left_bytes:
            self.take(header.body_bytes)
        self.left_bytes -= header.body_bytes

    def frame(self) -> Frame:
        """Return the next frame."""
        header = self.header()
        return Frame(header, self.body(header))

    def frames(self, *, max_frames: int) -> tuple[Frame, ...]:
        """Return every frame of the body."""
        frames: list[Frame] = []
        while self.left_bytes:
            if len(frames) == max_frames:
                raise UsageError(
                    f"The body has more than {max_frames} frames. Send fewer."
                )
            frames.append(self.frame())
        return tuple(frames)

    def recovery(self) -> tuple[tuple[wire.Header, ...], Frame]:
        """Return the headers of the last outcomes, and the state they lead to."""
        outcomes, header = self.recovery_headers()
        state = Frame(header, self.body(header))
        self.finish()
        return outcomes, state

    def recovery_headers(
        self, *, max_bytes: int = wire.MAX_HEADER_BYTES
    ) -> tuple[tuple[wire.Header, ...], wire.Header]:
        """Return the headers of the last outcomes, and that of the state after them.

        The state's body is not taken yet. No header may have more than `max_bytes`.
        """
        outcomes: list[wire.Header] = []
        header = self.header(max_bytes=max_bytes)
        while header.kind is wire.FrameKind.AGREED:
            if len(outcomes) == MAX_OUTCOMES:
                raise UsageError(
                    f"More than {MAX_OUTCOMES} outcomes precede a state. "
                    "Send the last ones only."
                )
            outcomes.append(header)
            header = self.header(max_bytes=max_bytes)
        return tuple(outcomes), header

    def finish(self) -> None:
        """Raise CorruptError unless all bytes were taken."""
        if self.left_bytes:
            raise CorruptError(
                f"{self.left_bytes} bytes follow the end of a body. {FETCH_AGAIN}"
            )


def buffers_of(frame: Frame) -> tuple[Bytes, ...]:
    """Return the buffers of a frame to send, without a copy of its body."""
    if len(frame.body) != frame.header.body_bytes:
        raise UsageError(
            f"a body of {len(frame.body)} bytes is not the one that the "
            f"{frame.header.name} was sealed for, of {frame.header.body_bytes}."
        )
    return (wire.pack(frame.header), view_of(frame.body))


MAX_SMALL_BYTES = 2**20
"""Limit of JSON whose size does not depend on the model."""

MAX_LARGE_BYTES = 2**23
"""Limit of JSON with a row for each tensor or each fragment."""

MAX_DEPTH = 8
MAX_LISTS = 2**18
"""Lists and tables in one text: an empty one takes 2 bytes here, and 56 in memory."""

MAX_COMMAS = 2**20
"""One less than values: a short number takes 4 bytes here, and 32 in memory."""

SEE = "docs/http.md describes the form; run the same version of Atoll on both sides."

# Possessive, and the last quote optional, so that hostile text costs one pass.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_OTHERS = bytes(set(range(256)) - _STEP.keys())


def dump(value: object, *, name: str, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
    """Return compact JSON in ASCII.

    Raises:
        UsageError: it is longer than a reader accepts.
    """
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(data) > max_bytes:
        raise UsageError(
            f"The {name} takes {len(data)} bytes of JSON, above the limit of "
            f"{max_bytes}. "
            "Use fewer tensors or fragments, or shorter names."
        )
    return data


def load(data: Bytes, *, name: str, max_bytes: int = MAX_SMALL_BYTES) -> object:
    """Return the value of JSON that another process sent.

    Raises:
        UsageError: it is too large, too deep or invalid; no other error is raised.
    """
    view = view_of(data)
    if len(view) > max_bytes:
        raise UsageError(
            f"The {name} has {len(view)} bytes, above the limit of {max_bytes}. {SEE}"
        )
    raw = view.tobytes()
    _judge_nesting(raw, name)
    try:
        value: object = json.loads(
            raw.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as exc:
        raise UsageError(
            f"The {name} is no JSON: {exc.msg} at character {exc.pos}. {SEE}"
        ) from exc
    except (ValueError, RecursionError) as exc:
        # Bytes that are not UTF-8, or an integer of thousands of digits.
        raise UsageError(f"The {name} is no JSON that can be read. {SEE}") from exc
    return value


def _judge_nesting(raw: bytes, name: str) -> None:
    """Count before parsing: the parser recurses, and a thread's stack may be small."""
    bare = _STRING.sub(b"", raw)
    brackets = bare.translate(None, _OTHERS)
    for unit, count, limit in (
        ("lists and tables", brackets.count(b"[") + brackets.count(b"{"), MAX_LISTS),
        ("commas", bare.count(b","), MAX_COMMAS),
    ):
        if count > limit:
            raise UsageError(
                f"The {name} has {count} {unit}, above the limit of {limit}. {SEE}"
            )
    depth = max(accumulate(map(_STEP.__getitem__, brackets)), default=0)
    if depth > MAX_DEPTH:
        raise UsageError(
            f"The {name} is nested {depth} deep, above the limit of {MAX_DEPTH}. {SEE}"
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise UsageError(f"The key {shown(key)} is in one table twice. {SEE}")
        fields[key] = value
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise UsageError(f"{name} is no number of JSON. {SEE}")


LANGUAGE = FieldLanguage(remedy=SEE)
"""The rules of every form that another process sends, or has stored."""

wrong, require_table = LANGUAGE.wrong, LANGUAGE.require_table
integer, number, text, hexed = (
    LANGUAGE.integer,
    LANGUAGE.number,
    LANGUAGE.text,
    LANGUAGE.hexed,
)
choice, option, maybe = LANGUAGE.choice, LANGUAGE.option, LANGUAGE.maybe
listed, row, table = LANGUAGE.listed, LANGUAGE.row, LANGUAGE.table
FLAG = LANGUAGE.flag()


def require_name(value: object, path: str) -> str:
    """Return the name of an island or run, if it is valid in a frame."""
    if not isinstance(value, str):
        raise wrong(path, value, "a name")
    if len(value) > 128:
        raise wrong(path, value, "a name of at most 128 bytes")
    if fault := name_fault(value, field=path):
        raise UsageError(f"{fault}. Choose another name.")
    return value


def require_target_name(value: object, path: str) -> str:
    """Return the name of an island, if it is valid in the path of a request."""
    name = require_name(value, path)
    if fault := new_name_fault(name, field=path):
        raise UsageError(f"{fault}. Choose another name.")
    return name


NAME = JsonField(str, require_name)
