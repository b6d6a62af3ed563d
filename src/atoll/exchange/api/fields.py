"""JSON of the HTTP API: parsed without guessing, and read and written field by field.

A field turns a value into JSON, and checks a value from JSON: its type first, then its
bounds. A message names the field from the outside in (`beat.holds[3].digest`), the
value, shortened, and the rule.

Rule 1: size, depth and the number of values are counted in the raw bytes, before
        anything is made of them.
Rule 2: a key stands in a table once, and a number is finite.
Rule 3: no message repeats the text itself, which may hold an island's key.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, Generic, NoReturn, TypeVar, cast

from atoll.errors import UsageError
from atoll.settings.rules import shown
from atoll.wire.digests import Bytes, view_of
from atoll.wire.text import name_fault, new_name_fault

MAX_SMALL_BYTES = 2**20
"""Of JSON whose size does not depend on the model."""

MAX_LARGE_BYTES = 2**23
"""Of JSON with a row for each tensor or each fragment."""

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


def dump(value: object, *, what: str, most: int = MAX_SMALL_BYTES) -> bytes:
    """Return compact JSON in ASCII.

    Raises:
        UsageError: it is longer than a reader would take.
    """
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(data) > most:
        raise UsageError(
            f"The {what} takes {len(data)} bytes of JSON, above the limit of {most}. "
            "Use fewer tensors or fragments, or shorter names."
        )
    return data


def load(data: Bytes, *, what: str, most: int = MAX_SMALL_BYTES) -> object:
    """Return the value that JSON from outside stands for.

    Raises:
        UsageError: it is too large or too deep, or no JSON; nothing else is raised.
    """
    view = view_of(data)
    if len(view) > most:
        raise UsageError(
            f"The {what} has {len(view)} bytes, above the limit of {most}. {SEE}"
        )
    raw = view.tobytes()
    _judge_nesting(raw, what)
    try:
        value: object = json.loads(
            raw.decode(), object_pairs_hook=_once, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as exc:
        raise UsageError(
            f"The {what} is no JSON: {exc.msg} at character {exc.pos}. {SEE}"
        ) from exc
    except (ValueError, RecursionError) as exc:
        # Bytes that are not UTF-8, or an integer of thousands of digits.
        raise UsageError(f"The {what} is no JSON that can be read. {SEE}") from exc
    return value


def _judge_nesting(raw: bytes, what: str) -> None:
    """Count before parsing: the parser recurses, and a thread's stack may be small."""
    bare = _STRING.sub(b"", raw)
    brackets = bare.translate(None, _OTHERS)
    for what_counts, count, most in (
        ("lists and tables", brackets.count(b"[") + brackets.count(b"{"), MAX_LISTS),
        ("commas", bare.count(b","), MAX_COMMAS),
    ):
        if count > most:
            raise UsageError(
                f"The {what} has {count} {what_counts}, above the limit of {most}. "
                f"{SEE}"
            )
    depth = max(accumulate(map(_STEP.__getitem__, brackets)), default=0)
    if depth > MAX_DEPTH:
        raise UsageError(
            f"The {what} is nested {depth} deep, above the limit of {MAX_DEPTH}. {SEE}"
        )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise UsageError(f"The key {shown(key)} stands twice in one table. {SEE}")
        found[key] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise UsageError(f"{name} is no number that JSON can say. {SEE}")


U64_MAX = 2**64 - 1
_HEX = re.compile("(?:[0-9a-f]{2})*")

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True)
class JsonField(Generic[T]):
    """How one kind of value is written and read."""

    write: Callable[[T], object]
    read: Callable[[object, str], T]
    """Takes what JSON said and the field's name for a message; raises UsageError."""


def wrong(where: str, value: object, needed: str) -> UsageError:
    """Return the error for a value that a field cannot take."""
    return UsageError(f"{where}={shown(value)} must be {needed}. {SEE}")


