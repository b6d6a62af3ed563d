"""The timeline as a story: one entry in words for each thing that concerns a person.

Rule 1: entries are in the order in which things happened.
Rule 2: messages and disk calls become entries only when everything is asked for.
Rule 3: the end of a fault that ends by itself is an entry when its time is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from typing import NamedTuple

from atoll.simulate.faults import (
    ClockDrift,
    ClockJump,
    Corrupt,
    Damage,
    DelayFault,
    Duplicate,
    Fault,
    Freeze,
    FullDisk,
    Kill,
    LinkFault,
    ListLag,
    Loss,
    Outage,
    Partition,
    ProcessFault,
    ReadOnlyDisk,
    Reorder,
    RosterLag,
    Slow,
    Throttle,
)
from atoll.simulate.network import ARROW
from atoll.simulate.plan import FaultPlan
from atoll.simulate.scheduler import TraceEvent


class Tone(StrEnum):
    """How an entry sounds."""

    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    FAULT = "fault"
    FAINT = "faint"


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


@dataclass(frozen=True, slots=True)
class StoryEntry:
    """One thing that happened."""

    at_s: float
    who: str
    what: str
    text: str
    tone: Tone = Tone.PLAIN
    commit: CommitTrace | None = None
    """The round, if this is one that was committed."""


@dataclass
class IslandTally:
    """What the timeline says of one island."""

    counted: int = 0
    late: int = 0
    refused: int = 0
    carried: int = 0
    dropped: int = 0
    bytes_up: int = 0
    """Of all that it sent, arrived or not, with about 256 bytes for each message."""

    bytes_down: int = 0
    """Of all that reached it."""


@dataclass
class Narrator:
    """Hears everything that happens, and writes entries."""

    plan: FaultPlan
    islands: Sequence[str]
    write: Callable[[StoryEntry], None]
    is_whole: bool = False
    """Whether every message and disk call is an entry too."""

    tallies: dict[str, IslandTally] = field(init=False)
    _faults: dict[tuple[str, str], Fault] = field(init=False)
    _struck: Kill | Freeze | None = field(init=False, default=None)
    """A fault that has just begun, until the process is seen to obey or not."""

    _cause: Fault | None = field(init=False, default=None)
    """Why the process that is about to be heard of crashes or stands still."""

    _begun: int = field(init=False, default=0)
    _ends: list[tuple[float, int, Fault]] = field(init=False, default_factory=list)
    _lasting: Counter[tuple[str, str]] = field(init=False, default_factory=Counter)
    """How many faults that last would be ended by the same words."""

    def __post_init__(self) -> None:
        self.tallies = {island: IslandTally() for island in self.islands}
        self._faults = {
            (each.kind, str(each.values())): each for each in self.plan.faults
        }

    def hear(self, happening: TraceEvent) -> None:
        """Write what a happening is to a person, if it is anything."""
        while self._ends and self._ends[0][0] <= happening.at_s:
            self._end(*heappop(self._ends))
        self._settle(happening)
        if happening.who == "fault":
            self._begin(happening)
        elif happening.what == "commit":
            self._count(happening)
        elif happening.what in _PHRASES:
            self._say(happening)
        else:
            self._weigh(happening)

    def _begin(self, happening: TraceEvent) -> None:
        fault = self._faults[happening.what, happening.about]
        if isinstance(fault, Kill | Freeze):
            self._struck = fault
            return
        who, text = fault_subject(fault), describe_start(fault)
        self.write(StoryEntry(happening.at_s, who, fault.kind, text, Tone.FAULT))
        if isinstance(fault, ClockJump | ClockDrift):
            return
        self._lasting[who, describe_end(fault)] += 1
        for_s = lasts_s(fault)
        if for_s is not None:
            self._begun += 1
            heappush(self._ends, (happening.at_s + for_s, self._begun, fault))

    def _end(self, at_s: float, _: int, fault: Fault) -> None:
        """Write that something is over, unless another fault keeps it up."""
        who, text = fault_subject(fault), describe_end(fault)
        self._lasting[who, text] -= 1
        if not self._lasting[who, text]:
            self.write(StoryEntry(at_s, who, f"{fault.kind} over", text, Tone.GOOD))

    def _settle(self, happening: TraceEvent) -> None:
        """Write what a kill or a freeze did; a process that is down obeys neither."""
        fault, self._struck = self._struck, None
        if fault is None:
            return
        at_s, who, what, _ = happening
        if who == fault.process and what in ("crash", "freeze"):
            self._cause = fault
            return
        text = f"is not running: this {fault.kind} changes nothing"
        self.write(StoryEntry(at_s, fault.process, fault.kind, text, Tone.FAINT))

    def _count(self, happening: TraceEvent) -> None:
        commit = CommitTrace.parsed(happening.about)
        for island, verdict in commit.verdicts.items():
            tally = self.tallies[island]
            tally.counted += verdict == "counted"
            tally.late += verdict == "late"
            tally.refused += verdict == "refused"
        at_s, who, what, text = happening
        self.write(StoryEntry(at_s, who, what, text, commit=commit))

    def _say(self, happening: TraceEvent) -> None:
        at_s, who, what, about = happening
        saying = _PHRASES[what]
        tally = self.tallies.get(who, IslandTally())
        tally.carried += what == "carry"
        tally.dropped += what == "drop"
        text = saying.words(about)
        if self._cause is not None:
            text, self._cause = describe_start(self._cause), None
        if text:
            self.write(StoryEntry(at_s, who, what, text, saying.tone))

    def _weigh(self, happening: TraceEvent) -> None:
        """Take note of a message's bytes; messages and disk calls are many."""
        at_s, link, what, about = happening
        if what in ("send", "deliver"):
            source, _, destination = link.partition("->")
            size_bytes = int(about.rpartition(", ")[2].partition(" ")[0])
            if what == "send" and source in self.tallies:
                self.tallies[source].bytes_up += size_bytes
            elif what == "deliver" and destination in self.tallies:
                self.tallies[destination].bytes_down += size_bytes
        if self.is_whole:
            self.write(StoryEntry(at_s, link, what, f"{what} {about}", Tone.FAINT))


