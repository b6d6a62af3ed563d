"""The field language: rules for values that come from outside.

Settings, forms of the API, documents in a bucket and fault plans are made of the same
rules. A rule checks a value of JSON or TOML, its type first, then its bounds, and
turns a value into JSON. A message names the field from the outside in
(`beat.holds[3].digest`), the value, shortened, and the rule.

Rule 1: a rule takes a value that is parsed already; its parser has bounded its size,
        and a list or a text is measured before its parts are read.
Rule 2: nothing is converted silently: true is no number, and 1.0 no whole number.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from atoll.errors import UsageError

U64_MAX = 2**64 - 1
_LARGEST_SHOWN = 10**20
_HEX = re.compile("(?:[0-9a-f]{2})*")

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True)
class JsonField(Generic[T]):
    """Converts one kind of value to JSON and back."""

    write: Callable[[T], object]
    read: Callable[[object, str], T]
    """Takes a value of JSON and its path for a message."""


def shown(value: object) -> str:
    """Return `value` as a short text for a message."""
    if isinstance(value, int) and abs(value) > _LARGEST_SHOWN:
        return f"<an integer of {value.bit_length()} bits>"
    return reprlib.repr(value)


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return the candidate that is most similar to `name`, at any distance."""
    return difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.0)[0]


