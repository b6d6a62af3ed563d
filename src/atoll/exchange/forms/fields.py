"""What one field of a form may hold, written and read by one rule.

A field turns a value of ours into what JSON can say, and judges what JSON said: its
type first, then its bounds. A message names the field from the outside in
(`beat.holds[3].digest`), the value, shortened, and what it must be.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar, cast

from atoll.errors import UsageError
from atoll.exchange.forms.text import SEE
from atoll.settings.rules import shown
from atoll.wire.text import name_fault, new_name_fault

U64_MAX = 2**64 - 1
_HEX = re.compile("(?:[0-9a-f]{2})*")

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True)
class Field(Generic[T]):
    """How one kind of value is written and read."""

    write: Callable[[T], object]
    read: Callable[[object, str], T]
    """Takes what JSON said and the field's name for a message; raises UsageError."""


def wrong(where: str, value: object, needed: str) -> UsageError:
    """Return the error for a value that a field cannot take."""
    return UsageError(f"{where}={shown(value)} must be {needed}. {SEE}")


def whole(low: int = 0, high: int = U64_MAX) -> Field[int]:
    """Return the rule for a whole number; true and 1.0 are none."""

    def read(value: object, where: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise wrong(where, value, f"a whole number from {low} to {high}")
        return value

    return Field(int, read)


def number(low: float = 0.0, high: float = sys.float_info.max) -> Field[float]:
    """Return the rule for a finite number in a closed range."""

    def read(value: object, where: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and low <= cast(float, value) <= high):
            raise wrong(where, value, f"a finite number from {low} to {high}")
        return float(cast(float, value))

    return Field(float, read)


def _read_flag(value: object, where: str) -> bool:
    if type(value) is not bool:
        raise wrong(where, value, "true or false")
    return value


FLAG = Field(bool, _read_flag)


def text(most: int, *, least: int = 0) -> Field[str]:
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

    return Field(str, read)


def require_name(value: object, where: str) -> str:
    """Return the name of an island or run, as frames may carry it."""
    if not isinstance(value, str):
        raise wrong(where, value, "a name")
    if len(value) > 128:
        raise wrong(where, value, "a name of at most 128 bytes")
    if fault := name_fault(value, what=where):
        raise UsageError(f"{fault}. Choose another name.")
    return value


def require_target_name(value: object, where: str) -> str:
    """Return the name of an island that can stand in the path of a request."""
    name = require_name(value, where)
    if fault := new_name_fault(name, what=where):
        raise UsageError(f"{fault}. Choose another name.")
    return name


NAME = Field(str, require_name)


def choice(kind: type[E]) -> Field[E]:
    """Return the rule for one of a few words."""
    words = {str(each): each for each in kind}

    def read(value: object, where: str) -> E:
        if not isinstance(value, str) or value not in words:
            raise wrong(where, value, f"one of {', '.join(words)}")
        return words[value]

    return Field(str, read)


def words(*known: str) -> Field[str]:
    """Return the rule for one of a few words that have no type of their own."""

    def read(value: object, where: str) -> str:
        if not isinstance(value, str) or value not in known:
            raise wrong(where, value, f"one of {', '.join(known)}")
        return value

    return Field(str, read)


def hexed(least: int, most: int, *, is_secret: bool = False) -> Field[bytes]:
    """Return the rule for bytes in lower-case hex; a message shows no secret ones."""

    def read(value: object, where: str) -> bytes:
        is_short = isinstance(value, str) and 2 * least <= len(value) <= 2 * most
        if is_short and _HEX.fullmatch(cast(str, value)):
            return bytes.fromhex(cast(str, value))
        seen = "<not shown>" if is_secret else value
        raise wrong(where, seen, f"{least} to {most} bytes in lower-case hex")

    return Field(bytes.hex, read)


def maybe(field: Field[T]) -> Field[T | None]:
    """Return the rule for what another rule takes, or null."""
    return Field(
        lambda value: None if value is None else field.write(value),
        lambda value, where: None if value is None else field.read(value, where),
    )


def listed(field: Field[T], *, most: int, least: int = 0) -> Field[tuple[T, ...]]:
    """Return the rule for a list of values that each keep one rule."""

    def read(value: object, where: str) -> tuple[T, ...]:
        entries = _require_list(value, where, least, most)
        return tuple(
            field.read(each, f"{where}[{place}]") for place, each in enumerate(entries)
        )

    return Field(lambda values: [field.write(each) for each in values], read)


def row(
    kind: Callable[..., T],
    fields: Mapping[str, Field[Any]],
    *,
    last: Mapping[str, Field[Any]] | None = None,
) -> Field[T]:
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

    return Field(write, read)


def table(
    kind: Callable[..., T],
    fields: Mapping[str, Field[Any]],
    *,
    optional: Mapping[str, Field[Any]] | None = None,
) -> Field[T]:
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

    return Field(write, read)


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
