"""The output of `atoll simulate`: heading, page and summary, as text and as JSON.

A page has aligned lines, and is the same for the same run.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pprint import pformat
from textwrap import indent
from typing import Any, NamedTuple

from atoll.settings import RunSettings
from atoll.simulate.run import LIMIT_S, Simulated
from atoll.simulate.setup import Setup
from atoll.simulate.storms import COORDINATOR, as_test
from atoll.simulate.story import (
    CommitTrace,
    IslandTally,
    StoryEntry,
    Tone,
    fault_kinds,
    few,
)

MAX_DEATHS = 8
"""So many deaths are listed with what was lost; the others are counted."""

Facts = dict[str, Any]


def heading(setup: Setup, page: Page) -> list[PageLine]:
    """Return what is about to happen."""
    sync, run = setup.settings.sync, setup.settings.run
    names = " to ".join(dict.fromkeys((setup.islands[0], setup.islands[-1])))
    tokens = f", or {run.end_tokens} tokens" if run.end_tokens is not None else ""
    faults = f": {fault_kinds(setup.plan)}" if setup.plan.faults else ""
    fragments = _plural(sync.num_fragments, "fragment")
    facts = {
        "islands": f"{len(setup.islands)}, {names}, quorum {run.quorum}",
        "rounds": f"{setup.rounds}{tokens}, in {fragments}; {sync.sync_every} inner "
        f"steps each, overlap {sync.overlap_steps}",
        "seed": str(setup.seed),
        "faults": f"{setup.origin}{faults}",
        **({"place": "a bucket, without a coordinator"} if setup.store else {}),
    }
    if page.has_strip:
        facts["marks"] = f"{LEGEND}   (one per island, in order)"
    return [*_listed(facts, page), PageLine("")]


def summary(
    setup: Setup, page: Page, result: Simulated, tallies: Mapping[str, IslandTally]
) -> list[PageLine]:
    """Return what it came to."""
    rows = [["island", *TALLY_COLUMNS, "utilised", "deaths", "anchor"]]
    for island in setup.islands:
        utilised = f"{result.utilisation.get(island, 0.0):.1%}"
        deaths = str(result.deaths.get(island, 0))
        end = result.digests.get(island, "")[:8] or "-"
        rows.append([island, *tally_cells(tallies[island]), utilised, deaths, end])
    done = list(dict.fromkeys(result.rounds))
    rounds = " and ".join(map(str, done)) or "none"
    where = "by fragment" if len(done) > 1 else "in every fragment"
    time = f"{page.time(result.seconds)} of virtual time, {result.events} events"
    facts = {
        "rounds": f"{rounds} of {setup.rounds}, {where}",
        "time": time,
        **_fates(result.tokens),
        "anchor": _agreement(result),
    }
    lines = [
        PageLine(""),
        *map(PageLine, table(rows)),
        PageLine(""),
        *_listed(facts, page),
    ]
    return [*lines, *_verdict(result, page)]


def _verdict(result: Simulated, page: Page) -> list[PageLine]:
    if result.violations:
        return [
            line
            for each in result.violations
            for line in _listed({"violated": str(each)}, page, Tone.BAD)
        ]
    held = _listed({"held": "every invariant"}, page, Tone.GOOD)
    if result.digests:
        return held
    is_late = result.seconds >= LIMIT_S
    why = "time ran out" if is_late else "too few islands are left to go on"
    end = {"ended": f"before its last round: {why}"}
    return [*_listed(end, page, Tone.BAD), *held]


def _fates(tokens: Mapping[str, int]) -> dict[str, str]:
    """Return what became of the tokens; each was trained on in every fragment."""
    usual = ("committed", "in hand", "refused", "dropped", "departed")
    lost = {fate: number for fate, number in tokens.items() if fate not in usual}
    words = [
        f"{tokens[fate]} {'counted' if fate == 'committed' else fate}"
        for fate in usual
        if tokens.get(fate)
    ]
    words += [f"{sum(lost.values())} lost with deaths"] if lost else []
    facts = {"tokens": ", ".join(words) + ", over all fragments"} if words else {}
    deaths = [f"{number} as {fate}" for fate, number in lost.items() if number]
    if len(deaths) > MAX_DEATHS:
        deaths[MAX_DEATHS:] = [f"and with {len(deaths) - MAX_DEATHS} more deaths"]
    return {**facts, "lost": "; ".join(deaths)} if deaths else facts


def reproduction(setup: Setup, command: str) -> list[PageLine]:
    """Return how to see a violation again: the command, and a test to paste."""
    arguments: Facts = {"settings": "SETTINGS", "islands": len(setup.islands)}
    if setup.store:
        arguments["store"] = True
    test = as_test(setup.plan, seed=setup.seed, arguments=arguments)
    values = pformat(_chosen(setup.settings), sort_dicts=False)
    settings = f"SETTINGS = RunSettings.from_dict(\n{indent(values, '    ')}\n)"
    test = test.replace("\n\n\n", f"\n\n{settings}\n\n\n", 1)
    lines = ["", "The same run again:", "", f"    {command}", "", "As a test:", ""]
    lines += ["    from atoll import RunSettings", *indent(test, "    ").splitlines()]
    return [*map(PageLine, lines)]


def _chosen(settings: RunSettings) -> dict[str, dict[str, Any]]:
    """Return what differs from the defaults, as tables of a run file."""
    usual = RunSettings().to_dict()
    tables = {
        table: {key: v for key, v in values.items() if usual[table].get(key) != v}
        for table, values in settings.to_dict().items()
    }
    return {table: values for table, values in tables.items() if values}


def opening_facts(setup: Setup) -> Facts:
    """Return the first object of the JSON: everything that determines the rest."""
    return {
        "what": "setup",
        "islands": list(setup.islands),
        "rounds": setup.rounds,
        "seed": setup.seed,
        "settings": setup.settings.to_dict(),
        "faults": [{"kind": f.kind, **f.values()} for f in setup.plan.faults],
        **({"store": True} if setup.store else {}),
    }


def entry_facts(entry: StoryEntry) -> Facts:
    """Return the object of one entry; a committed round has its roster."""
    facts: Facts = {
        "what": entry.what,
        "at_s": round(entry.at_s, 6),
        "who": entry.who,
        "text": entry.text,
    }
    if entry.commit is not None:
        facts["fragment"], facts["round"] = entry.commit.fragment, entry.commit.round
        facts["roster"] = dict(entry.commit.verdicts)
    return facts


def closing_facts(
    setup: Setup, result: Simulated, tallies: Mapping[str, IslandTally]
) -> Facts:
    """Return the last object of the JSON."""
    return {
        "what": "summary",
        "seconds": round(result.seconds, 6),
        "events": result.events,
        "rounds": list(result.rounds),
        "islands": {
            island: {
                **asdict(tallies[island]),
                "utilisation": round(result.utilisation.get(island, 0.0), 6),
                "deaths": result.deaths.get(island, 0),
                "digest": result.digests.get(island),
                "failure": _failure(island, result),
            }
            for island in setup.islands
        },
        "tokens": result.tokens,
        "violations": [str(each) for each in result.violations],
    }


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _listed(
    facts: Mapping[str, str], page: Page, tone: Tone = Tone.PLAIN
) -> list[PageLine]:
    """Return one line per fact, more where it is long."""
    return [
        PageLine(f"{'' if at else name:10}{text}", tone)
        for name, said in facts.items()
        for at, text in enumerate(wrap(said, page.width - 10))
    ]


def _agreement(result: Simulated) -> str:
    digests = sorted(set(result.digests.values()))
    islands = _plural(len(result.digests), "island")
    if not digests:
        return "no island saw the end"
    if len(digests) == 1:
        return f"{digests[0]}, on {islands} that saw the end"
    return f"{len(digests)} different ones on {islands}: {', '.join(digests)}"


def _failure(island: str, result: Simulated) -> str | None:
    error = result.failures.get(island)
    return None if error is None else f"{type(error).__name__}: {error}"


def _with_settings(test: str) -> str:
    return f"from atoll import RunSettings\n{test}"


WIDTH = 100
"""Columns of a page that is not on a terminal."""

MAX_STRIP = 48
"""Beyond so many islands a round is told by numbers and names alone."""

MARKS = {"counted": "#", "late": "~", "refused": "!", "absent": "."}
LEGEND = "   ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items())


class PageLine(NamedTuple):
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

    _alike: list[StoryEntry] = field(init=False, default_factory=list)
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

    def add(self, entry: StoryEntry) -> Iterator[PageLine]:
        """Yield the lines that an entry completes."""
        if self._alike and not _are_alike(self._alike[-1], entry):
            yield from self.flush()
        self._alike.append(entry)
        if self.is_whole:
            yield from self.flush()

    def flush(self) -> Iterator[PageLine]:
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

    def _rounds(
        self, alike: Sequence[StoryEntry], commit: CommitTrace
    ) -> Iterator[PageLine]:
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

    def _lines(
        self, at_s: float, who: str, text: str, tone: Tone
    ) -> Iterator[PageLine]:
        time_width = 10 if self.is_whole else 6
        left = f"{self.time(at_s):>{time_width}}  {who:{self.who_width}}  "
        first, *more = wrap(text, self.width - len(left))
        yield PageLine(left + first, tone)
        for line in more:
            yield PageLine(" " * len(left) + line, tone)

    def _roster(self, commit: CommitTrace) -> str:
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

    def _strip(self, commit: CommitTrace) -> str:
        verdicts = commit.verdicts
        return "".join(MARKS[verdicts.get(each, "absent")] for each in self.islands)

    def _with(self, verdict: str, commit: CommitTrace) -> list[str]:
        return [
            each
            for each in self.islands
            if commit.verdicts.get(each, "absent") == verdict
        ]


_TOGETHER = {"joins": "join", "leaves": "leave"}
"""What several islands may do in one line, and how it is said of them."""


def _are_alike(one: StoryEntry, other: StoryEntry) -> bool:
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


def tally_cells(tally: IslandTally) -> list[str]:
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
