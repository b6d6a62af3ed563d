"""What does a sync cost the ranks of an island under FSDP2: in memory, and in time?

Real processes over gloo on one machine. Memory is what numpy's allocator reports to
tracemalloc, over the rank's own share of the parameters: anchor, velocity and residual
at rest, and the peak while rounds come and go. The leader has in addition one fragment
at a time, encoded. The run is an exchange that keeps nothing, as in `memory.py`.
Time is that of whole inner steps: one that only trains, one that seals, and one that
takes an outcome, in turns.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _timing import arguments
from memory import Nowhere
from torch.distributed.fsdp import fully_shard

from atoll import RunSettings
from atoll.island import Host
from atoll.protocol import JoinRequest, ModelSpec
from atoll.torch.ranks.join import form
from atoll.torch.ranks.parallelism import rank_group_of
from atoll.torch.ranks.sharded_memory import ShardedMemory
from atoll.torch.ranks.view import RankView

LAYERS = 8
ROWS = 4
PERIOD = 8
"""Inner steps per window of all fragments."""


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    ranks: int
    fragments: int


@dataclass(frozen=True)
class Figures:
    """Of one rank: bytes per parameter of its share, and seconds per step."""

    joined: float
    peak: float
    plain_s: float
    seal_s: float
    take_s: float


def main() -> None:
    """Print the table."""
    given = arguments(
        __doc__ or "", elements=LAYERS * 1024 * 1024, smoke_elements=LAYERS * 32 * 32
    )
    width = round((given.elements / LAYERS) ** 0.5)
    print(f"FSDP2 over gloo, {LAYERS} layers of {width} x {width}\n")
    print(
        f"{'ranks':>5} {'fragments':>9}   {'at rest':>8} {'peak':>7} {'leader':>7}"
        f"   {'plain ms':>8} {'seals':>6} {'takes':>6}   bytes per own parameter"
    )
    for ranks in (2,) if given.smoke else (2, 4):
        cases = [Case(ranks, fragments) for fragments in (1, 8)]
        for case, figures in run_cases(ranks, cases, width, given.turns):
            print(line_of(case, figures), flush=True)


def line_of(case: Case, ranks: list[Figures]) -> str:
    """Return one line: the worst follower, the leader, and the slowest rank's steps."""
    leader, others = ranks[0], ranks[1:]
    plain_s = max(each.plain_s for each in ranks)
    seal = max(each.seal_s for each in ranks) / plain_s
    take = max(each.take_s for each in ranks) / plain_s
    return (
        f"{case.ranks:5} {case.fragments:9}   "
        f"{max(each.joined for each in ranks):8.2f} "
        f"{max(each.peak for each in others):7.2f} {leader.peak:7.2f}   "
        f"{plain_s * 1e3:8.1f} {seal:6.2f} {take:6.2f}"
    )


def run_cases(
    ranks: int, cases: list[Case], width: int, turns: int
) -> Iterator[tuple[Case, list[Figures]]]:
    """Yield the figures of every rank, case by case."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "world")
        lines = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(
                target=rank_main,
                args=(said, rank, cases, width, turns, meeting),
                daemon=True,  # ends with this process if another rank fails
            )
            for rank, (_, said) in enumerate(lines)
        ]
        for process in processes:
            process.start()
        for _, said in lines:
            said.close()  # so that `recv` fails if a rank ends without its figures
        for case in cases:
            yield case, [Figures(*heard.recv()) for heard, _ in lines]
        for process in processes:
            process.join()


def rank_main(
    said: Connection,
    rank: int,
    cases: list[Case],
    width: int,
    turns: int,
    meeting: str,
) -> None:
    """Live through some rounds as one rank, and send its figures."""
    torch.set_num_threads(1)
    ranks = cases[0].ranks
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks
    )
    measure(Layers(64), cases[0], 1)  # loads and compiles, which is counted as well
    for case in cases:
        said.send(measure(Layers(width), case, turns))
    dist.destroy_process_group()


def measure(model: Layers, case: Case, turns: int) -> tuple[float, ...]:
    """Return this rank's figures."""
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    share = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = torch.randn(ROWS, model.width)
    train(model, optimizer, rows)  # what torch keeps is there before it is counted
    settings = settings_of(case)
    is_leader = dist.get_rank() == 0
    elements = sum(p.numel() for p in model.parameters()) if is_leader else LAYERS
    exchange = Nowhere(settings, elements)
    exchange.answer()
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    life = join(model, exchange)
    joined = (tracemalloc.get_traced_memory()[0] - before) / share
    tracemalloc.reset_peak()
    for _ in range(2 * PERIOD):
        train(model, optimizer, rows)
        life.stepped()
    peak = (tracemalloc.get_traced_memory()[1] - before) / share
    tracemalloc.stop()
    times = timed(model, optimizer, rows, life, case, turns)
    life.leave(depart=False, is_alone=False)
    return joined, peak, *times


def timed(
    model: Layers,
    optimizer: torch.optim.Optimizer,
    rows: torch.Tensor,
    life: Any,
    case: Case,
    turns: int,
) -> tuple[float, float, float]:
    """Return the medians of steps that train only, that seal, and that take."""
    kinds: dict[str, list[float]] = {"plain": [], "seal": [], "take": []}
    for number in range(turns * PERIOD):
        began_s = time.perf_counter()
        train(model, optimizer, rows)
        trained_s = time.perf_counter() - began_s
        life.stepped()
        stepped_s = time.perf_counter() - began_s
        kinds["plain"].append(trained_s)
        at = (number + 1) % (PERIOD // case.fragments)
        if at == 0:
            kinds["seal"].append(stepped_s)
        if at == 1 or case.fragments == PERIOD:
            kinds["take"].append(stepped_s)
    plain, seal, take = (statistics.median(each) for each in kinds.values())
    return plain, seal, take


def settings_of(case: Case) -> RunSettings:
    """Return settings that send each fragment once in a period."""
    return RunSettings.from_dict(
        {
            "sync": {
                "sync_every": PERIOD,
                "num_fragments": case.fragments,
                "overlap_steps": 1 if case.fragments < PERIOD else 0,
            },
            "wire": {"up": "bf16", "down": "bf16", "error_feedback": True},
            "outer": {"optimizer": "nesterov", "lr": 0.5, "momentum": 0.5},
        }
    )


def join(model: Layers, exchange: Nowhere) -> Any:
    """Join a run that keeps nothing."""

    def enter(
        view: RankView, spec: ModelSpec, memory: ShardedMemory, constants: object
    ) -> Host:
        request = JoinRequest(model=spec, island="a")
        return Host(exchange, view, request, memory=memory)

    team = rank_group_of(model)
    assert team is not None
    return form(team, enter)


def train(model: Layers, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    """Make one inner step."""
    model(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Layers(torch.nn.Module):
    """Square layers without bias, so that fragments are equal."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return rows


if __name__ == "__main__":
    main()
