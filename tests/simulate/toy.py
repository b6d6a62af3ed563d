"""A small world that uses every part: islands that count at a coordinator's journal.

Each island sends its numbers 1, 2, 3, ... and repeats what nobody confirmed; the
coordinator appends each once, syncs, and only then confirms.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from functools import partial

from atoll.errors import DiskError, Unreachable, UsageError
from atoll.simulate import (
    FaultPlan,
    ReplyFunction,
    SimWorld,
    TraceEvent,
    apply,
    random_plan,
)
from atoll.simulate import timeline as lines

ISLANDS = ("i0", "i1", "i2")
SPAN_S = 60.0


class Toy:
    """A world, and what its islands were told is durable."""

    def __init__(self, seed: int, plan: FaultPlan, *, syncs: bool = True) -> None:
        self.syncs = syncs
        """Without, the coordinator confirms what a power cut may lose."""

        self.world = SimWorld(seed, corrupter=lambda request, rng: request)
        self.happenings: list[TraceEvent] = []
        self.world.scheduler.trace = self.happenings.append
        self.confirmed = dict.fromkeys(ISLANDS, 0)
        self.world.add("coordinator").start(self._coordinate)
        for name in ISLANDS:
            self.world.add(name).start(partial(self._count, name))
        self.armed = apply(plan, self.world)

    def run(self, until_s: float = 2 * SPAN_S) -> None:
        with self.world:
            self.world.scheduler.run(until_s)

    def journal(self) -> list[str]:
        """Return the whole lines that are on the coordinator's disk."""
        disk = self.world.disks["coordinator"]
        return [
            line
            for name in disk.names("log/")
            for line in disk.read(name).decode().split("\n")[:-1]
        ]

    def lost(self) -> list[str]:
        """Return what was confirmed to an island and is in no journal."""
        told = [f"{i} {n + 1}" for i in ISLANDS for n in range(self.confirmed[i])]
        kept = set(self.journal())
        return [line for line in told if line not in kept]

    def digest(self) -> str:
        """Return a digest of everything that happened, to the last bit of time."""
        told = "\n".join(f"{each.at_s.hex()} {each}" for each in self.happenings)
        return hashlib.sha256(told.encode()).hexdigest()

    def _count(self, name: str) -> None:
        world = self.world
        process, clock = world.processes[name], world.clocks[name]
        while True:
            process.work(0.5)
            clock.sleep(0.1)
            number = self.confirmed[name] + 1
            try:
                network = world.network
                network.call(
                    process, "coordinator", (name, number), size_bytes=50, timeout_s=2.0
                )
            except Unreachable:
                continue
            self.confirmed[name] = max(self.confirmed[name], number)

    def _coordinate(self) -> None:
        process, disk = self.world.processes["coordinator"], self.world.disks
        own, known = disk["coordinator"], set(self.journal())
        segment = f"log/{process.incarnation_number:08}"

        def take(request: object, reply: ReplyFunction) -> None:
            nonlocal segment
            assert isinstance(request, tuple)
            line = f"{request[0]} {request[1]}"
            if line not in known:
                try:
                    own.append(segment, f"{line}\n".encode())
                    if self.syncs:
                        own.sync(segment)
                except (DiskError, UsageError):
                    segment += "x"  # what a failed call left is in doubt
                    return
                known.add(line)
            reply("durable", size_bytes=10)

        # What a crash left in the cache is not durable until it is synced.
        for name in own.names("log/"):
            try:
                own.sync(name)
            except (DiskError, UsageError):
                return
        self.world.network.listen(process, take)


def storm(seed: int) -> Toy:
    """Return a toy that has lived through the storm of this seed."""
    toy = Toy(seed, random_plan(seed, ISLANDS, span_s=SPAN_S))
    toy.run()
    return toy


def main(seeds: Iterable[str]) -> None:
    """Print the digest of each seed's storm, and the last lines of its timeline."""
    for seed in seeds:
        toy = storm(int(seed))
        sys.stdout.write(f"{toy.digest()}\n")
        sys.stdout.writelines(f"{line}\n" for line in list(lines(toy.happenings))[-5:])


if __name__ == "__main__":
    main(sys.argv[1:])