def whole(low: int = 0, high: int = U64_MAX) -> JsonField[int]:
    """Return the rule for a whole number; true and 1.0 are none."""

    def read(value: object, where: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise wrong(where, value, f"a whole number from {low} to {high}")
        return value

    return JsonField(int, read)


def number(low: float = 0.0, high: float = sys.float_info.max) -> JsonField[float]:
    """Return the rule for a finite number in a closed range."""

    def read(value: object, where: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and low <= cast(float, value) <= high):
            raise wrong(where, value, f"a finite number from {low} to {high}")
        return float(cast(float, value))

    return JsonField(float, read)


def _read_flag(value: object, where: str) -> bool:
    if type(value) is not bool:
        raise wrong(where, value, "true or false")
    return value


FLAG = JsonField(bool, _read_flag)


def text(most: int, *, least: int = 0) -> JsonField[str]:
    """Return the rule for text, by its bytes in UTF-8."""

    def read(value: object, where: str) -> str:
        if not isinstance(value, str):
            raise wrong(where, value, "text")
        try:
            size_bytes = len(value.encode())
        except UnicodeEncodeError as exc:
            raise wrong(where, value, "text without surrogates") from exc
        if not least <= size_bytes <= most:
            raise wrong(where, value, f"{least} to {most} bytes of UTF-8")
        return value

    return JsonField(str, read)


def require_name(value: object, where: str) -> str:
    """Return the name of an island or run, as frames may carry it."""
    if not isinstance(value, str):
        raise wrong(where, value, "a name")
    if len(value) > 128:
        raise wrong(where, value, "a name of at most 128 bytes")
    if fault := name_fault(value, field=where):
        raise UsageError(f"{fault}. Choose another name.")
    return value


def require_target_name(value: object, where: str) -> str:
    """Return the name of an island that can stand in the path of a request."""
    name = require_name(value, where)
    if fault := new_name_fault(name, field=where):
        raise UsageError(f"{fault}. Choose another name.")
    return name


NAME = JsonField(str, require_name)


def choice(kind: type[E]) -> JsonField[E]:
    """Return the rule for one of a few words."""
    words = {str(each): each for each in kind}

    def read(value: object, where: str) -> E:
        if not isinstance(value, str) or value not in words:
            raise wrong(where, value, f"one of {', '.join(words)}")
        return words[value]

    return JsonField(str, read)


def words(*known: str) -> JsonField[str]:
    """Return the rule for one of a few words that have no type of their own."""

    def read(value: object, where: str) -> str:
        if not isinstance(value, str) or value not in known:
            raise wrong(where, value, f"one of {', '.join(known)}")
        return value

    return JsonField(str, read)


def hexed(least: int, most: int, *, is_secret: bool = False) -> JsonField[bytes]:
    """Return the rule for bytes in lower-case hex; a message shows no secret ones."""

    def read(value: object, where: str) -> bytes:
        is_short = isinstance(value, str) and 2 * least <= len(value) <= 2 * most
        if is_short and _HEX.fullmatch(cast(str, value)):
            return bytes.fromhex(cast(str, value))
        seen = "<not shown>" if is_secret else value
        raise wrong(where, seen, f"{least} to {most} bytes in lower-case hex")

    return JsonField(bytes.hex, read)


def maybe(field: JsonField[T]) -> JsonField[T | None]:
    """Return the rule for what another rule takes, or null."""
    return JsonField(
        lambda value: None if value is None else field.write(value),
        lambda value, where: None if value is None else field.read(value, where),
    )


def listed(
    field: JsonField[T], *, most: int, least: int = 0
) -> JsonField[tuple[T, ...]]:
    """Return the rule for a list of values that each keep one rule."""

    def read(value: object, where: str) -> tuple[T, ...]:
        entries = _require_list(value, where, least, most)
        return tuple(
            field.read(each, f"{where}[{place}]") for place, each in enumerate(entries)
        )

    return JsonField(lambda values: [field.write(each) for each in values], read)


def row(
    kind: Callable[..., T],
    fields: Mapping[str, JsonField[Any]],
    *,
    last: Mapping[str, JsonField[Any]] | None = None,
) -> JsonField[T]:
    """Return the rule for a value written as a list of its fields, in order.

    The field in `last`, if there is one, is left out when it is empty.
    """
    known = {**fields, **(last or {})}

    def read(value: object, where: str) -> T:
        entries = _require_list(value, where, len(fields), len(known))
        pairs = zip(known.items(), entries, strict=False)
        return kind(
            **{key: rule.read(each, f"{where}.{key}") for (key, rule), each in pairs}
        )

    def write(value: object) -> list[Any]:
        entries = [rule.write(getattr(value, key)) for key, rule in fields.items()]
        for key, rule in (last or {}).items():
            if getattr(value, key):
                entries.append(rule.write(getattr(value, key)))
        return entries

    return JsonField(write, read)


def table(
    kind: Callable[..., T],
    fields: Mapping[str, JsonField[Any]],
    *,
    optional: Mapping[str, JsonField[Any]] | None = None,
) -> JsonField[T]:
    """Return the rule for a value written as a table: every field, and no other.

    An optional one is left out when it is None: so what is said without it can be
    read by who does not know it.
    """
    known = {**fields, **(optional or {})}

    def read(value: object, where: str) -> T:
        found = require_table(value, where)
        for key in sorted(fields.keys() - found.keys()):
            raise UsageError(f"{where}.{key} is missing. {SEE}")
        for key in sorted(found.keys() - known.keys()):
            raise UsageError(f"{where}.{shown(key)} is unknown here. {SEE}")
        return kind(
            **{
                key: rule.read(found[key], f"{where}.{key}")
                for key, rule in known.items()
                if key in found
            }
        )

    def write(value: object) -> dict[str, Any]:
        said = {key: rule.write(getattr(value, key)) for key, rule in fields.items()}
        for key, rule in (optional or {}).items():
            if (part := getattr(value, key)) is not None:
                said[key] = rule.write(part)
        return said

    return JsonField(write, read)


def require_table(value: object, where: str) -> dict[str, Any]:
    """Return a table as JSON gave it, still to be judged."""
    if not isinstance(value, dict):
        raise wrong(where, value, "a table")
    return value


def _require_list(value: object, where: str, least: int, most: int) -> list[Any]:
    if not isinstance(value, list):
        raise wrong(where, value, "a list")
    if not least <= len(value) <= most:
        raise UsageError(
            f"{where} has {len(value)} entries; it must have {least} to {most}. {SEE}"
        )
    return value
