"""The field language of settings, and the sections that are made of its rules.

A rule takes a value of any type and its dotted key, and returns the value to keep or
raises `SettingsError` with both. Sections name one rule per field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, field, fields
from typing import Any, ClassVar, Protocol, TypeVar

from atoll.errors import SettingsError
from atoll.fields import FieldLanguage, JsonField, nearest, shown

MAX_NAME_BYTES = 128

T = TypeVar("T")

LANGUAGE = FieldLanguage(SettingsError)
integer, number, maybe = LANGUAGE.integer, LANGUAGE.number, LANGUAGE.maybe
FLAG = LANGUAGE.flag()


class Section(Protocol):
    """Any dataclass whose fields were made by `setting`."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def setting(default: T, rule: JsonField[Any]) -> T:
    """Declare a field with its default and its rule."""
    return field(default=default, metadata={"rule": rule})


def derived(rule: JsonField[Any], default: Callable[[Any], object]) -> Any:
    """Declare a field whose default is `default` of the section's earlier fields."""
    return field(default=None, metadata={"rule": maybe(rule), "default": default})


def unwritten(default: T, rule: JsonField[T]) -> T:
    """Declare a field that is not written while it has its default.

    So a run that does not use it has the same bytes as before the field existed.
    """

    def write(value: T) -> object:
        return None if value == default else rule.write(value)

    return setting(default, JsonField(write, rule.read))


def check_fields(section: Section, table: str) -> None:
    """Check every field of `section` in order; store the values its rules return."""
    for declared in fields(section):
        value = getattr(section, declared.name)
        if value is None and "default" in declared.metadata:
            value = unset_value(section, declared)
        rule: JsonField[Any] = declared.metadata["rule"]
        checked = rule.read(value, f"{table}.{declared.name}")
        object.__setattr__(section, declared.name, checked)


def unset_value(section: Section, declared: Field[Any]) -> object:
    """Return the default of a field, given the other values of its section."""
    if "default" not in declared.metadata:
        return declared.default
    rule: JsonField[Any] = declared.metadata["rule"]
    return rule.read(declared.metadata["default"](section), declared.name)


def written_value(section: Section, declared: Field[Any]) -> Any:
    """Return a field's value as a run file shows it: 0.7, not 0.699999988079071."""
    rule: JsonField[Any] = declared.metadata["rule"]
    return rule.write(getattr(section, declared.name))


def choice(*names: str, refused: tuple[tuple[str, str], ...] = ()) -> JsonField[str]:
    """Return the rule for one of a few names; those in `refused` have a reason."""
    rule = LANGUAGE.option(*names)

    def read(value: object, key: str) -> str:
        for name, reason in refused:
            if value == name:
                raise SettingsError(f"{key}={shown(value)} is refused: {reason}")
        if isinstance(value, str) and value not in names:
            raise SettingsError(
                f"{key}={shown(value)} is not one of {', '.join(names)}. "
                f"Did you mean {nearest(value, names)!r}?"
            )
        return rule.read(value, key)

    return JsonField(str, read)


def _is_name(text: str) -> bool:
    size_bytes = len(text.encode("utf-8", errors="replace"))
    is_plain = text.isprintable() and "/" not in text and text == text.strip()
    return is_plain and 0 < size_bytes <= MAX_NAME_BYTES


NAME = LANGUAGE.where(
    _is_name,
    f"1 to {MAX_NAME_BYTES} bytes of printable text without '/' and without blanks at "
    "its ends",
)
"""A short printable name that is safe inside a path and an address."""

DIGEST = LANGUAGE.where(
    lambda text: len(text) == 64 and not set(text) - set("0123456789abcdef"),
    "a digest of 64 hexadecimal digits. Copy it whole, from `atoll inspect` or "
    "`atoll status`",
)
"""32 bytes in hex, of lower case."""


def wrong_type(key: str, value: object, needed: str) -> SettingsError:
    """Return the error for a table of a type the key cannot take."""
    return SettingsError(
        f"{key} needs {needed}, but got {shown(value)} ({type(value).__name__})."
    )
