"""The timeline as text: one entry for each event that matters to a person.

Rule 1: entries are in the order of their events.
Rule 2: messages and disk calls become entries only if `is_verbose`.
Rule 3: the end of a fault that ends by itself is an entry when its time is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from typing import NamedTuple

from atoll.simulate import faults
from atoll.simulate.network import ARROW
from atoll.simulate.plan import FaultPlan
from atoll.simulate.scheduler import TraceEvent
from atoll.wire import Roster


class Tone(StrEnum):
    """The colour of an entry."""

    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    FAULT = "fault"
    FAINT = "faint"


class CommitTrace(NamedTuple):
    """A committed round; its text is the detail of a `TraceEvent`.

    >>> str(CommitTrace(1, 12, {"i0": "counted", "i3": "late"}))
    'round 12 of fragment 1: i0 counted, i3 late'
    >>> str(CommitTrace(0, 9, {"i0": "counted", "i3": "counted"}, {"i3": 2}))
    'round 9 of fragment 0: i0 counted, i3 counted at age 2'
    """

    fragment: int
    round: int
    verdicts: Mapping[str, str]
    """By island on the roster, in the order of names."""

    ages: Mapping[str, int] = {}
    """By island whose update is older than this round."""

    def __str__(self) -> str:
        entries = ", ".join(
            f"{island} {verdict}{self._age(island)}"
            for island, verdict in self.verdicts.items()
        )
        return f"round {self.round} of fragment {self.fragment}: {entries}"

    def _age(self, island: str) -> str:
        age = self.ages.get(island, 0)
        return f"{_AT_AGE}{age}" if age else ""

    @classmethod
    def of(cls, fragment: int, round: int, roster: Roster) -> CommitTrace:
        """Return the commit of a roster."""
        return cls(
            fragment,
            round,
            {entry.island: str(entry.verdict) for entry in roster.entries},
            {entry.island: entry.age for entry in roster.entries if entry.age},
        )

    @classmethod
    def parsed(cls, text: str) -> CommitTrace:
        """Return the commit of this text, the inverse of `str`."""
        position, _, entries = text.partition(": ")
        _, round, _, _, fragment = position.split()
        verdicts, ages = {}, {}
        for entry in filter(None, entries.split(", ")):
            listed, _, age = entry.partition(_AT_AGE)
            island, _, verdict = listed.rpartition(" ")
            verdicts[island] = verdict
            if age:
                ages[island] = int(age)
        return cls(int(fragment), int(round), verdicts, ages)


_AT_AGE = " at age "


@dataclass(frozen=True, slots=True)
class StoryEntry:
    """One line of the story."""

    at_s: float
    subject: str
    action: str
    text: str
    tone: Tone = Tone.PLAIN
    commit: CommitTrace | None = None
    """The committed round, if it is one."""


@dataclass
class IslandTally:
    """Counts of one island over a timeline."""

    counted: int = 0
    ages: int = 0
    """The sum of the ages of its counted updates, in rounds."""

    late: int = 0
    refused: int = 0
    carried: int = 0
    dropped: int = 0
    bytes_up: int = 0
    """Sent, delivered or not, with about 256 bytes of overhead per message."""

    bytes_down: int = 0
    """Delivered to it."""


@dataclass
class Narrator:
    """Turns trace events into entries."""

    plan: FaultPlan
    islands: Sequence[str]
    write: Callable[[StoryEntry], None]
    is_verbose: bool = False
    """Whether every message and disk call is an entry as well."""

    tallies: dict[str, IslandTally] = field(init=False)
    _faults: dict[tuple[str, str], faults.Fault] = field(init=False)
    _pending: faults.Kill | faults.Freeze | None = field(init=False, default=None)
    """A fault that has just begun; the next event shows whether it took effect."""

    _cause: faults.Fault | None = field(init=False, default=None)
    """The cause of the crash or freeze that this event reports."""

    _begun: int = field(init=False, default=0)
    _ends: list[tuple[float, int, faults.Fault]] = field(
        init=False, default_factory=list
    )
    _lasting: Counter[tuple[str, str]] = field(init=False, default_factory=Counter)
    """Number of present faults by subject and text of their end."""

    def __post_init__(self) -> None:
        self.tallies = {island: IslandTally() for island in self.islands}
        self._faults = {
            (fault.kind, str(fault.values())): fault for fault in self.plan.faults
        }

    def add(self, event: TraceEvent) -> None:
        """Write the entry of an event, if it has one."""
        while self._ends and self._ends[0][0] <= event.at_s:
            self._end(*heappop(self._ends))
        self._settle(event)
        if event.subject == "fault":
            self._begin(event)
        elif event.action == "commit":
            self._count(event)
        elif event.action in _PHRASES:
            self._describe(event)
        else:
            self._count_bytes(event)

    def _begin(self, event: TraceEvent) -> None:
        fault = self._faults[event.action, event.detail]
        if isinstance(fault, faults.Kill | faults.Freeze):
            self._pending = fault
            return
        subject, text = fault_subject(fault), describe_start(fault)
        self.write(StoryEntry(event.at_s, subject, fault.kind, text, Tone.FAULT))
        if isinstance(fault, faults.ClockJump | faults.ClockDrift):
            return
        self._lasting[subject, describe_end(fault)] += 1
        for_s = lasts_s(fault)
        if for_s is not None:
            self._begun += 1
            heappush(self._ends, (event.at_s + for_s, self._begun, fault))

    def _end(self, at_s: float, _: int, fault: faults.Fault) -> None:
        """Write that a fault is over, unless an equal one still lasts."""
        subject, text = fault_subject(fault), describe_end(fault)
        self._lasting[subject, text] -= 1
        if not self._lasting[subject, text]:
            self.write(StoryEntry(at_s, subject, f"{fault.kind} over", text, Tone.GOOD))

    def _settle(self, event: TraceEvent) -> None:
        """Write the effect of a kill or a freeze; a dead process has none."""
        fault, self._pending = self._pending, None
        if fault is None:
            return
        at_s, subject, action, _ = event
        if subject == fault.process and action in ("crash", "freeze"):
            self._cause = fault
            return
        text = f"is not running: this {fault.kind} changes nothing"
        self.write(StoryEntry(at_s, fault.process, fault.kind, text, Tone.FAINT))

    def _count(self, event: TraceEvent) -> None:
        commit = CommitTrace.parsed(event.detail)
        for island, verdict in commit.verdicts.items():
            tally = self.tallies[island]
            tally.counted += verdict == "counted"
            tally.ages += commit.ages.get(island, 0) * (verdict == "counted")
            tally.late += verdict == "late"
            tally.refused += verdict == "refused"
        at_s, subject, action, text = event
        self.write(StoryEntry(at_s, subject, action, text, commit=commit))

    def _describe(self, event: TraceEvent) -> None:
        at_s, subject, action, detail = event
        phrase = _PHRASES[action]
        tally = self.tallies.get(subject, IslandTally())
        tally.carried += action == "carry"
        tally.dropped += action == "drop"
        text = phrase.text(detail)
        if self._cause is not None:
            text, self._cause = describe_start(self._cause), None
        if text:
            self.write(StoryEntry(at_s, subject, action, text, phrase.tone))

    def _count_bytes(self, event: TraceEvent) -> None:
        """Count the bytes of a message; write an entry only if `is_verbose`."""
        at_s, link, action, detail = event
        if action in ("send", "deliver"):
            source, _, destination = link.partition("->")
            size_bytes = int(detail.rpartition(", ")[2].partition(" ")[0])
            if action == "send" and source in self.tallies:
                self.tallies[source].bytes_up += size_bytes
            elif action == "deliver" and destination in self.tallies:
                self.tallies[destination].bytes_down += size_bytes
        if self.is_verbose:
            self.write(StoryEntry(at_s, link, action, f"{action} {detail}", Tone.FAINT))


@dataclass(frozen=True)
class _Phrase:
    text: Callable[[str], str]
    tone: Tone = Tone.PLAIN


def _start(detail: str) -> str:
    return "" if detail == "incarnation 1" else "starts again"


def _join(detail: str) -> str:
    return "joins" if detail == "incarnation 1" else f"joins again, as {detail}"


def _open(detail: str) -> str:
    if detail == "no weights":
        return "opens a journal without weights"
    rounds = list(dict.fromkeys(detail.removeprefix("rounds ").split()))
    return f"opens its journal, at round{'s' * (len(rounds) > 1)} {_listed(rounds)}"


def _listed(items: Sequence[str]) -> str:
    *others, last = items
    return f"{', '.join(others)} and {last}" if others else last


def _power_cut(detail: str) -> str:
    files, survivors = detail.removesuffix(" survive").split(" files, ")
    return "" if files == "0" else f"loses power: {survivors} of {files} files survive"


def _carry(detail: str) -> str:
    through = int(detail.removeprefix("at round ").partition(":")[0])
    return f"missed a round, and carries the work into round {through + 1}"


def _drop(detail: str) -> str:
    return f"missed too many rounds: its work is dropped {detail}"


def _refuse(detail: str) -> str:
    position, _, reason = detail.partition(": ")
    return f"was refused ({reason}), and takes the anchor {position}"


_PHRASES: Mapping[str, _Phrase] = {
    "start": _Phrase(_start, Tone.GOOD),
    "crash": _Phrase(lambda detail: "crashes", Tone.BAD),
    "freeze": _Phrase(lambda detail: "stands still", Tone.BAD),
    "thaw": _Phrase(lambda detail: "resumes", Tone.GOOD),
    "power cut": _Phrase(_power_cut, Tone.BAD),
    "open": _Phrase(_open, Tone.GOOD),
    "join": _Phrase(_join, Tone.GOOD),
    "found": _Phrase(lambda detail: f"founds the run: {detail}", Tone.GOOD),
    "begin": _Phrase(lambda detail: f"opens the first round to {detail}", Tone.GOOD),
    "recover": _Phrase(lambda detail: f"takes {detail} from an island", Tone.GOOD),
    "carry": _Phrase(_carry),
    "drop": _Phrase(_drop, Tone.BAD),
    "refuse": _Phrase(_refuse, Tone.BAD),
    "lapse": _Phrase(lambda detail: "is silent; its lease has run out", Tone.BAD),
    "revive": _Phrase(lambda detail: "sends heartbeats again", Tone.GOOD),
    "leave": _Phrase(lambda detail: "leaves", Tone.GOOD),
    "pause": _Phrase(lambda detail: f"pauses below quorum: {detail}", Tone.BAD),
    "resume": _Phrase(lambda detail: f"resumes: {detail}", Tone.GOOD),
}


NETWORK = "network"
"""The subject of a fault of messages."""

MAX_NAMES = 12
"""Longer lists of names are shortened."""


def few(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others.

    >>> few(["i0", "i1"])
    'i0 i1'
    """
    if len(names) <= MAX_NAMES:
        return " ".join(names)
    shown = MAX_NAMES - 2
    return f"{' '.join(names[:shown])} and {len(names) - shown} more"