def round_fp32(value: float) -> float:
    """Return the fp32 number nearest to `value`; OverflowError beyond fp32's range."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", float(value)))
    return float(rounded)


def shortest_fp32(value: float) -> float:
    """Return the number of fewest digits that rounds to the fp32 number `value`.

    >>> shortest_fp32(0.699999988079071)
    0.7
    """
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if round_fp32(candidate) == value:
            return candidate
    return value


@dataclass(frozen=True)
class FieldLanguage:
    """The rules, with the error that a wrong value raises and its remedy."""

    error: type[UsageError] = UsageError
    remedy: str = ""

    def fault(self, fact: str) -> UsageError:
        """Return the error that states a fact, and the remedy."""
        return self.error(f"{fact} {self.remedy}".rstrip())

    def wrong(self, path: str, value: object, needed: str) -> UsageError:
        """Return the error for a value that a field cannot take."""
        return self.fault(f"{path}={shown(value)} must be {needed}.")

    def integer(self, low: int = 0, high: int = U64_MAX) -> JsonField[int]:
        """Return the rule for a whole number; true and 1.0 are none."""

        def read(value: object, path: str) -> int:
            if type(value) is not int or not low <= value <= high:
                raise self.wrong(path, value, f"a whole number from {low} to {high}")
            return value

        return JsonField(int, read)

    def number(
        self,
        low: float = 0.0,
        high: float = sys.float_info.max,
        *,
        is_low_open: bool = False,
        is_high_open: bool = False,
        is_fp32: bool = False,
    ) -> JsonField[float]:
        """Return the rule for a finite number in a range.

        With `is_fp32` it is rounded once, as the outer step needs, and written with
        the fewest digits.
        """
        needed = f"a finite number {'above' if is_low_open else 'from'} {low}"
        if high < sys.float_info.max:
            is_closed = not (is_low_open or is_high_open)
            last = "to" if is_closed else "and below" if is_high_open else "and at most"
            needed = f"{needed} {last} {high}"

        def read(value: object, path: str) -> float:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise self.wrong(path, value, needed)
            try:
                number = round_fp32(value) if is_fp32 else float(value)
            except OverflowError:
                number = math.inf
            is_above = number > low if is_low_open else number >= low
            is_below = number < high if is_high_open else number <= high
            if not (is_above and is_below and math.isfinite(number)):
                raise self.wrong(path, value, needed)
            return number

        return JsonField(shortest_fp32 if is_fp32 else float, read)

    def flag(self) -> JsonField[bool]:
        """Return the rule for true or false; 0 and 1 are neither."""

        def read(value: object, path: str) -> bool:
            if type(value) is not bool:
                raise self.wrong(path, value, "true or false")
            return value

        return JsonField(bool, read)

    def text(self, max_bytes: int, *, min_bytes: int = 0) -> JsonField[str]:
        """Return the rule for text, by its bytes in UTF-8."""

        def read(value: object, path: str) -> str:
            if not isinstance(value, str):
                raise self.wrong(path, value, "text")
            try:
                size_bytes = len(value.encode())
            except UnicodeEncodeError as exc:
                raise self.wrong(path, value, "text without surrogates") from exc
            if not min_bytes <= size_bytes <= max_bytes:
                needed = f"{min_bytes} to {max_bytes} bytes of UTF-8"
                raise self.wrong(path, value, needed)
            return value

        return JsonField(str, read)

    def where(self, is_valid: Callable[[str], bool], needed: str) -> JsonField[str]:
        """Return the rule for text that a predicate accepts."""

        def read(value: object, path: str) -> str:
            if not isinstance(value, str) or not is_valid(value):
                raise self.wrong(path, value, needed)
            return value

        return JsonField(str, read)

    def choice(self, kind: type[E]) -> JsonField[E]:
        """Return the rule for a member of an enumeration, by its value."""
        rule = self.option(*map(str, kind))
        return JsonField(str, lambda value, path: kind(rule.read(value, path)))

    def option(self, *choices: str) -> JsonField[str]:
        """Return the rule for one of a few strings."""
        return self.where(
            lambda value: value in choices, f"one of {', '.join(choices)}"
        )

    def hexed(
        self, min_bytes: int, max_bytes: int, *, is_secret: bool = False
    ) -> JsonField[bytes]:
        """Return the rule for bytes in lower-case hex; a message shows no secret."""
        sizes = range(2 * min_bytes, 2 * max_bytes + 1)
        needed = f"{min_bytes} to {max_bytes} bytes in lower-case hex"

        def read(value: object, path: str) -> bytes:
            digits = value if isinstance(value, str) else ""
            if digits is value and len(digits) in sizes and _HEX.fullmatch(digits):
                return bytes.fromhex(digits)
            raise self.wrong(path, "<not shown>" if is_secret else value, needed)

        return JsonField(bytes.hex, read)

    def maybe(self, field: JsonField[T]) -> JsonField[T | None]:
        """Return the rule for a value of another rule, or null."""
        return JsonField(
            lambda value: None if value is None else field.write(value),
            lambda value, path: None if value is None else field.read(value, path),
        )

    def listed(
        self, field: JsonField[T], *, max_items: int, min_items: int = 0
    ) -> JsonField[tuple[T, ...]]:
        """Return the rule for a list whose values all follow one rule."""

        def read(value: object, path: str) -> tuple[T, ...]:
            entries = self._require_list(value, path, min_items, max_items)
            return tuple(
                field.read(entry, f"{path}[{index}]")
                for index, entry in enumerate(entries)
            )

        return JsonField(lambda values: [field.write(value) for value in values], read)

    def row(
        self,
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
            entries = self._require_list(value, path, len(fields), len(rules))
            pairs = zip(rules.items(), entries, strict=False)
            return kind(
                **{key: rule.read(part, f"{path}.{key}") for (key, rule), part in pairs}
            )

        def write(value: object) -> list[Any]:
            return [
                rule.write(getattr(value, key))
                for key, rule in rules.items()
                if key in fields or getattr(value, key)
            ]

        return JsonField(write, read)

    def table(
        self,
        kind: Callable[..., T],
        fields: Mapping[str, JsonField[Any]],
        *,
        optional: Mapping[str, JsonField[Any]] | None = None,
    ) -> JsonField[T]:
        """Return the rule for a value written as a table: every field, and no other.

        An optional field is omitted when it is None, so that a reader which does not
        know the field can read a value without it.
        """
        rules = {**fields, **(optional or {})}

        def read(value: object, path: str) -> T:
            values = self.require_table(value, path)
            for key in sorted(fields.keys() - values.keys()):
                raise self.fault(f"{path}.{key} is missing.")
            for key in sorted(values.keys() - rules.keys()):
                raise self.fault(f"{path}.{shown(key)} is unknown here.")
            return kind(
                **{
                    key: rule.read(values[key], f"{path}.{key}")
                    for key, rule in rules.items()
                    if key in values
                }
            )

        def write(value: object) -> dict[str, Any]:
            return {
                key: rule.write(getattr(value, key))
                for key, rule in rules.items()
                if key in fields or getattr(value, key) is not None
            }

        return JsonField(write, read)

    def mapping(self, field: JsonField[T]) -> JsonField[dict[str, T]]:
        """Return the rule for a table with any keys, whose values follow one rule."""

        def read(value: object, path: str) -> dict[str, T]:
            entries = self.require_table(value, path).items()
            return {key: field.read(entry, f"{path}.{key}") for key, entry in entries}

        return JsonField(
            lambda values: {key: field.write(value) for key, value in values.items()},
            read,
        )

    def require_table(self, value: object, path: str) -> dict[str, Any]:
        """Return a value of JSON that is a table; its fields are not checked yet."""
        if not isinstance(value, dict):
            raise self.wrong(path, value, "a table")
        return value

    def _require_list(
        self, value: object, path: str, min_items: int, max_items: int
    ) -> list[Any]:
        if not isinstance(value, list):
            raise self.wrong(path, value, "a list")
        if not min_items <= len(value) <= max_items:
            raise self.fault(
                f"{path} has {len(value)} entries; it must have {min_items} to "
                f"{max_items}."
            )
        return value
