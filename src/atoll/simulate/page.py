"""A story on a page: aligned lines, the same for the same run."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.simulate.storms import COORDINATOR
from atoll.simulate.story import Entry, Tally, Tone
from atoll.simulate.trace import Commit
from atoll.simulate.wording import few

WIDTH = 100
"""Columns of a page that is not on a terminal."""

MAX_STRIP = 48
"""Beyond so many islands a round is told by numbers and names alone."""

MARKS = {"counted": "#", "late": "~", "refused": "!", "absent": "."}
LEGEND = "   ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items())


class Line(NamedTuple):
    """A line of a page."""

    text: str
    tone: Tone = Tone.PLAIN


@dataclass
class Page:
    """Turns entries into lines. Rounds that came to the same are one line."""

    islands: Sequence[str]
    rounds: int
    width: int = WIDTH
    is_whole: bool = False
    """Whether nothing is put together, and times have their milliseconds."""

    _alike: list[Entry] = field(init=False, default_factory=list)
    """Entries that will be one line."""

    @property
    def has_strip(self) -> bool:
        return len(self.islands) <= MAX_STRIP

    @property
    def who_width(self) -> int:
        words = [*self.islands, COORDINATOR, f"rounds {self.rounds}-{self.rounds}"]
        if self.is_whole:
            words += [f"{COORDINATOR}->{island}" for island in self.islands]
        return max(map(len, words))

    def add(self, entry: Entry) -> Iterator[Line]:
        """Yield the lines that an entry completes."""
        if self._alike and not _are_alike(self._alike[-1], entry):
            yield from self.flush()
        self._alike.append(entry)
        if self.is_whole:
            yield from self.flush()

    def flush(self) -> Iterator[Line]:
        """Yield what waits for more of its kind."""
        alike, self._alike = self._alike, []
        if alike and alike[0].commit:
            yield from self._rounds(alike, alike[0].commit)
        elif len(alike) > 1:
            together = {entry.who for entry in alike}
            names = few([island for island in self.islands if island in together])
            text = f"{_TOGETHER[alike[0].text]}: {names}"
            who = f"{len(alike)} islands"
            yield from self._lines(alike[0].at_s, who, text, alike[0].tone)
        elif alike:
            (entry,) = alike
            yield from self._lines(entry.at_s, entry.who, entry.text, entry.tone)

    def _rounds(self, alike: Sequence[Entry], commit: Commit) -> Iterator[Line]:
        who, text = f"round {commit.round} f{commit.fragment}", self._roster(commit)
        if len(alike) > 1:
            numbers = [each.commit.round for each in alike if each.commit]
            who = _span(min(numbers), max(numbers))
            text += f"; {len(alike)} outcomes until {self.time(alike[-1].at_s)}"
        is_full = len(self._with("counted", commit)) == len(self.islands)
        tone = Tone.PLAIN if is_full else Tone.FAULT
        yield from self._lines(alike[0].at_s, who, text, tone)

    def time(self, at_s: float) -> str:
        """Return an instant of virtual time as minutes and seconds."""
        if self.is_whole:
            thousandths = int(at_s * 1000)
            return f"{thousandths // 60_000}:{thousandths % 60_000 / 1000:06.3f}"
        return f"{int(at_s) // 60}:{int(at_s) % 60:02}"

    def _lines(self, at_s: float, who: str, text: str, tone: Tone) -> Iterator[Line]:
        time_width = 10 if self.is_whole else 6
        left = f"{self.time(at_s):>{time_width}}  {who:{self.who_width}}  "
        first, *more = wrap(text, self.width - len(left))
        yield Line(left + first, tone)
        for line in more:
            yield Line(" " * len(left) + line, tone)

    def _roster(self, commit: Commit) -> str:
        """Return one mark per island, and in words who did not count."""
        counted, *others = (self._with(verdict, commit) for verdict in MARKS)
        words = [f"{len(counted) or 'nobody'} counted" + ", void" * (not counted)]
        if len(counted) == len(self.islands) > 1:
            words = [f"all {len(counted)} counted"]
        words += [
            f"{few(names)} {verdict}"
            for verdict, names in zip(list(MARKS)[1:], others, strict=True)
            if names
        ]
        said = ", ".join(words)
        return f"{self._strip(commit)}  {said}" if self.has_strip else said

    def _strip(self, commit: Commit) -> str:
        verdicts = commit.verdicts
        return "".join(MARKS[verdicts.get(each, "absent")] for each in self.islands)

    def _with(self, verdict: str, commit: Commit) -> list[str]:
        return [
            each
            for each in self.islands
            if commit.verdicts.get(each, "absent") == verdict
        ]


_TOGETHER = {"joins": "join", "leaves": "leave"}
"""What several islands may do in one line, and how it is said of them."""


def _are_alike(one: Entry, other: Entry) -> bool:
    if one.commit and other.commit:
        return one.commit.verdicts == other.commit.verdicts
    return one.text == other.text and one.text in _TOGETHER


def wrap(text: str, width: int) -> list[str]:
    """Return `text` in lines; a number stays with its unit.

    >>> wrap("they arrive late for 12 s", 24)
    ['they arrive late for', '12 s']
    """
    tied = re.sub(r"(\d) (s|%)(?!\w)", "\\1\N{NO-BREAK SPACE}\\2", text)
    lines = textwrap.wrap(tied, max(24, width)) or [""]
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def tally_cells(tally: Tally) -> list[str]:
    """Return what a table says of one island, in the order of `TALLY_COLUMNS`."""
    roster = (tally.counted, tally.late, tally.refused)
    work = (tally.carried, tally.dropped)
    return [*map(str, roster + work), _kb(tally.bytes_up), _kb(tally.bytes_down)]


TALLY_COLUMNS = (
    "counted",
    "late",
    "refused",
    "carried",
    "dropped",
    "kB sent",
    "kB received",
)


def _kb(size_bytes: int) -> str:
    return f"{size_bytes / 1000:.1f}"


def _span(low: int, high: int) -> str:
    return f"round {low}" if low == high else f"rounds {low}-{high}"
