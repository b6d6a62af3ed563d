"""The output of `atoll simulate`: heading, page, lanes and summary, as text and JSON.

A page has aligned lines, and is equal for equal runs.
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
"""Deaths that are listed with the tokens lost; the others are counted."""

Facts = dict[str, Any]


def heading(setup: Setup, page: Page) -> list[PageLine]:
    """Return the lines before a run: its islands, rounds, seed and faults."""
    sync, run = setup.settings.sync, setup.settings.run
    names = " to ".join(dict.fromkeys((setup.islands[0], setup.islands[-1])))
    tokens = f", or {run.end_tokens} tokens" if run.end_tokens is not None else ""
    faults = f": {fault_kinds(setup.plan)}" if setup.plan.faults else ""
    fragments = _plural(sync.num_fragments, "fragment")
    facts = {
        "islands": f"{len(setup.islands)}, {names}, quorum {run.quorum}",
        "rounds": f"{setup.rounds}{tokens}, in {fragments}; {sync.sync_every} inner "
        f"steps each, overlap {sync.overlap_steps}",
        **_asynchronous(setup.settings),
        "seed": str(setup.seed),
        "faults": f"{setup.origin}{faults}",
        **({"place": "a bucket, without a coordinator"} if setup.store else {}),
    }
    if page.has_strip:
        facts["marks"] = f"{LEGEND}   (one per island, in order)"
    return [*_listed(facts, page), PageLine("")]


def _asynchronous(settings: RunSettings) -> dict[str, str]:
    """Return the line about the rounds of an asynchronous run."""
    if not settings.sync.is_async:
        return {}
    rules = settings.asynchronous
    buffer = "the live islands" if rules.buffer is None else f"{rules.buffer} updates"
    grace = "half of the overlap" if rules.grace_s is None else f"{rules.grace_s:g} s"
    weights = f"staleness {rules.staleness}"
    return {"async": f"grace {grace}, a buffer of {buffer}, {weights}"}


def summary(
    setup: Setup, page: Page, result: Simulated, tallies: Mapping[str, IslandTally]
) -> list[PageLine]:
    """Return the lines after the lanes: a table of islands, totals and the verdict."""
    is_async = setup.settings.sync.is_async
    rows = [["island", *tally_columns(is_async), "utilised", "deaths", "anchor"]]
    for island in setup.islands:
        utilised = f"{result.utilisation.get(island, 0.0):.1%}"
        deaths = str(result.deaths.get(island, 0))
        end = result.digests.get(island, "")[:8] or "-"
        cells = tally_cells(tallies[island], is_async=is_async)
        rows.append([island, *cells, utilised, deaths, end])
    done = list(dict.fromkeys(result.rounds))
    rounds = " and ".join(map(str, done)) or "none"
    scope = "by fragment" if len(done) > 1 else "in every fragment"
    time = f"{page.time(result.seconds)} of virtual time, {result.events} events"
    facts = {
        "rounds": f"{rounds} of {setup.rounds}, {scope}",
        "time": time,
        **_fates(result.tokens),
        "anchor": _agreement(result),
    }
    lines = [
        *map(PageLine, table(_narrowed(rows, page.width))),
        PageLine(""),
        *_listed(facts, page),
    ]
    return [*lines, *_verdict(result, page)]


def _verdict(result: Simulated, page: Page) -> list[PageLine]:
    if result.violations:
        return [
            line
            for violation in result.violations
            for line in _listed({"violated": str(violation)}, page, Tone.BAD)
        ]
    good_lines = _listed({"held": "every invariant"}, page, Tone.GOOD)
    if result.digests:
        return good_lines
    is_late = result.seconds >= LIMIT_S
    reason = "time ran out" if is_late else "too few islands are left to continue"
    end = {"ended": f"before its last round: {reason}"}
    return [*_listed(end, page, Tone.BAD), *good_lines]


def _fates(tokens: Mapping[str, int]) -> dict[str, str]:
    """Return the lines about tokens, each of which counts once per fragment."""
    fates = ("committed", "in hand", "refused", "dropped", "departed")
    lost = {fate: number for fate, number in tokens.items() if fate not in fates}
    counts = [
        f"{tokens[fate]} {'counted' if fate == 'committed' else fate}"
        for fate in fates
        if tokens.get(fate)
    ]
    counts += [f"{sum(lost.values())} lost with deaths"] if lost else []
    facts = {"tokens": ", ".join(counts) + ", over all fragments"} if counts else {}
    deaths = [f"{number} as {fate}" for fate, number in lost.items() if number]
    if len(deaths) > MAX_DEATHS:
        deaths[MAX_DEATHS:] = [f"and with {len(deaths) - MAX_DEATHS} more deaths"]
    return {**facts, "lost": "; ".join(deaths)} if deaths else facts


def reproduction(setup: Setup, command: str) -> list[PageLine]:
    """Return the command that reproduces a violation, and a test to paste."""
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
    """Return the settings that differ from the defaults, as tables of a run file."""
    default = RunSettings().to_dict()
    tables = {
        table: {key: v for key, v in values.items() if default[table].get(key) != v}
        for table, values in settings.to_dict().items()
    }
    return {table: values for table, values in tables.items() if values}


def opening_facts(setup: Setup) -> Facts:
    """Return the first object of the JSON, which determines all others."""
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
        "what": entry.action,
        "at_s": round(entry.at_s, 6),
        "who": entry.subject,
        "text": entry.text,
    }
    if entry.commit is not None:
        facts["fragment"], facts["round"] = entry.commit.fragment, entry.commit.round
        facts["roster"] = dict(entry.commit.verdicts)
        if entry.commit.ages:
            facts["ages"] = dict(entry.commit.ages)
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
        "violations": [str(violation) for violation in result.violations],
    }


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _listed(
    facts: Mapping[str, str], page: Page, tone: Tone = Tone.PLAIN
) -> list[PageLine]:
    """Return one line per fact, or several if it is long."""
    return [
        PageLine(f"{'' if number else name:10}{text}", tone)
        for name, value in facts.items()
        for number, text in enumerate(wrap(value, page.width - 10))
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


MAX_LANES = 48
"""Of more islands, those that counted in every round have no lane."""

DIED, STOOD_STILL = "x", "z"
LANE_MARKS = {"crash": DIED, "freeze": STOOD_STILL}
"""Marks of entries, which replace the mark of the next round."""

FROM_BEST = (" ", "-", "#", "~", ".", "!", STOOD_STILL, DIED)
"""Marks of lanes; of merged rounds the last one here is shown."""


class Lanes:
    """One lane for each island and the coordinator: a mark for each committed round."""

    def __init__(self, islands: Sequence[str], *, has_coordinator: bool) -> None:
        self._islands = islands
        self._coordinator = (COORDINATOR,) if has_coordinator else ()
        self._columns: list[dict[str, str]] = []
        self._faults: dict[str, str] = {}
        """Marks of the processes that died or stood still since the last round."""

    def add(self, entry: StoryEntry) -> None:
        """Take note of a round, a death or a standstill."""
        if entry.action in LANE_MARKS:
            self._faults[entry.subject] = LANE_MARKS[entry.action]
        elif entry.commit is not None:
            verdicts = entry.commit.verdicts
            marks = {
                island: MARKS[verdicts.get(island, "absent")]
                for island in self._islands
            }
            marks |= dict.fromkeys(self._coordinator, "-")
            self._columns.append(marks | self._faults)
            self._faults = {}

    def lines(self, width: int) -> Iterator[PageLine]:
        """Yield the lanes, with rounds merged until they fit into `width`."""
        columns = [*self._columns, *([self._faults] if self._faults else [])]
        if not columns:
            return
        names = [*self._shown(columns), *self._coordinator]
        margin = max([len("lanes"), *map(len, names)]) + 2
        rounds = -(-len(columns) // max(16, width - margin))
        scope = f"{rounds} rounds, the worst of them" if rounds > 1 else "a round"
        yield PageLine(
            f"{'lanes':{margin}}one mark for {scope}; {DIED} died   "
            f"{STOOD_STILL} stood still"
        )
        for name in names:
            marks = [column.get(name, " ") for column in columns]
            lane = "".join(
                max(marks[first : first + rounds], key=FROM_BEST.index)
                for first in range(0, len(marks), rounds)
            )
            tone = Tone.FAULT if {*lane} - {" ", "-", "#"} else Tone.PLAIN
            yield PageLine(f"{name:{margin}}{lane}".rstrip(), tone)
        if others := len(self._islands) + len(self._coordinator) - len(names):
            yield PageLine(f"and {others} more islands")

    def _shown(self, columns: Sequence[Mapping[str, str]]) -> list[str]:
        if len(self._islands) <= MAX_LANES:
            return [*self._islands]
        return [
            island
            for island in self._islands
            if any(column.get(island, "#") != "#" for column in columns)
        ][:MAX_LANES]


WIDTH = 100
"""Columns of a page that is not on a terminal."""

MAX_STRIP = 48
"""Islands up to which a round is shown with one mark per island."""

MARKS = {"counted": "#", "late": "~", "refused": "!", "absent": "."}
LEGEND = "   ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items())


class PageLine(NamedTuple):
    """A line of a page."""

    text: str
    tone: Tone = Tone.PLAIN


@dataclass
class Page:
    """Turns entries into lines. Rounds with equal rosters are one line."""

    islands: Sequence[str]
    rounds: int
    width: int = WIDTH
    is_verbose: bool = False
    """Whether every entry is a line, and times have milliseconds."""

    is_async: bool = False
    """Whether a round takes who has arrived, so that others are not missing."""

    _group: list[StoryEntry] = field(init=False, default_factory=list)
    """Entries that will be one line."""

    @property
    def has_strip(self) -> bool:
        return len(self.islands) <= MAX_STRIP

    @property
    def subject_width(self) -> int:
        subjects = [*self.islands, COORDINATOR, f"rounds {self.rounds}-{self.rounds}"]
        if self.is_verbose:
            subjects += [f"{COORDINATOR}->{island}" for island in self.islands]
        return max(map(len, subjects))

    def add(self, entry: StoryEntry) -> Iterator[PageLine]:
        """Yield the lines that an entry completes."""
        if self._group and not _can_share_line(self._group[-1], entry):
            yield from self.flush()
        self._group.append(entry)
        if self.is_verbose:
            yield from self.flush()

    def flush(self) -> Iterator[PageLine]:
        """Yield the lines of the present group of entries."""
        entries, self._group = self._group, []
        if entries and entries[0].commit:
            yield from self._rounds(entries, entries[0].commit)
        elif len(entries) > 1:
            subjects = {entry.subject for entry in entries}
            names = few([island for island in self.islands if island in subjects])
            text = f"{_PLURALS[entries[0].text]}: {names}"
            subject = f"{len(entries)} islands"
            yield from self._lines(entries[0].at_s, subject, text, entries[0].tone)
        elif entries:
            (entry,) = entries
            yield from self._lines(entry.at_s, entry.subject, entry.text, entry.tone)

    def _rounds(
        self, entries: Sequence[StoryEntry], commit: CommitTrace
    ) -> Iterator[PageLine]:
        subject, text = f"round {commit.round} f{commit.fragment}", self._roster(commit)
        if len(entries) > 1:
            numbers = [entry.commit.round for entry in entries if entry.commit]
            subject = _span(min(numbers), max(numbers))
            text += f"; {len(entries)} outcomes until {self.time(entries[-1].at_s)}"
        is_full = len(self._with("counted", commit)) == len(self.islands)
        is_full = is_full or (self.is_async and not self._with("refused", commit))
        tone = Tone.PLAIN if is_full else Tone.FAULT
        yield from self._lines(entries[0].at_s, subject, text, tone)

    def time(self, at_s: float) -> str:
        """Return an instant of virtual time as minutes and seconds."""
        if self.is_verbose:
            thousandths = int(at_s * 1000)
            return f"{thousandths // 60_000}:{thousandths % 60_000 / 1000:06.3f}"
        return f"{int(at_s) // 60}:{int(at_s) % 60:02}"

    def _lines(
        self, at_s: float, subject: str, text: str, tone: Tone
    ) -> Iterator[PageLine]:
        time_width = 10 if self.is_verbose else 6
        margin = f"{self.time(at_s):>{time_width}}  {subject:{self.subject_width}}  "
        first, *others = wrap(text, self.width - len(margin))
        yield PageLine(margin + first, tone)
        for line in others:
            yield PageLine(" " * len(margin) + line, tone)

    def _roster(self, commit: CommitTrace) -> str:
        """Return one mark per island, and the islands that did not count."""
        counted, *others = (self._with(verdict, commit) for verdict in MARKS)
        counts = [f"{len(counted) or 'no island'} counted" + ", void" * (not counted)]
        if len(counted) == len(self.islands) > 1:
            counts = [f"all {len(counted)} counted"]
        counts += [
            f"{few(names)} {verdict}"
            for verdict, names in zip(list(MARKS)[1:], others, strict=True)
            if names and not (self.is_async and verdict == "absent")
        ]
        counts += [
            f"{few([name for name, age in commit.ages.items() if age == rounds])} "
            f"at age {rounds}"
            for rounds in sorted({*commit.ages.values()})
        ]
        text = ", ".join(counts)
        return f"{self._strip(commit)}  {text}" if self.has_strip else text

    def _strip(self, commit: CommitTrace) -> str:
        verdicts = commit.verdicts
        return "".join(MARKS[verdicts.get(island, "absent")] for island in self.islands)

    def _with(self, verdict: str, commit: CommitTrace) -> list[str]:
        return [
            island
            for island in self.islands
            if commit.verdicts.get(island, "absent") == verdict
        ]


_PLURALS = {"joins": "join", "leaves": "leave"}
"""Texts of entries that are combined into one line, with their plurals."""


def _can_share_line(entry: StoryEntry, other: StoryEntry) -> bool:
    if entry.commit and other.commit:
        return entry.commit[2:] == other.commit[2:]
    return entry.text == other.text and entry.text in _PLURALS


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
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _narrowed(rows: Sequence[Sequence[str]], width: int) -> Sequence[Sequence[str]]:
    """Return the rows of a table without columns that a narrow page has no room for."""
    for name in ("kB received", "kB sent", "dropped", "carried"):
        if len(table(rows)[0]) <= width:
            break
        index = rows[0].index(name)
        rows = [[*row[:index], *row[index + 1 :]] for row in rows]
    return rows


def tally_columns(is_async: bool) -> list[str]:
    """Return the columns of a table of islands. In an asynchronous run none is late."""
    of_rosters = ["counted", "age" if is_async else "late", "refused"]
    return [*of_rosters, "carried", "dropped", "kB sent", "kB received"]


def tally_cells(tally: IslandTally, *, is_async: bool) -> list[str]:
    """Return the cells of one island, in the order of `tally_columns`."""
    late = f"{tally.ages / max(1, tally.counted):.1f}" if is_async else str(tally.late)
    work = map(str, (tally.refused, tally.carried, tally.dropped))
    sizes = _kb(tally.bytes_up), _kb(tally.bytes_down)
    return [str(tally.counted), late, *work, *sizes]


def _kb(size_bytes: int) -> str:
    return f"{size_bytes / 1000:.1f}"


def _span(low: int, high: int) -> str:
    return f"round {low}" if low == high else f"rounds {low}-{high}"