def fault_kinds(plan: FaultPlan) -> str:
    """Return the kinds of a plan's faults, the most frequent first.

    >>> fault_kinds(FaultPlan().loss("*", rate=1).kill("i1", at_s=1).kill("i0", at_s=2))
    '3 faults (2 kill, 1 loss)'
    """
    counts = Counter(fault.kind for fault in plan.faults)
    ranked = sorted(counts.items(), key=lambda kind: (-kind[1], kind[0]))
    number = len(plan.faults)
    listed = ", ".join(f"{count} {kind}" for kind, count in ranked)
    return f"{number} fault{'s' * (number != 1)} ({listed})"


def fault_subject(fault: faults.Fault) -> str:
    """Return the subject of a fault: a process or the network."""
    return fault.process if isinstance(fault, faults.ProcessFault) else NETWORK


def describe_start(fault: faults.Fault) -> str:
    """Return the effect of a fault, and its duration."""
    return f"{_wrong(fault)}{_while(lasts_s(fault))}"


def describe_end(fault: faults.Fault) -> str:
    """Return the text for the end of a fault."""
    match fault:
        case faults.Slow():
            return "is no longer slow"
        case faults.FullDisk():
            return "has room on its disk again"
        case faults.ReadOnlyDisk():
            return "can write to its disk again"
        case faults.Outage():
            return "answers again"
        case faults.ListLag():
            return "has lists that are up to date again"
        case faults.RosterLag():
            return "gets rosters without delay again"
        case faults.Partition():
            return f"the cut between {_groups(fault)} heals"
        case faults.LinkFault():
            return f"{_NOUNS[type(fault)]} of {_messages(fault.link)} is over"
        case _:
            raise AssertionError(f"{fault} has no text for its end")


