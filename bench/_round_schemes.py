"""What `round.py` compares: each scheme starts its processes, and makes rounds."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from _round_crew import REST, Crew, Member, Said, cpu_seconds, together
from _round_floor import HUB_STEPS, ISLAND_STEPS, STEPS
from _round_phases import Part, split

WIRES = {"fp32": ("fp32", "fp32"), "bf16": ("bf16", "bf16"), "e3m0": ("e3m0", "int8")}
"""By name: the codec on the way up and on the way down."""

NO_TORCHFT = "torchft is left out, for it is not here: pip install torchft"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The size of what is measured."""

    islands: int
    elements: int
    has_tls: bool
    folder: Path
    """Empty, and on the disk that is to be measured."""


@dataclass(frozen=True)
class Round:
    """How long one round took, and its parts."""

    seconds: float
    cpu_s: float
    """Of all its processes."""

    parts: dict[str, Part] = field(default_factory=dict)


MakeRound = Callable[[], Round]
Start = Callable[[Crew, Plan], MakeRound]


def schemes(wires: list[str]) -> dict[str, Start]:
    """Return what is compared, by name."""
    found: dict[str, Start] = {}
    for wire in wires:
        found[f"ours {wire}"] = ours(*WIRES[wire])
        found[f"floor {wire}"] = floor(*WIRES[wire])
    found |= {"gloo fp32": gloo("float32"), "gloo bf16": gloo("bfloat16")}
    if importlib.util.find_spec("torchft"):
        found["torchft"] = torchft
    return found | {"naive": naive}


def ours(up: str, down: str) -> Start:
    """A coordinator, and islands whose every inner step is a round."""

    def start(crew: Crew, plan: Plan) -> MakeRound:
        wire = (plan.islands, up, down, "tls" if plan.has_tls else "plain")
        hub = crew.start("_round_ours.py", "coordinator", plan.folder, *wire)
        where = (plan.folder, hub.hear()["url"])
        islands = ready(
            [
                crew.start("_round_ours.py", "island", *where, number, plan.elements)
                for number in range(plan.islands)
            ]
        )

        def make() -> Round:
            together(islands, "train")
            together([hub], "spans")
            seconds, said = trained_round(islands)
            _, (heard,) = together([hub], "spans")
            whole = (seconds, cpu_seconds([heard, *said]))
            spans = [each["spans"] for each in said]
            return Round(*whole, split(whole, spans, heard["spans"]))

        return make

    return start


def floor(up: str, down: str) -> Start:
    """What no scheme can do without, step by step."""

    def start(crew: Crew, plan: Plan) -> MakeRound:
        size = (plan.elements, up, down)
        script = "_round_floor.py"
        hub = crew.start(script, "hub", plan.folder, plan.islands, *size)
        port = hub.hear()["port"]
        hub.tell("accept")
        numbers = range(plan.islands)
        islands = ready([crew.start(script, "island", port, *size) for _ in numbers])
        hub.hear()

        def make() -> Round:
            parts = {}
            for step in STEPS:
                who = [hub] if step in HUB_STEPS else []
                who += islands if step in ISLAND_STEPS else []
                seconds, said = together(who, step)
                parts[step] = (seconds, cpu_seconds(said))
            together([hub], "forget")
            seconds, cpu_s = (sum(each) for each in zip(*parts.values(), strict=True))
            return Round(seconds, cpu_s, parts)

        return make

    return start


def gloo(dtype: str) -> Start:
    """An all-reduce of as many elements among as many processes."""

    def start(crew: Crew, plan: Plan) -> MakeRound:
        def member(rank: int) -> Member:
            among = (rank, plan.islands, plan.elements, dtype)
            return crew.start("_round_gloo.py", plan.folder / "meeting", *among)

        return plain(ready([member(rank) for rank in range(plan.islands)]))

    return start


def torchft(crew: Crew, plan: Plan) -> MakeRound:
    """The outer step of torchft's DiLoCo."""
    script = "_round_torchft.py"
    address = crew.start(script, "meeting", plan.islands).hear()["address"]
    size = (plan.islands, plan.elements)
    numbers = range(plan.islands)
    return plain(
        ready([crew.start(script, "island", address, each, *size) for each in numbers])
    )


def naive(crew: Crew, plan: Plan) -> MakeRound:
    """What anybody would write first."""
    script = "_round_naive.py"
    hub = crew.start(script, "hub", plan.islands)
    port, numbers = hub.hear()["port"], range(plan.islands)
    return plain(
        ready([crew.start(script, "island", port, plan.elements) for _ in numbers]),
        hub,
    )


def ready(members: list[Member]) -> list[Member]:
    """Return members that have said that they are ready."""
    for member in members:
        member.hear()
    return members


def plain(islands: list[Member], *others: Member) -> MakeRound:
    """Return rounds of which nothing but the time is known."""

    def make() -> Round:
        together([*others], REST)
        together(islands, "train")
        seconds, said = trained_round(islands)
        _, more = together([*others], REST)
        return Round(seconds, cpu_seconds([*said, *more]))

    return make


def trained_round(islands: list[Member]) -> tuple[float, list[Said]]:
    """Return a round of islands that have trained.

    Raises:
        RuntimeError: it did not count for all of them, and measures nothing.
    """
    seconds, said = together(islands, "round")
    counted = [each.get("counted", 1) for each in said]
    if set(counted) != {1}:
        raise RuntimeError(f"Of {len(islands)} islands these rounds count: {counted}.")
    return seconds, said
