"""Events of runs that are easy to follow, and drawn ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from atoll.telemetry import Event

BEGIN_UNIX_S = 1_700_000_000.0


@dataclass
class Stream:
    """Makes the events of one coordinator after another."""

    process: str = "00000001"
    at_unix_s: float = BEGIN_UNIX_S
    number: int = 0
    made: list[Event] = field(default_factory=list)

    def emit(self, name: str, **fields: Any) -> Event:
        """Return the next event, which is kept as well."""
        self.number += 1
        event = Event(self.number, self.at_unix_s, name, fields, self.process)
        self.made.append(event)
        return event

    def start(self, *, fragments: int = 1, was_clean: bool = True) -> None:
        """Begin a life; the first one creates the run."""
        if not self.made:
            self.emit("run_created")
        else:
            self.process = f"{int(self.process, 16) + 1:08x}"
            self.number = 0
        self.emit(
            "coordinator_started",
            round=0,
            fragments=fragments,
            was_clean=was_clean,
            version="0.1.0",
        )

    def join(self, name: str, slot: int, incarnation: int = 1) -> None:
        """Let an island join."""
        self.emit(
            "island_joined",
            island=name,
            incarnation=incarnation,
            version="0.1.0",
            slot=slot,
        )

    def arrive(
        self, names: list[str], fragment: int, number: int, drawn: random.Random
    ) -> None:
        """Open a round, and let every island publish."""
        position = {"fragment": fragment, "round": number}
        self.emit("round_opened", islands=len(names), **position)
        for name in names:
            seconds = 100 * drawn.random()
            self.emit(
                "update_staged", island=name, bytes=10**6, seconds=seconds, **position
            )
        self.emit("round_closing", staged=len(names), missing=[], **position)

    def commit(self, fragment: int, number: int, marks: str, **changes: Any) -> None:
        """Commit a round with a mark for each slot."""
        values = {
            "counted": marks.count("#"),
            "late": marks.count("~"),
            "refused": marks.count("!"),
            "seconds": 3.0,
            "bytes": 100,
            "digest": "ab" * 16,
            "tokens": 1000 * number,
            "stall_share_mean": 0.1,
            "marks": marks,
        }
        self.emit(
            "round_committed", fragment=fragment, round=number, **values | changes
        )

    def report(self, name: str, steps: int, loss: float | None, **more: Any) -> None:
        """Let an island tell its progress."""
        values = {
            "round": steps // 10,
            "inner_steps": steps,
            "tokens": 10 * steps,
            "loss": loss,
            "loss_is_finite": True,
            "seconds": float(steps),
            "wait_s": steps / 10,
            "bytes_up": 100 * steps,
            "bytes_down": 200 * steps,
        }
        self.emit("loss_reported", island=name, **values | more)


def training(
    *,
    islands: int,
    fragments: int,
    rounds: int,
    metrics: int = 0,
    seed: int = 0,
    arrivals_from: int | None = None,
) -> Iterator[Event]:
    """Yield the events of a run whose islands report once per round.

    From the round `arrivals_from` on the events have every update's arrival.
    """
    stream, drawn = Stream(), random.Random(seed)
    stream.start(fragments=fragments)
    names = [f"island-{index:03}" for index in range(islands)]
    for slot, name in enumerate(names):
        stream.join(name, slot)
    for number in range(1, rounds + 1):
        yield from stream.made
        stream.made.clear()
        for fragment in range(fragments):
            stream.at_unix_s += 10.0
            if arrivals_from is not None and number >= arrivals_from:
                stream.arrive(names, fragment, number, drawn)
            marks = "".join(drawn.choices("#~.!", (9, 1, 1, 0.1), k=islands))
            stream.commit(fragment, number, marks)
        for name in names:
            own = {f"metric-{index}": drawn.random() for index in range(metrics)}
            stream.report(name, 10 * number, 3 * drawn.random(), metrics=own)
    yield from stream.made
