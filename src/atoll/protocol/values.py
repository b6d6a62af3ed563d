"""Changing a frozen value, on the paths that every message takes."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def changed(value: T, **changes: Any) -> T:
    """Return a copy of a frozen value with other values in some of its fields.

    Like `dataclasses.replace` and an order of magnitude faster, because nothing is
    checked or computed again: only for classes without checks and caches of their own.

    Raises:
        TypeError: the class has no such field.
    """
    copy = object.__new__(type(value))
    fields = copy.__dict__
    fields.update(value.__dict__)
    known = len(fields)
    fields.update(changes)
    if len(fields) != known:
        unknown = sorted(changes.keys() - value.__dict__.keys())
        raise TypeError(f"{type(value).__name__} has no field {unknown[0]!r}.")
    return copy
