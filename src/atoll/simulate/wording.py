"""Faults in words: what a person reads when one begins and when it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from atoll.simulate.faults import (
    ClockDrift,
    ClockJump,
    Corrupt,
    Damage,
    Delay,
    Duplicate,
    Fault,
    Freeze,
    FullDisk,
    Kill,
    ListLag,
    Loss,
    OfLink,
    OfProcess,
    Outage,
    Partition,
    ReadOnlyDisk,
    Reorder,
    RosterLag,
    Slow,
    Throttle,
)
from atoll.simulate.links import ARROW
from atoll.simulate.plan import FaultPlan

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


def kinds(plan: FaultPlan) -> str:
    """Return what a plan is made of, most frequent kind first.

    >>> kinds(FaultPlan().loss("*", rate=0.5).kill("i1", at_s=1).kill("i0", at_s=2))
    '3 faults (2 kill, 1 loss)'
    """
    counts = Counter(fault.kind for fault in plan.faults)
    ranked = sorted(counts.items(), key=lambda kind: (-kind[1], kind[0]))
    number = len(plan.faults)
    listed = ", ".join(f"{count} {kind}" for kind, count in ranked)
    return f"{number} fault{'s' * (number != 1)} ({listed})"


def subject(fault: Fault) -> str:
    """Return who a fault happens to."""
    return fault.process if isinstance(fault, OfProcess) else NETWORK


def beginning(fault: Fault) -> str:
    """Return what is wrong from now on, and for how long."""
    return f"{_wrong(fault)}{_while(lasts_s(fault))}"


def ending(fault: Fault) -> str:
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
        case OfLink():
            return f"{_NOUNS[type(fault)]} of {_messages(fault.link)} is over"
        case _:
            raise AssertionError(f"{fault} has no end that is told")


def lasts_s(fault: Fault) -> float | None:
    """Return how long a fault lasts; None is to the end, or no time at all."""
    match fault:
        case Freeze() | Slow() | Partition() | FullDisk() | ReadOnlyDisk() | OfLink():
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
        case OfLink():
            return _weather(fault)
        case _:
            raise AssertionError(f"no words for {fault}")


def _weather(fault: OfLink) -> str:
    which = _messages(fault.link)
    match fault:
        case Delay():
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
    Delay: "delay",
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
