"""Changing a frozen value, on the paths that every message takes."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def changed(value: T, **changes: Any) -> T:
    """Return a copy of a frozen value with other values in some of its fields.

    Like `dataclasses.replace` and an order of magnitude faster, because nothing is
    checked or computed again: only for classes without checks and caches.

    Raises:
        TypeError: the class has no such field.
    """
    kind, before = type(value), value.__dict__
    fields = before | changes
    if len(fields) != len(before):
        unknown = sorted(changes.keys() - before.keys())
        raise TypeError(f"{kind.__name__} has no field {unknown[0]!r}.")
    copy = object.__new__(kind)
    object.__setattr__(copy, "__dict__", fields)
    return copy
