"""How fast is the simulator's kernel? Events, messages and greenlets per second.

One thread; the figures are of virtual work only, with nothing simulated on top. The
limits are what a storm of five islands and twenty rounds needs, with room to spare.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from _timing import parse

from atoll.simulate import (
    Network,
    ReplyFunction,
    Scheduler,
    SimClock,
    SimProcess,
)

LIMITS = {"events": 60_000, "messages": 20_000}


def main() -> None:
    """Print the table: the median of several turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=5)
    given = parse(parser, count=500, turns=1)
    print(f"{'per second and core':32} {'measured':>10}  limit")
    for what, action in ACTIONS.items():
        rate = measured(action, given.count, given.turns)
        limit = LIMITS.get(what)
        verdict = "" if limit is None else f">= {limit} " + _verdict(rate, limit)
        print(f"{what:32} {rate:10,.0f}  {verdict}".rstrip())


def measured(action: Callable[[int], int], count: int, turns: int) -> float:
    """Return the median of things done per second."""
    rates = []
    for _ in range(turns):
        start = time.perf_counter()
        done = action(count)
        rates.append(done / (time.perf_counter() - start))
    return sorted(rates)[turns // 2]


def events(count: int) -> int:
    """Ten timers that set themselves again."""
    scheduler = Scheduler(0)

    def again() -> None:
        if scheduler.events < count:
            scheduler.at(scheduler.now_s + 1.0, again)

    for _ in range(10):
        scheduler.at(0.0, again)
    scheduler.run()
    return scheduler.events


def sleeps(count: int) -> int:
    """Ten greenlets that sleep again and again."""
    with Scheduler(0) as scheduler:

        def nap() -> None:
            for _ in range(count // 10):
                scheduler.sleep(1.0)

        for index in range(10):
            SimProcess(f"p{index}", scheduler).start(nap)
        scheduler.run()
        return scheduler.events


def clock_sleeps(count: int) -> int:
    """Ten greenlets that sleep by clocks that drift."""
    with Scheduler(0) as scheduler:
        for index in range(10):
            clock = SimClock(scheduler, rate=1.0 + index / 100)

            def nap(clock: SimClock = clock) -> None:
                for _ in range(count // 10):
                    clock.sleep(1.0)

            SimProcess(f"p{index}", scheduler).start(nap)
        scheduler.run()
    return count


def messages(count: int) -> int:
    """Five islands that call one coordinator; a call is two messages."""
    with Scheduler(0) as scheduler:
        network, coordinator = Network(scheduler), SimProcess("coordinator", scheduler)

        def serve(request: object, reply: ReplyFunction) -> None:
            reply(request, size_bytes=100)

        def call(process: SimProcess) -> None:
            for index in range(count // 10):
                network.call(
                    process, "coordinator", index, size_bytes=100, timeout_s=30.0
                )

        coordinator.start(lambda: network.listen(coordinator, serve))
        for index in range(5):
            island = SimProcess(f"i{index}", scheduler)
            island.start(lambda island=island: call(island))
        scheduler.run()
        return network.counts.sent


def _verdict(rate: float, limit: float) -> str:
    return "holds" if rate >= limit else "MISSED"


ACTIONS: dict[str, Callable[[int], int]] = {
    "events": events,
    "messages": messages,
    "greenlet sleeps": sleeps,
    "sleeps by a drifting clock": clock_sleeps,
}


if __name__ == "__main__":
    main()
