"""JSON of the HTTP API: parsed without guessing, and read and written field by field.

A field turns a value into JSON, and checks a value from JSON: its type first, then its
bounds. A message names the field from the outside in (`beat.holds[3].digest`), the
value, shortened, and the rule.

Rule 1: size, depth and the number of values are counted in the raw bytes, before
        they are parsed.
Rule 2: a table has each key once, and a number is finite.
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
from atoll.wire.roster import name_fault, new_name_fault

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


U64_MAX = 2**64 - 1
_HEX = re.compile("(?:[0-9a-f]{2})*")

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True)
class JsonField(Generic[T]):
    """Converts one kind of value to JSON and back."""

    write: Callable[[T], object]
    read: Callable[[object, str], T]
    """Takes a value of JSON and its path for a message; raises UsageError."""


def wrong(path: str, value: object, needed: str) -> UsageError:
    """Return the error for a value that a field cannot take."""
    return UsageError(f"{path}={shown(value)} must be {needed}. {SEE}")


def whole(low: int = 0, high: int = U64_MAX) -> JsonField[int]:
    """Return the rule for a whole number; true and 1.0 are none."""

    def read(value: object, path: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise wrong(path, value, f"a whole number from {low} to {high}")
        return value

    return JsonField(int, read)


def number(low: float = 0.0, high: float = sys.float_info.max) -> JsonField[float]:
    """Return the rule for a finite number in a closed range."""

    def read(value: object, path: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and low <= cast(float, value) <= high):
            raise wrong(path, value, f"a finite number from {low} to {high}")
        return float(cast(float, value))

    return JsonField(float, read)


def _read_flag(value: object, path: str) -> bool:
    if type(value) is not bool:
        raise wrong(path, value, "true or false")
    return value


FLAG = JsonField(bool, _read_flag)


def text(max_bytes: int, *, min_bytes: int = 0) -> JsonField[str]:
    """Return the rule for text, by its bytes in UTF-8."""

    def read(value: object, path: str) -> str:
        if not isinstance(value, str):
            raise wrong(path, value, "text")
        try:
            size_bytes = len(value.encode())
        except UnicodeEncodeError as exc:
            raise wrong(path, value, "text without surrogates") from exc
        if not min_bytes <= size_bytes <= max_bytes:
            raise wrong(path, value, f"{min_bytes} to {max_bytes} bytes of UTF-8")
        return value

    return JsonField(str, read)


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


def choice(kind: type[E]) -> JsonField[E]:
    """Return the rule for a member of an enumeration, by its value."""
    members = {str(member): member for member in kind}

    def read(value: object, path: str) -> E:
        if not isinstance(value, str) or value not in members:
            raise wrong(path, value, f"one of {', '.join(members)}")
        return members[value]

    return JsonField(str, read)


def one_of(*choices: str) -> JsonField[str]:
    """Return the rule for one of a few strings."""

    def read(value: object, path: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise wrong(path, value, f"one of {', '.join(choices)}")
        return value

    return JsonField(str, read)


def hexed(
    min_bytes: int, max_bytes: int, *, is_secret: bool = False
) -> JsonField[bytes]:
    """Return the rule for bytes in lower-case hex; a message never shows a secret."""

    def read(value: object, path: str) -> bytes:
        limits = range(2 * min_bytes, 2 * max_bytes + 1)
        if isinstance(value, str) and len(value) in limits and _HEX.fullmatch(value):
            return bytes.fromhex(value)
        displayed = "<not shown>" if is_secret else value
        needed = f"{min_bytes} to {max_bytes} bytes in lower-case hex"
        raise wrong(path, displayed, needed)

    return JsonField(bytes.hex, read)


def maybe(field: JsonField[T]) -> JsonField[T | None]:
    """Return the rule for a value of another rule, or null."""
    return JsonField(
        lambda value: None if value is None else field.write(value),
        lambda value, path: None if value is None else field.read(value, path),
    )


def listed(
    field: JsonField[T], *, max_items: int, min_items: int = 0
) -> JsonField[tuple[T, ...]]:
    """Return the rule for a list whose values all follow one rule."""

    def read(value: object, path: str) -> tuple[T, ...]:
        entries = _require_list(value, path, min_items, max_items)
        return tuple(
            field.read(entry, f"{path}[{index}]") for index, entry in enumerate(entries)
        )

    return JsonField(lambda values: [field.write(value) for value in values], read)


def row(
    kind: Callable[..., T],
    fields: Mapping[str, JsonField[Any]],
    *,
    last: Mapping[str, JsonField[Any]] | None = None,
) -> JsonField[T]:
    """Return the rule for a value written as a list of its fields, in order.

    The field in `last`, if there is one, is omitted when it is empty.
    """
    rules = {**fields, **(last or {})}

    def read(value: object, path: str) -> T:
        entries = _require_list(value, path, len(fields), len(rules))
        pairs = zip(rules.items(), entries, strict=False)
        return kind(
            **{key: rule.read(entry, f"{path}.{key}") for (key, rule), entry in pairs}
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

    An optional field is omitted when it is None, so that a reader which does not know
    the field can read a value without it.
    """
    rules = {**fields, **(optional or {})}

    def read(value: object, path: str) -> T:
        values = require_table(value, path)
        for key in sorted(fields.keys() - values.keys()):
            raise UsageError(f"{path}.{key} is missing. {SEE}")
        for key in sorted(values.keys() - rules.keys()):
            raise UsageError(f"{path}.{shown(key)} is unknown here. {SEE}")
        return kind(
            **{
                key: rule.read(values[key], f"{path}.{key}")
                for key, rule in rules.items()
                if key in values
            }
        )

    def write(value: object) -> dict[str, Any]:
        values = {key: rule.write(getattr(value, key)) for key, rule in fields.items()}
        for key, rule in (optional or {}).items():
            if (part := getattr(value, key)) is not None:
                values[key] = rule.write(part)
        return values

    return JsonField(write, read)


def require_table(value: object, path: str) -> dict[str, Any]:
    """Return a value of JSON that is a table; its fields are not checked yet."""
    if not isinstance(value, dict):
        raise wrong(path, value, "a table")
    return value


def _require_list(
    value: object, path: str, min_items: int, max_items: int
) -> list[Any]:
    if not isinstance(value, list):
        raise wrong(path, value, "a list")
    if not min_items <= len(value) <= max_items:
        raise UsageError(
            f"{path} has {len(value)} entries; it must have {min_items} to "
            f"{max_items}. {SEE}"
        )
    return value
