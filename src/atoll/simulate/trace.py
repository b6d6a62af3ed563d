"""What happened when, for a person to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple


class TraceEvent(NamedTuple):
    """One line of a timeline."""

    at_s: float
    who: str
    what: str
    about: str = ""


class CommitTrace(NamedTuple):
    """A committed round; its text is what a happening is about.

    >>> str(CommitTrace(1, 12, {"i0": "counted", "i3": "late"}))
    'round 12 of fragment 1: i0 counted, i3 late'
    """

    fragment: int
    round: int
    verdicts: Mapping[str, str]
    """By island, in the order of names; who is on no roster is not in here."""

    def __str__(self) -> str:
        said = ", ".join(f"{island} {word}" for island, word in self.verdicts.items())
        return f"round {self.round} of fragment {self.fragment}: {said}"

    @classmethod
    def parsed(cls, text: str) -> CommitTrace:
        """Return the commit whose text this is."""
        which, _, said = text.partition(": ")
        _, round, _, _, fragment = which.split()
        words = [each.rpartition(" ") for each in said.split(", ") if each]
        return cls(
            int(fragment), int(round), {who: verdict for who, _, verdict in words}
        )


def timeline(happenings: Iterable[TraceEvent]) -> Iterator[str]:
    """Yield one line of text for each happening.

    >>> print(*timeline([TraceEvent(1.5, "i2", "crash", "incarnation 1")]))
         1.500000 s  i2            crash      incarnation 1
    """
    for at_s, who, what, about in happenings:
        yield f"{at_s:13.6f} s  {who:12}  {what:10} {about}".rstrip()
