"""The kinds of values that an event may hold, and their bounds."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

Plain = str | int | float | bool | None
Value = Plain | Sequence[str] | Mapping[str, Plain]

MAX_TEXT = 500
"""Characters; what is longer is cut."""

MAX_NAME = 200
"""Characters of a name in a list or a mapping, so that a thousand events fit."""

MAX_ITEMS = 100
"""Names or numbers in one field; what is beyond is left out."""

MAX_WHOLE = 2**64 - 1
"""What a frame can carry; what is beyond becomes None."""

# The shapes of a token, of the code in an invite, and of an HTTP header.
_SECRET = re.compile(r"(atoll_[io]_|\bcode=|\bbearer\s+)[\w.~+/=-]{8,}", re.I | re.A)


class Kind(enum.Enum):
    """What a field holds, in words."""

    TEXT = "text"
    WHOLE = "a whole number"
    NUMBER = "a number"
    NAMES = "a list of names"
    NUMBERS = "numbers by name"
    VALUES = "values by name"

    def bounded(self, value: object) -> Value:
        """Return `value` as JSON can hold it, cut to the bounds.

        Raises:
            TypeError: it is of another kind.
        """
        return _BOUNDED[self](value)


def text(value: object, most: int = MAX_TEXT) -> str:
    """Return text without what looks like a secret, cut to its bound."""
    if not isinstance(value, str):
        raise TypeError
    # A lone surrogate is not UTF-8, and would stop whoever writes it.
    clean = value[: 4 * MAX_TEXT].encode(errors="replace").decode()
    clean = _SECRET.sub(r"\1[secret]", clean)
    return clean if len(clean) <= most else clean[: most - 1] + "…"


def whole(value: object) -> int | None:
    """Return a whole number that is not negative; None beyond 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value if 0 <= value <= MAX_WHOLE else None


def number(value: object) -> float | int | None:
    """Return a finite number; None for one that is not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    if isinstance(value, int):
        return value if abs(value) <= MAX_WHOLE else None
    return float(value) if math.isfinite(value) else None


def names(value: object) -> tuple[str, ...]:
    """Return a few names."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError
    return tuple(text(each, MAX_NAME) for each in value[:MAX_ITEMS])


def numbers(value: object) -> dict[str, Plain]:
    """Return a few numbers by name."""
    return {key: number(each) for key, each in _items(value)}


def values(value: object) -> dict[str, Plain]:
    """Return a few plain values by name."""
    return {key: _plain(each) for key, each in _items(value)}


def _plain(value: object) -> Plain:
    if value is None or isinstance(value, bool):
        return value
    return text(value) if isinstance(value, str) else number(value)


def _items(value: object) -> list[tuple[str, object]]:
    if not isinstance(value, Mapping):
        raise TypeError
    return [
        (text(key, MAX_NAME), each) for key, each in islice(value.items(), MAX_ITEMS)
    ]


_BOUNDED: dict[Kind, Callable[[object], Value]] = {
    Kind.TEXT: text,
    Kind.WHOLE: whole,
    Kind.NUMBER: number,
    Kind.NAMES: names,
    Kind.NUMBERS: numbers,
    Kind.VALUES: values,
}
