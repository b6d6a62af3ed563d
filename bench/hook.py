"""What does an island cost on an inner step that synchronises nothing?

The peer is a fused AdamW step over 1000 tensors, with an island on it. Two more hooks,
one before the island's and one after, tell how much of each step the island took: in
its place, with caches as the step left them. The pace is a part of that: beside it are
the two clock readings that it needs.
"""

from __future__ import annotations

import statistics
import time

import torch
from _timing import Row, arguments, medians, report

import atoll.torch
from atoll import RunSettings
from atoll.exchange import MemoryRun
from atoll.island.progress import StepTimer
from atoll.runtime import SystemRuntime

TENSORS = 1000
STEPS = 40
"""Inner steps per turn."""

LIMIT_PERCENT = 1.0
PACE_STEPS = 100_000
PACE_LIMIT_US = 1.0


def main() -> None:
    """Print the table."""
    given = arguments(__doc__ or "", elements=1_000_000, smoke_elements=10_000)
    torch.set_num_threads(1)
    model = many_tensors(given.elements)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    before, after = Stopwatch(), Stopwatch()
    optimizer.register_step_post_hook(before)
    with atoll.torch.join(model, optimizer, never()):
        optimizer.register_step_post_hook(after)
        turns = [turn(optimizer, before, after) for _ in range(given.turns + 1)][1:]
    hook_s, step_s = (statistics.median(column) for column in zip(*turns, strict=True))
    row = Row(
        what="the hook, % of the step without it",
        ours_s=hook_s,
        peer_s=step_s,
        ratio=100 * hook_s / step_s,
        limit=LIMIT_PERCENT,
        at_most=True,
    )
    title = f"{STEPS} steps, {TENSORS} tensors, {given.elements} elements"
    report(title, [row, pace_row(given.turns)])


def pace_row(turns: int) -> Row:
    """Return the row of the pace, in microseconds per inner step."""
    runtime, timer = SystemRuntime(), StepTimer()

    def measure() -> None:
        for _ in range(PACE_STEPS):
            timer.end(runtime.now_s())
            timer.begin(runtime.now_s())

    def read_clock() -> None:
        for _ in range(PACE_STEPS):
            runtime.now_s()
            runtime.now_s()

    seconds = medians({"ours": measure, "peer": read_clock}, turns=turns)
    return Row(
        what=f"the pace of {PACE_STEPS} steps, us per step",
        ours_s=seconds["ours"],
        peer_s=seconds["peer"],
        ratio=1e6 * seconds["ours"] / PACE_STEPS,
        limit=PACE_LIMIT_US,
        at_most=True,
    )


class Stopwatch:
    """A hook that notes when it is called."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def __call__(self, *_: object) -> None:
        self.at_s.append(time.perf_counter())


def turn(
    optimizer: torch.optim.Optimizer, before: Stopwatch, after: Stopwatch
) -> tuple[float, float]:
    """Make some steps; return the seconds of the hook, and of all the rest."""
    before.at_s.clear()
    after.at_s.clear()
    start_s = time.perf_counter()
    for _ in range(STEPS):
        optimizer.step()
    whole_s = time.perf_counter() - start_s
    hook_s = sum(after.at_s) - sum(before.at_s)
    return hook_s, whole_s - hook_s


def many_tensors(elements: int) -> torch.nn.Module:
    """Return a model of equal tensors, each with a gradient."""
    model = torch.nn.ParameterList(
        torch.randn(elements // TENSORS) for _ in range(TENSORS)
    )
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    return model


def never() -> MemoryRun:
    """Return a run whose first round is out of reach."""
    return MemoryRun(RunSettings.from_dict({"sync": {"sync_every": 2**31 - 1}}))


if __name__ == "__main__":
    main()