def lasts_s(fault: faults.Fault) -> float | None:
    """Return the duration of a fault; None for no end, or no duration."""
    match fault:
        case (
            faults.Freeze()
            | faults.Slow()
            | faults.Partition()
            | faults.FullDisk()
            | faults.ReadOnlyDisk()
            | faults.LinkFault()
            | faults.Outage()
            | faults.ListLag()
            | faults.RosterLag()
        ):
            return fault.for_s
        case _:
            return None


def seconds(value: float) -> str:
    """Return a duration with three digits."""
    return f"{value:.0f} s" if abs(value) >= 1000 else f"{value:.3g} s"


def _wrong(fault: faults.Fault) -> str:
    match fault:
        case faults.Kill(back_after_s=None):
            return "crashes, and will not come back"
        case faults.Kill():
            return f"crashes, to be back in {seconds(fault.back_after_s or 0.0)}"
        case faults.Freeze():
            return "stands still"
        case faults.Slow():
            return f"takes {fault.factor:g} times as long for its work"
        case faults.Partition():
            return f"is cut between {_groups(fault)}"
        case faults.FullDisk():
            return "has no room left on its disk"
        case faults.ReadOnlyDisk():
            return "cannot write to its disk"
        case faults.Outage():
            return f"fails {_share(fault.rate)}requests, done or not"
        case faults.ListLag():
            return f"has lists that are up to {seconds(fault.by_s)} late"
        case faults.RosterLag():
            return f"gets rosters {seconds(fault.by_s)} after their decision"
        case faults.Damage():
            below = f" below {fault.prefix}" if fault.prefix else ""
            return f"has an object{below} damaged: {fault.how}"
        case faults.ClockJump():
            return _jump(fault)
        case faults.ClockDrift():
            return f"has a clock that runs at {fault.rate:g} of true time from now on"
        case faults.LinkFault():
            return _wrong_messages(fault)
        case _:
            raise AssertionError(f"no text for {fault}")


