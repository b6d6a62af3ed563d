"""What happened when, for a person to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Happening(NamedTuple):
    """One line of a timeline."""

    at_s: float
    who: str
    what: str
    about: str = ""


def timeline(happenings: Iterable[Happening]) -> Iterator[str]:
    """Yield one line of text for each happening.

    >>> print(*timeline([Happening(1.5, "i2", "crash", "incarnation 1")]))
         1.500000 s  i2            crash      incarnation 1
    """
    for at_s, who, what, about in happenings:
        yield f"{at_s:13.6f} s  {who:12}  {what:10} {about}".rstrip()
