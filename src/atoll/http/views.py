"""Bytes in several places, sent as one: what is left when some of them have gone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MAX_VIEWS: Final = 512
"""Of one `sendmsg`; the kernel takes 1024."""


def after(views: Sequence[memoryview], sent: int) -> list[memoryview]:
    """Return what is left of `views` when `sent` bytes of them have gone."""
    for index, view in enumerate(views):
        if sent < len(view):
            return [view[sent:], *views[index + 1 :]]
        sent -= len(view)
    return []