def _wrong_messages(fault: faults.LinkFault) -> str:
    messages = _messages(fault.link)
    match fault:
        case faults.DelayFault():
            return f"{_share(fault.rate)}{messages} take {seconds(fault.by_s)} longer"
        case faults.Reorder():
            max_delay = seconds(fault.by_s)
            share = _share(fault.rate)
            return f"{share}{messages} overtake each other by up to {max_delay}"
        case faults.Loss():
            return f"{_share(fault.rate)}{messages} are lost"
        case faults.Duplicate():
            return f"{_share(fault.rate)}{messages} arrive twice"
        case faults.Corrupt():
            return f"{_share(fault.rate)}{messages} arrive changed"
        case faults.Throttle():
            direction = "" if ARROW in fault.link else " in each direction"
            return f"{messages} get {fault.bytes_per_s:g} bytes per second{direction}"
        case _:
            raise AssertionError(f"no text for {fault}")


_NOUNS: dict[type[faults.Fault], str] = {
    faults.DelayFault: "delay",
    faults.Reorder: "disorder",
    faults.Loss: "loss",
    faults.Duplicate: "doubling",
    faults.Corrupt: "corruption",
    faults.Throttle: "throttling",
}


def _jump(fault: faults.ClockJump) -> str:
    if fault.by_s < 0:
        return f"has a clock that stands still for {seconds(-fault.by_s)}"
    return f"has a clock that jumps ahead by {seconds(fault.by_s)}"


def _groups(fault: faults.Partition) -> str:
    return " | ".join([*map(few, fault.groups), "all others"])


def _messages(link: str) -> str:
    source, arrow, destination = link.partition(ARROW)
    if link == "*":
        return "messages everywhere"
    return (
        f"messages from {source} to {destination}" if arrow else f"messages of {source}"
    )


def _share(rate: float) -> str:
    return "all " if rate >= 1.0 else f"{100 * rate:.3g} % of "


def _while(for_s: float | None) -> str:
    return f", for {seconds(for_s)}" if for_s is not None else ""
