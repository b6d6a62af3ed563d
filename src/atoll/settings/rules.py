"""Rules for one value: its type, its range, and the text of its error.

A rule takes a dotted key and a value of any type, and returns the value to keep or
raises `SettingsError` with both. Sections name one rule per field.
"""

from __future__ import annotations

import difflib
import math
import reprlib
import struct
from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Protocol, TypeVar

from atoll.errors import SettingsError

MAX_NAME_BYTES = 128
_LARGEST_SHOWN = 10**20

T = TypeVar("T")


class SettingRule(Protocol):
    """Judges one value."""

    def check(self, key: str, value: object) -> object:
        """Return the value to keep, or raise `SettingsError` naming `key`."""


class Section(Protocol):
    """Any dataclass whose fields were made by `setting`."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def setting(default: T, rule: SettingRule) -> T:
    """Declare a field with its default and its rule."""
    return field(default=default, metadata={"rule": rule})


def derived(rule: SettingRule, default: Callable[[Any], object]) -> Any:
    """Declare a field whose default is `default` of the section's earlier fields."""
    return field(default=None, metadata={"rule": Maybe(rule), "default": default})


def check_fields(section: Section, table: str) -> None:
    """Check every field of `section` in order; store the values its rules return."""
    for declared in fields(section):
        value = getattr(section, declared.name)
        if value is None and "default" in declared.metadata:
            value = unset_value(section, declared)
        rule: SettingRule = declared.metadata["rule"]
        checked = rule.check(f"{table}.{declared.name}", value)
        object.__setattr__(section, declared.name, checked)


def unset_value(section: Section, declared: Field[Any]) -> object:
    """Return the default of a field, given the other values of its section."""
    if "default" not in declared.metadata:
        return declared.default
    rule: SettingRule = declared.metadata["rule"]
    return rule.check(declared.name, declared.metadata["default"](section))


def written_value(section: Section, declared: Field[Any]) -> Any:
    """Return a field's value as a run file shows it: 0.7, not 0.699999988079071."""
    value = getattr(section, declared.name)
    rule = declared.metadata["rule"]
    inner = rule.rule if isinstance(rule, Maybe) else rule
    is_fp32 = isinstance(inner, Number) and inner.fp32
    return shortest_fp32(value) if is_fp32 else value


@dataclass(frozen=True)
class Whole:
    """A whole number in a closed range; a bool or a float is not one."""

    low: int
    high: int

    def check(self, key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(key, value, "a whole number")
        if not self.low <= value <= self.high:
            raise _out_of_range(key, value, f"from {self.low} to {self.high}")
        return int(value)


@dataclass(frozen=True)
class Number:
    """A finite number in a range; `fp32` rounds it once, as the outer step needs."""

    low: float
    high: float = math.inf
    includes_low: bool = True
    includes_high: bool = True
    fp32: bool = False

    def check(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(key, value, "a number")
        try:
            number = round_fp32(value) if self.fp32 else float(value)
        except OverflowError:
            number = math.inf
        if not (math.isfinite(number) and self._covers(number)):
            raise _out_of_range(key, value, self._range())
        return number

    def _covers(self, number: float) -> bool:
        above = number >= self.low if self.includes_low else number > self.low
        below = number <= self.high if self.includes_high else number < self.high
        return above and below

    def _range(self) -> str:
        low = f"at least {self.low}" if self.includes_low else f"above {self.low}"
        if math.isinf(self.high):
            return f"that is finite and {low}"
        high = f"at most {self.high}" if self.includes_high else f"below {self.high}"
        return f"{low} and {high}"


@dataclass(frozen=True)
class Digest:
    """32 bytes in hex, of lower case."""

    def check(self, key: str, value: object) -> str:
        if not isinstance(value, str):
            raise wrong_type(key, value, "a digest")
        if len(value) != 64 or set(value) - set("0123456789abcdef"):
            raise SettingsError(
                f"{key}={shown(value)} is no digest, which has 64 hexadecimal digits. "
                "Copy it whole, from `atoll inspect` or `atoll status`."
            )
        return value


@dataclass(frozen=True)
class Flag:
    """True or false; 0 and 1 are neither."""

    def check(self, key: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise wrong_type(key, value, "true or false")
        return value


@dataclass(frozen=True)
class Choice:
    """One of a few names, some of which may belong to a capability still to come."""

    names: tuple[str, ...]
    later: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()

    def check(self, key: str, value: object) -> str:
        if not isinstance(value, str):
            raise wrong_type(key, value, "one of " + _listed(self.names))
        if value in self.later:
            raise not_yet(key, value, f"Choose one of {_listed(self.names)}.")
        for name, reason in self.refused:
            if value == name:
                raise SettingsError(f"{key}={shown(value)} is refused: {reason}")
        if value not in self.names:
            raise SettingsError(
                f"{key}={shown(value)} is not one of {_listed(self.names)}. "
                f"Did you mean {nearest(value, self.names)!r}?"
            )
        return str(value)


@dataclass(frozen=True)
class Name:
    """A short printable name that is safe inside a path and an address."""

    def check(self, key: str, value: object) -> str:
        if not isinstance(value, str):
            raise wrong_type(key, value, "text")
        size_bytes = len(value.encode("utf-8", errors="replace"))
        if not (
            0 < size_bytes <= MAX_NAME_BYTES
            and value.isprintable()
            and "/" not in value
            and value == value.strip()
        ):
            raise SettingsError(
                f"{key}={shown(value)} is not a name. Use 1 to {MAX_NAME_BYTES} bytes "
                "of printable text without '/' and without blanks at its ends."
            )
        return str(value)


@dataclass(frozen=True)
class Maybe:
    """Accepts None, or any value that another rule accepts."""

    rule: SettingRule

    def check(self, key: str, value: object) -> object:
        return None if value is None else self.rule.check(key, value)


@dataclass(frozen=True)
class Later:
    """A setting whose capability is still to come: only its default is accepted."""

    default: object = None

    def check(self, key: str, value: object) -> object:
        if value is not self.default:
            raise not_yet(key, value, f"Remove {key} from the settings.")
        return value


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


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return the candidate that is most similar to `name`, at any distance."""
    return difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.0)[0]


def shown(value: object) -> str:
    """Return `value` as a short text for a message."""
    if isinstance(value, int) and abs(value) > _LARGEST_SHOWN:
        return f"<an integer of {value.bit_length()} bits>"
    return reprlib.repr(value)


def wrong_type(key: str, value: object, needed: str) -> SettingsError:
    """Return the error for a value of a type the key cannot take."""
    return SettingsError(
        f"{key} needs {needed}, but got {shown(value)} ({type(value).__name__})."
    )


def not_yet(key: str, value: object, remedy: str) -> SettingsError:
    """Return the error for a value whose capability is still to come."""
    return SettingsError(f"{key}={shown(value)} is not available yet. {remedy}")


def _out_of_range(key: str, value: float, allowed: str) -> SettingsError:
    return SettingsError(
        f"{key}={shown(value)} is out of range. Choose a value {allowed}."
    )


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in names)