@dataclass(frozen=True)
class _Phrase:
    words: Callable[[str], str]
    tone: Tone = Tone.PLAIN


def _start(about: str) -> str:
    return "" if about == "incarnation 1" else "starts again"


def _join(about: str) -> str:
    return "joins" if about == "incarnation 1" else f"joins again, as {about}"


def _open(about: str) -> str:
    if about == "no weights":
        return "opens a journal without weights"
    rounds = list(dict.fromkeys(about.removeprefix("rounds ").split()))
    return f"opens its journal, at round{'s' * (len(rounds) > 1)} {_listed(rounds)}"


def _listed(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def _power_cut(about: str) -> str:
    files, survivors = about.removesuffix(" survive").split(" files, ")
    return "" if files == "0" else f"loses power: {survivors} of {files} files survive"


def _carry(about: str) -> str:
    through = int(about.removeprefix("at round ").partition(":")[0])
    return f"missed a round, and carries the work into round {through + 1}"


def _drop(about: str) -> str:
    return f"missed too many rounds: its work is dropped {about}"


def _refuse(about: str) -> str:
    where, _, reason = about.partition(": ")
    return f"was refused ({reason}), and takes the anchor {where}"


_PHRASES: Mapping[str, _Phrase] = {
    "start": _Phrase(_start, Tone.GOOD),
    "crash": _Phrase(lambda about: "crashes", Tone.BAD),
    "freeze": _Phrase(lambda about: "stands still", Tone.BAD),
    "thaw": _Phrase(lambda about: "goes on", Tone.GOOD),
    "power cut": _Phrase(_power_cut, Tone.BAD),
    "open": _Phrase(_open, Tone.GOOD),
    "join": _Phrase(_join, Tone.GOOD),
    "found": _Phrase(lambda about: f"founds the run: {about}", Tone.GOOD),
    "begin": _Phrase(lambda about: f"opens the first round to {about}", Tone.GOOD),
    "recover": _Phrase(lambda about: f"takes {about} from an island", Tone.GOOD),
    "carry": _Phrase(_carry),
    "drop": _Phrase(_drop, Tone.BAD),
    "refuse": _Phrase(_refuse, Tone.BAD),
    "lapse": _Phrase(lambda about: "is silent; its lease has run out", Tone.BAD),
    "revive": _Phrase(lambda about: "is heard again", Tone.GOOD),
    "leave": _Phrase(lambda about: "leaves", Tone.GOOD),
    "pause": _Phrase(lambda about: f"pauses below quorum: {about}", Tone.BAD),
    "resume": _Phrase(lambda about: f"goes on: {about}", Tone.GOOD),
}


NETWORK = "network"
"""Who a fault of messages happens to."""

MAX_NAMES = 12
"""A longer list of names is cut short."""


def few(names: Sequence[str]) -> str:
    """Return some names and how many more there are.

    >>> few(["i0", "i1"])
    'i0 i1'
    """
    if len(names) <= MAX_NAMES:
        return " ".join(names)
    shown = MAX_NAMES - 2
    return f"{' '.join(names[:shown])} and {len(names) - shown} more"


def fault_kinds(plan: FaultPlan) -> str:
    """Return what a plan is made of, most frequent kind first.

    >>> fault_kinds(FaultPlan().loss("*", rate=1).kill("i1", at_s=1).kill("i0", at_s=2))
    '3 faults (2 kill, 1 loss)'
    """
    counts = Counter(fault.kind for fault in plan.faults)
    ranked = sorted(counts.items(), key=lambda kind: (-kind[1], kind[0]))
    number = len(plan.faults)
    listed = ", ".join(f"{count} {kind}" for kind, count in ranked)
    return f"{number} fault{'s' * (number != 1)} ({listed})"


def fault_subject(fault: Fault) -> str:
    """Return who a fault happens to."""
    return fault.process if isinstance(fault, ProcessFault) else NETWORK


def describe_start(fault: Fault) -> str:
    """Return what is wrong from now on, and for how long."""
    return f"{_wrong(fault)}{_while(lasts_s(fault))}"


def describe_end(fault: Fault) -> str:
    """Return what is right again."""
    match fault:
        case Slow():
            return "is slowed down no more"
        case FullDisk():
            return "has room on its disk again"
        case ReadOnlyDisk():
            return "can write to its disk again"
        case Outage():
            return "answers again"
        case ListLag():
            return "has lists that are up to date again"
        case RosterLag():
            return "gets rosters at once again"
        case Partition():
            return f"the cut between {_groups(fault)} heals"
        case LinkFault():
            return f"{_NOUNS[type(fault)]} of {_messages(fault.link)} is over"
        case _:
            raise AssertionError(f"{fault} has no end that is told")


def lasts_s(fault: Fault) -> float | None:
    """Return how long a fault lasts; None is to the end, or no time at all."""
    match fault:
        case (
            Freeze() | Slow() | Partition() | FullDisk() | ReadOnlyDisk() | LinkFault()
        ):
            return fault.for_s
        case Outage() | ListLag() | RosterLag():
            return fault.for_s
        case _:
            return None


def seconds(value: float) -> str:
    """Return a span of time with three digits."""
    return f"{value:.0f} s" if abs(value) >= 1000 else f"{value:.3g} s"


def _wrong(fault: Fault) -> str:
    match fault:
        case Kill(back_after_s=None):
            return "crashes, and will not come back"
        case Kill():
            return f"crashes, to be back in {seconds(fault.back_after_s or 0.0)}"
        case Freeze():
            return "stands still"
        case Slow():
            return f"takes {fault.factor:g} times as long for its work"
        case Partition():
            return f"is cut between {_groups(fault)}"
        case FullDisk():
            return "has no room left on its disk"
        case ReadOnlyDisk():
            return "cannot write to its disk"
        case Outage():
            return f"fails {_share(fault.rate)}requests, done or not"
        case ListLag():
            return f"has lists that are up to {seconds(fault.by_s)} late"
        case RosterLag():
            return f"gets rosters {seconds(fault.by_s)} after their decision"
        case Damage():
            below = f" below {fault.prefix}" if fault.prefix else ""
            return f"has an object{below} damaged: {fault.how}"
        case ClockJump():
            return _jump(fault)
        case ClockDrift():
            return f"has a clock that runs at {fault.rate:g} of true time from now on"
        case LinkFault():
            return _weather(fault)
        case _:
            raise AssertionError(f"no words for {fault}")


def _weather(fault: LinkFault) -> str:
    which = _messages(fault.link)
    match fault:
        case DelayFault():
            return f"{_share(fault.rate)}{which} take {seconds(fault.by_s)} longer"
        case Reorder():
            most = seconds(fault.by_s)
            return f"{_share(fault.rate)}{which} overtake each other by up to {most}"
        case Loss():
            return f"{_share(fault.rate)}{which} are lost"
        case Duplicate():
            return f"{_share(fault.rate)}{which} arrive twice"
        case Corrupt():
            return f"{_share(fault.rate)}{which} arrive changed"
        case Throttle():
            ways = "" if ARROW in fault.link else " in each direction"
            return f"{which} get {fault.bytes_per_s:g} bytes per second{ways}"
        case _:
            raise AssertionError(f"no words for {fault}")


_NOUNS: dict[type[Fault], str] = {
    DelayFault: "delay",
    Reorder: "disorder",
    Loss: "loss",
    Duplicate: "doubling",
    Corrupt: "corruption",
    Throttle: "throttling",
}


def _jump(fault: ClockJump) -> str:
    if fault.by_s < 0:
        return f"has a clock that stands still for {seconds(-fault.by_s)}"
    return f"has a clock that jumps ahead by {seconds(fault.by_s)}"


def _groups(fault: Partition) -> str:
    return " | ".join([*map(few, fault.groups), "all others"])


def _messages(link: str) -> str:
    here, arrow, there = link.partition(ARROW)
    if link == "*":
        return "messages everywhere"
    return f"messages from {here} to {there}" if arrow else f"messages of {here}"


def _share(rate: float) -> str:
    return "all " if rate >= 1.0 else f"{100 * rate:.3g} % of "


def _while(for_s: float | None) -> str:
    return f", for {seconds(for_s)}" if for_s is not None else ""
