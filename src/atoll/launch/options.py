"""What an engine is told beside a spec: its own words, `KEY=VALUE`, by a dataclass.

Every field is an `int`, `float`, `bool` or `str`, or one of these or None; its name is
the key, and its docstring line tells users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from atoll.errors import UsageError
from atoll.settings.rules import nearest

Options = TypeVar("Options")

_TRUTHS = {"true": True, "false": False}


def read_options(
    kind: type[Options], given: Mapping[str, str], *, engine: str
) -> Options:
    """Return an engine's options, the defaults where nothing was given.

    Raises:
        UsageError: one is not known, or is no value of its kind.
    """
    hints = get_type_hints(kind)
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            near = f"Did you mean {nearest(key, known)!r}?" if known else "It has none."
            raise UsageError(f"{engine} has no option {key!r}. {near}")
    read = {
        key: _value(hints[key], text, key=f"{engine}'s option {key}")
        for key, text in given.items()
    }
    return kind(**read)


def _value(hint: Any, text: str, *, key: str) -> Any:
    kinds = [each for each in (int, float, bool, str) if each in _members(hint)]
    assert kinds, f"{key} has no kind that can be written"
    kind = kinds[0]
    try:
        return _TRUTHS[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError) as exc:
        needed = {int: "a whole number", float: "a number", bool: "true or false"}
        raise UsageError(f"{key}={text!r} is not {needed[kind]}.") from exc


def _members(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__args__", (hint,))
