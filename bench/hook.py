"""What does an island cost on an inner step that synchronises nothing?

The peer is a fused AdamW step over 1000 tensors, with an island on it. Two more hooks,
one before the island's and one after, tell how much of each step the island took: in
its place, with caches as the step left them.
"""

from __future__ import annotations

import statistics
import time

import torch
from _timing import Row, arguments, report

import atoll.torch
from atoll import RunSettings
from atoll.exchange import MemoryRun

TENSORS = 1000
STEPS = 40
"""Inner steps per turn."""

LIMIT_PERCENT = 1.0


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
    report(f"{STEPS} steps, {TENSORS} tensors, {given.elements} elements", [row])


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
