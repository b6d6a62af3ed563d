"""What happened, as what a person cares about: one entry per thing, in words.

Rule 1: an entry is told in the order in which things happened.
Rule 2: messages and disk calls are entries only for who wants everything.
Rule 3: what began with a fault and ends by itself is told when its time is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush

from atoll.simulate import wording
from atoll.simulate.faults import ClockDrift, ClockJump, Fault, Freeze, Kill
from atoll.simulate.plan import FaultPlan
from atoll.simulate.trace import Commit, Happening


class Tone(StrEnum):
    """How an entry sounds."""

    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    FAULT = "fault"
    FAINT = "faint"


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that happened."""

    at_s: float
    who: str
    what: str
    text: str
    tone: Tone = Tone.PLAIN
    commit: Commit | None = None
    """The round, if this is one that was committed."""


@dataclass
class Tally:
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
    write: Callable[[Entry], None]
    is_whole: bool = False
    """Whether every message and disk call is an entry too."""

    tallies: dict[str, Tally] = field(init=False)
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
        self.tallies = {island: Tally() for island in self.islands}
        self._faults = {
            (each.kind, str(each.values())): each for each in self.plan.faults
        }

    def hear(self, happening: Happening) -> None:
        """Write what a happening is to a person, if it is anything."""
        while self._ends and self._ends[0][0] <= happening.at_s:
            self._end(*heappop(self._ends))
        self._settle(happening)
        if happening.who == "fault":
            self._begin(happening)
        elif happening.what == "commit":
            self._count(happening)
        elif happening.what in _SAYINGS:
            self._say(happening)
        else:
            self._weigh(happening)

    def _begin(self, happening: Happening) -> None:
        fault = self._faults[happening.what, happening.about]
        if isinstance(fault, Kill | Freeze):
            self._struck = fault
            return
        who, text = wording.subject(fault), wording.beginning(fault)
        self.write(Entry(happening.at_s, who, fault.kind, text, Tone.FAULT))
        if isinstance(fault, ClockJump | ClockDrift):
            return
        self._lasting[who, wording.ending(fault)] += 1
        for_s = wording.lasts_s(fault)
        if for_s is not None:
            self._begun += 1
            heappush(self._ends, (happening.at_s + for_s, self._begun, fault))

    def _end(self, at_s: float, _: int, fault: Fault) -> None:
        """Write that something is over, unless another fault keeps it up."""
        who, text = wording.subject(fault), wording.ending(fault)
        self._lasting[who, text] -= 1
        if not self._lasting[who, text]:
            self.write(Entry(at_s, who, f"{fault.kind} over", text, Tone.GOOD))

    def _settle(self, happening: Happening) -> None:
        """Write what a kill or a freeze did; a process that is down obeys neither."""
        fault, self._struck = self._struck, None
        if fault is None:
            return
        at_s, who, what, _ = happening
        if who == fault.process and what in ("crash", "freeze"):
            self._cause = fault
            return
        text = f"is not running: this {fault.kind} changes nothing"
        self.write(Entry(at_s, fault.process, fault.kind, text, Tone.FAINT))

    def _count(self, happening: Happening) -> None:
        commit = Commit.parsed(happening.about)
        for island, verdict in commit.verdicts.items():
            tally = self.tallies[island]
            tally.counted += verdict == "counted"
            tally.late += verdict == "late"
            tally.refused += verdict == "refused"
        at_s, who, what, text = happening
        self.write(Entry(at_s, who, what, text, commit=commit))

    def _say(self, happening: Happening) -> None:
        at_s, who, what, about = happening
        saying = _SAYINGS[what]
        tally = self.tallies.get(who, Tally())
        tally.carried += what == "carry"
        tally.dropped += what == "drop"
        text = saying.words(about)
        if self._cause is not None:
            text, self._cause = wording.beginning(self._cause), None
        if text:
            self.write(Entry(at_s, who, what, text, saying.tone))

    def _weigh(self, happening: Happening) -> None:
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
            self.write(Entry(at_s, link, what, f"{what} {about}", Tone.FAINT))


@dataclass(frozen=True)
class _Saying:
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


_SAYINGS: Mapping[str, _Saying] = {
    "start": _Saying(_start, Tone.GOOD),
    "crash": _Saying(lambda about: "crashes", Tone.BAD),
    "freeze": _Saying(lambda about: "stands still", Tone.BAD),
    "thaw": _Saying(lambda about: "goes on", Tone.GOOD),
    "power cut": _Saying(_power_cut, Tone.BAD),
    "open": _Saying(_open, Tone.GOOD),
    "join": _Saying(_join, Tone.GOOD),
    "found": _Saying(lambda about: f"founds the run: {about}", Tone.GOOD),
    "begin": _Saying(lambda about: f"opens the first round to {about}", Tone.GOOD),
    "recover": _Saying(lambda about: f"takes {about} from an island", Tone.GOOD),
    "carry": _Saying(_carry),
    "drop": _Saying(_drop, Tone.BAD),
    "refuse": _Saying(_refuse, Tone.BAD),
    "lapse": _Saying(lambda about: "is silent; its lease has run out", Tone.BAD),
    "revive": _Saying(lambda about: "is heard again", Tone.GOOD),
    "leave": _Saying(lambda about: "leaves", Tone.GOOD),
    "pause": _Saying(lambda about: f"pauses below quorum: {about}", Tone.BAD),
    "resume": _Saying(lambda about: f"goes on: {about}", Tone.GOOD),
}
