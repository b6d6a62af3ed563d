"""What each value of a fault may be: bounded, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.errors import UsageError
from atoll.settings.rules import shown
from atoll.simulate.links import ARROW

MAX_S = 1e9
"""Some thirty years: anything longer is a slip of the pen."""

MAX_NAME = 128
MAX_NAMES = 4096


def checked(kind: str, name: str, value: Any) -> Any:
    """Return a fault's value in its own type; `UsageError` says what is wrong."""
    special = f"{kind}.{name}"
    return _RULES[special if special in _RULES else name](f"{kind}.{name}", value)


def _number(key: str, value: Any, low: float, high: float, *, open_low: bool) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (low < value <= high or (value == low and not open_low)):
        return float(value)
    at_least = "above" if open_low else "at least"
    raise UsageError(
        f"{key}={shown(value)} must be a number {at_least} {low:g} and at most "
        f"{high:g}. Choose one in that range."
    )


def _between(
    low: float, high: float, *, open_low: bool = False
) -> Callable[[str, Any], float]:
    return lambda key, value: _number(key, value, low, high, open_low=open_low)


def _round(key: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**62:
        return value
    raise UsageError(
        f"{key}={shown(value)} must be a whole number from 1 on. Rounds count from 1."
    )


def _name(key: str, value: Any) -> str:
    is_name = isinstance(value, str) and 0 < len(value) <= MAX_NAME
    if is_name and value.isprintable() and ARROW not in value and value != "*":
        return str(value)
    raise UsageError(
        f"{key}={shown(value)} must be the name of a process: 1 to {MAX_NAME} "
        "printable characters. Choose one that the run has, for example 'i2'."
    )


def _link(key: str, value: Any) -> str:
    if value == "*":
        return str(value)
    ends = value.split(ARROW) if isinstance(value, str) else [value]
    if len(ends) > 2:
        raise UsageError(
            f"{key}={shown(value)} must be 'a', 'a{ARROW}b' or '*'. Name two ends."
        )
    return ARROW.join(_name(key, end) for end in ends)


def _groups(key: str, value: Any) -> tuple[tuple[str, ...], ...]:
    is_nested = isinstance(value, list | tuple) and all(
        isinstance(group, list | tuple) and group for group in value
    )
    names = [name for group in value for name in group] if is_nested else []
    if not 0 < len(names) <= MAX_NAMES or len(set(map(str, names))) < len(names):
        raise UsageError(
            f"{key}={shown(value)} must be groups of names, none empty and no name "
            "twice. Write for example [['i1', 'i2'], ['coordinator']]."
        )
    return tuple(tuple(_name(key, name) for name in group) for group in value)


DAMAGES = ("flip", "cut", "swap", "remove")


def _damage(key: str, value: Any) -> str:
    if isinstance(value, str) and value in DAMAGES:
        return value
    raise UsageError(f"{key}={shown(value)} must be one of {', '.join(DAMAGES)}.")


def _prefix(key: str, value: Any) -> str:
    if isinstance(value, str) and len(value) <= MAX_NAME and value.isprintable():
        return value
    raise UsageError(
        f"{key}={shown(value)} must be at most {MAX_NAME} printable characters, with "
        "which a key begins."
    )


_SECONDS = _between(0.0, MAX_S)
_RULES: dict[str, Callable[[str, Any], Any]] = {
    "at_s": _SECONDS,
    "at_round": _round,
    "for_s": _between(0.0, MAX_S, open_low=True),
    "back_after_s": _SECONDS,
    "by_s": _between(0.0, MAX_S, open_low=True),
    "clock_jump.by_s": _between(-MAX_S, MAX_S),
    "rate": _between(0.0, 1.0, open_low=True),
    "clock_drift.rate": _between(0.1, 10.0),
    "factor": _between(0.0, 1e6, open_low=True),
    "bytes_per_s": _between(0.0, 1e15, open_low=True),
    "process": _name,
    "link": _link,
    "groups": _groups,
    "how": _damage,
    "prefix": _prefix,
}
"""What each field may be; a kind's own rule goes before the one of its name."""
