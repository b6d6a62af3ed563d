"""The steps of a plan, one after another: two serial links, and outcomes that are due.

Unlike the closed form of `model`, transfers queue here. An update travels up when the
link is free, its outcome travels down when that is free, and an inner step begins only
when all outcomes that are due have arrived. Only the steps at which something happens
are visited, so that a window of 1,000 inner steps costs as much as one of 10.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.algorithm.schedule import send_step
from atoll.plan.model import (
    IslandLink,
    Plan,
    Prediction,
    Transfer,
    Workload,
    transfers_of,
    with_cycle,
)

WARM_UP_CYCLES, MEASURED_CYCLES = 6, 6
"""The first cycles fill the queues."""


class Interval(NamedTuple):
    """A span of time, from the beginning of the last round."""

    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The last round of a walk, at the slowest island."""

    cycle_s: float
    """Mean of the measured rounds."""

    round_s: float
    up: list[Interval] = field(default_factory=list)
    down: list[Interval] = field(default_factory=list)
    waits: list[Interval] = field(default_factory=list)


class _SerialLink:
    """One direction of a link: transfers follow one another."""

    def __init__(self) -> None:
        self._used: list[Interval] = []
        """Not empty ones, in order; those before the last request are dropped."""

    def send(self, ready_s: float, seconds: float, *, now_s: float) -> Interval:
        """Return the first span in which a transfer fits, once it is ready.

        No later transfer is ready before `now_s`.
        """
        while self._used and self._used[0].end_s <= now_s:
            self._used.pop(0)
        start_s = ready_s
        for span in self._used:
            if start_s + seconds <= span.start_s:
                break
            start_s = max(start_s, span.end_s)
        interval = Interval(start_s, start_s + seconds)
        if seconds:
            insort(self._used, interval)
        return interval


def walk(workload: Workload, link: IslandLink, plan: Plan) -> Timeline:
    """Return the timeline of a plan.

    All islands are as slow as the slowest: every round waits for that one, and the
    others send into links that are free.
    """
    transfers = transfers_of(workload, link, plan)
    window, step_s = _pace(workload, plan)
    return _walk(transfers, plan, window, step_s, is_shared=link.is_shared)


def judge(workload: Workload, link: IslandLink, plan: Plan) -> Prediction:
    """Return the prediction of a plan by its timeline."""
    cycle_s = walk(workload, link, plan).cycle_s
    return with_cycle(workload, link, plan, cycle_s=cycle_s)


def _pace(workload: Workload, plan: Plan) -> tuple[int, float]:
    windows = workload.windows(plan.sync_every)
    return max(
        zip(windows, workload.steps_s, strict=True), key=lambda pace: pace[0] * pace[1]
    )


def _walk(
    transfers: Sequence[Transfer],
    plan: Plan,
    window: int,
    step_s: float,
    *,
    is_shared: bool,
) -> Timeline:
    cycles = WARM_UP_CYCLES + MEASURED_CYCLES
    events = _events(plan, window, cycles)
    up = _SerialLink()
    down = up if is_shared else _SerialLink()
    ups: list[Interval] = []
    downs: list[Interval] = []
    waits: list[Interval] = []
    arrivals: dict[tuple[int, int], float] = {}
    marks = [0.0]
    now_s, step = 0.0, 0
    for at_step, is_send, cycle, fragment in events:
        now_s += (at_step - step) * step_s
        step = at_step
        if cycle == -1:
            marks.append(now_s)
        elif is_send:
            part = transfers[fragment]
            ups.append(up.send(now_s, part.up_s, now_s=now_s))
            ready_s = ups[-1].end_s + part.trips_s / 2 + part.host_s
            downs.append(down.send(ready_s, part.down_s, now_s=now_s))
            arrivals[fragment, cycle] = downs[-1].end_s + part.trips_s / 2
        else:
            arrival_s = arrivals.pop((fragment, cycle))
            if arrival_s > now_s:
                waits.append(Interval(now_s, arrival_s))
                now_s = arrival_s
    start_s, end_s = marks[-2], marks[-1]
    return Timeline(
        (marks[-1] - marks[-1 - MEASURED_CYCLES]) / MEASURED_CYCLES,
        end_s - start_s,
        *(_within(spans, start_s, end_s) for spans in (ups, downs, waits)),
    )


def _events(plan: Plan, window: int, cycles: int) -> list[tuple[int, int, int, int]]:
    """Return sends, due outcomes and the ends of windows, by step, in order.

    At one step an outcome is awaited after the sends: its fragment is another one,
    unless there is no overlap.
    """
    overlap = plan.overlap_steps * window // plan.sync_every
    events: list[tuple[int, int, int, int]] = []
    for cycle in range(cycles):
        for fragment in range(plan.num_fragments):
            step = send_step(
                fragment, cycle, sync_every=window, num_fragments=plan.num_fragments
            )
            events.append((step, 1, cycle, fragment))
            events.append((step + overlap, 0, cycle, fragment))
    ends = [((cycle + 1) * window, 2, -1, 0) for cycle in range(cycles)]
    last = cycles * window
    order = {1: 0, 0: 1, 2: 2}
    return sorted(
        (event for event in [*events, *ends] if event[0] <= last),
        key=lambda event: (event[0], order[event[1]], event[2], event[3]),
    )


def _within(spans: list[Interval], start_s: float, end_s: float) -> list[Interval]:
    return [
        Interval(max(span.start_s, start_s) - start_s, min(span.end_s, end_s) - start_s)
        for span in spans
        if span.end_s > start_s and span.start_s < end_s
    ]
