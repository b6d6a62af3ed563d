"""The demo's model and its training, by islands and data parallel.

The model is a transformer over bytes: no vocabulary to download, small enough for a
laptop. Islands and data parallel share model, batches and optimizer, so that only the
exchange differs.

    ATOLL_RUN=... python -m atoll.demo.train --shard 0 --of 4 --results era.json

is one island: a plain loop, joined to a run. It trains on one era until the run ends,
and writes its results. Anchors are copied during the run and evaluated after it: an
evaluation in between would make every other island wait. Anchors are the same on all
islands, so each island evaluates a share of them.

Data parallel, for comparison, runs in one process: the gradient of the rows of all eras
together is the mean of the eras' gradients.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import atoll.torch
from atoll.demo.dataset import Era, read_messages, split_by_era
from atoll.demo.results import IslandResults, ParallelResults, Point
from atoll.errors import UsageError
from atoll.exchange import MemoryRun
from atoll.settings import RunSettings
from atoll.torch import Island

CONTEXT = 64
"""Bytes that a prediction may look back."""

WIDTH, DEPTH, HEADS = 128, 4, 4


class Block(nn.Module):
    """Causal attention, then a small network; each adds to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_mixing = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.before_thinking = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor, turns: Tensor) -> Tensor:
        hidden = hidden + self._mix(self.before_mixing(hidden), turns)
        wide = functional.gelu(self.wide(self.before_thinking(hidden)))
        out: Tensor = hidden + self.narrow(wide)
        return out

    def _mix(self, hidden: Tensor, turns: Tensor) -> Tensor:
        shape = (*hidden.shape[:2], self.heads, -1)
        parts = self.queries_keys_values(hidden).chunk(3, dim=-1)
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(
            _turned(query, turns), _turned(key, turns), value, is_causal=True
        )
        out: Tensor = self.mixed(mixed.transpose(1, 2).flatten(2))
        return out


class GPT(nn.Module):
    """Predicts the next byte. The same seed gives the same weights.

    Positions are rotary (arXiv 2104.09864) rather than learnt: a run of a few hundred
    steps is too short to learn them.
    """

    turns: Tensor

    def __init__(
        self,
        *,
        width: int = WIDTH,
        depth: int = DEPTH,
        heads: int = HEADS,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.last = nn.LayerNorm(width)
        self.register_buffer("turns", _turns(width // heads), persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for name, weights in self.named_parameters():
            _start(name, weights, 0.5 * width**-0.5, generator)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the next byte at each position."""
        hidden, turns = self.byte(text), self.turns[:, : text.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, turns)
        scores: Tensor = self.last(hidden) @ self.byte.weight.T
        return scores


def _start(
    name: str, weights: nn.Parameter, std: float, generator: torch.Generator
) -> None:
    """Initialize a weight; those that add to a block's input start small."""
    if weights.dim() == 2:
        adds = name.endswith(("mixed.weight", "narrow.weight"))
        std = 0.3 * std if adds else std
        nn.init.normal_(weights, std=std, generator=generator)
    elif name.endswith("bias"):
        nn.init.zeros_(weights)


def _turns(size: int) -> Tensor:
    """Return the cosine and sine of the rotation of each pair at each position."""
    speeds = 1000.0 ** -(torch.arange(size // 2) / (size // 2))
    angles = torch.arange(CONTEXT)[:, None] * speeds
    return torch.stack([angles.cos(), angles.sin()])


def _turned(values: Tensor, turns: Tensor) -> Tensor:
    """Return normalized queries or keys, rotated by their positions.

    The norm keeps attention stable at the high rates that a short run needs.
    """
    first, second = functional.rms_norm(values, values.shape[-1:]).chunk(2, dim=-1)
    cosine, sine = turns
    return torch.cat(
        [first * cosine - second * sine, first * sine + second * cosine], dim=-1
    )


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean loss, in nats per byte, of rows of a context and a byte more."""
    scores = model(rows[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Tensor) -> float:
    """Return the loss on held-out text, a few rows at a time."""
    was_training = model.training
    model.eval()
    losses = [
        float(loss_of(model, rows)) * len(rows) for rows in torch.split(held_out, 32)
    ]
    model.train(was_training)
    return sum(losses) / len(held_out)


@torch.no_grad()
def write(model: nn.Module, opening: str, *, length: int, seed: int = 0) -> str:
    """Return `length` more bytes after the opening, sampled from the model."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(opening.encode())])
    for _ in range(length):
        scores = model(text[:, -CONTEXT:])[0, -1]
        # A temperature below 1: the rare bytes of a hardly trained model are noise.
        chances = functional.softmax(scores / 0.7, dim=-1)
        byte = torch.multinomial(chances, 1, generator=generator)
        text = torch.cat([text, byte[None]], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


HELD_OUT_ROWS = 128
"""Rows over all eras, enough to tell losses apart that differ by a percent."""


def batches(text: bytes, *, rows: int, seed: int) -> Iterator[Tensor]:
    """Yield rows of one context and a byte more from anywhere in the text, endlessly.

    The same text, number of rows and seed give the same batches.
    """
    generator, values = torch.Generator().manual_seed(seed), _values(text)
    while True:
        yield _rows(values, rows, generator)


def held_out_rows(eras: Sequence[Era], *, rows: int = HELD_OUT_ROWS) -> Tensor:
    """Return the rows for evaluation, as many from each era."""
    generator = torch.Generator().manual_seed(0)
    era_rows = -(-rows // len(eras))
    return torch.cat(
        [_rows(_values(era.held_out), era_rows, generator) for era in eras]
    )


def _values(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _rows(values: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    first = torch.randint(len(values) - CONTEXT, (rows, 1), generator=generator)
    return values[first + torch.arange(CONTEXT + 1)].long()


ROWS = 4
"""Rows of a batch on one island; data parallel takes as many of every era.

More would mean fewer steps on as many tokens: with 8, islands end 8 % above data
parallel instead of 5 %, and both learn less.
"""

DATA_PARALLEL_LR = 3e-3
"""Tuned for data parallel: 2.5e-3 to 4e-3 gave the same loss, 6.5e-3 a worse one."""

WARMUP_SHARE, LAST_SHARE = 0.15, 0.05


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer that an island steps, and data parallel as well."""
    return torch.optim.AdamW(
        model.parameters(), DATA_PARALLEL_LR, betas=(0.9, 0.98), fused=True
    )


def inner_lr(settings: RunSettings) -> float:
    """Return the peak rate of an island: the outer step makes a drift larger.

    A steady drift grows by lr / (1 - momentum), so the inner rate shrinks by it.
    """
    outer = settings.outer
    return DATA_PARALLEL_LR * (1 - outer.momentum) / outer.lr


def set_lr(optimizer: torch.optim.Optimizer, peak: float, *, done: float) -> None:
    """Set the rate for a share of the steps that is done: up, then down a cosine."""
    up = min(1.0, (done + 1e-3) / WARMUP_SHARE)
    down = max(0.0, min(1.0, (done - WARMUP_SHARE) / (1 - WARMUP_SHARE)))
    cosine = LAST_SHARE + (1 - LAST_SHARE) * (1 + math.cos(math.pi * down)) / 2
    for group in optimizer.param_groups:
        group["lr"] = peak * up * cosine


def num_rounds(settings: RunSettings) -> int:
    """Return the run's last round.

    Raises:
        UsageError: it has none, so a schedule would have no end.
    """
    if settings.run.end_rounds is None:
        raise UsageError("run.end_rounds is not set, but the demo must end. Set it.")
    return settings.run.end_rounds


def num_steps(settings: RunSettings) -> int:
    """Return the inner steps of each island until the last round is sent."""
    return num_rounds(settings) * settings.sync.sync_every


class AnchorCopies:
    """One shard's copies of the anchor; all shards take about `looks`, evenly spaced.

    Shard 0 takes the last one.
    """

    def __init__(self, *, looks: int, shard: int, num_shards: int) -> None:
        self._looks, self._shard, self._num_shards = looks, shard, num_shards
        self._last_due = -1
        self._anchors: dict[int, dict[str, Tensor]] = {}

    def look(self, island: Island) -> None:
        """Copy the anchor if one is due, and it is this shard's turn."""
        due = island.round * self._looks // num_rounds(island.settings)
        if due > self._last_due:
            self._last_due = due
            if (self._looks - due) % self._num_shards == self._shard:
                self._anchors[island.round] = island.anchor()

    def judge(self, model: GPT, held_out: Tensor, *, round_tokens: int) -> list[Point]:
        """Return each anchor's loss by the tokens of all islands that are in it.

        Afterwards the model is the last of them.
        """
        losses: list[Point] = []
        for round, weights in sorted(self._anchors.items()):
            model.load_state_dict(weights)
            losses.append((float(round * round_tokens), evaluate(model, held_out)))
        return losses


SHORTEST_WAIT_S = 0.005
"""Shorter waits are the cost of a check, and too short for a chart."""


class MetricsLog:
    """Losses, rounds and waits of an island by the time since its first entry."""

    def __init__(self) -> None:
        self.started_unix_s = time.time()
        self.seconds = 0.0
        self.losses: list[Point] = []
        self.rounds: list[Point] = []
        self.waits: list[Point] = []
        self._started_s: float | None = None
        self._wait_s = 0.0

    def note(self, metrics: Mapping[str, float]) -> None:
        """Record an island's metrics, once for each inner step."""
        now_s = time.monotonic()
        if self._started_s is None:
            self._started_s, self.started_unix_s = now_s, time.time()
        self.seconds = now_s - self._started_s
        self.losses.append((metrics["atoll/tokens"], metrics["atoll/loss"]))
        self._note_round(metrics["atoll/round"])
        self._note_wait(metrics["atoll/wait_s"])

    def _note_round(self, round: float) -> None:
        if not self.rounds or self.rounds[-1][1] < round:
            self.rounds.append((self.seconds, round))

    def _note_wait(self, wait_s: float) -> None:
        waited_s, self._wait_s = wait_s - self._wait_s, wait_s
        if waited_s >= SHORTEST_WAIT_S:
            self.waits.append((max(0.0, self.seconds - waited_s), self.seconds))


LOOKS = 12
"""Anchors that all islands keep together: enough for a curve."""

OPENING = "Fellow citizens of the "
SAMPLE_BYTES = 320


def train_island(
    model: GPT,
    eras: Sequence[Era],
    shard: int,
    run: MemoryRun | str | None = None,
    *,
    rows: int = ROWS,
) -> IslandResults:
    """Train on one era until the run ends, then evaluate a share of the anchors.

    Args:
        run: None reads ATOLL_RUN.
    """
    era, optimizer = eras[shard], make_optimizer(model)
    log, anchors = (
        MetricsLog(),
        AnchorCopies(looks=LOOKS, shard=shard, num_shards=len(eras)),
    )
    with atoll.torch.join(model, optimizer, run, island=era.name) as island:
        peak, steps = inner_lr(island.settings), num_steps(island.settings)
        for batch in batches(era.text, rows=rows, seed=shard):
            set_lr(optimizer, peak, done=island.run_steps / steps)
            loss = loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            island.report(tokens=rows * CONTEXT, loss=loss)
            log.note(island.metrics())
            anchors.look(island)
            optimizer.step()
            optimizer.zero_grad()
    log.note(island.metrics())
    anchors.look(island)
    results = _results(island, log, shard, lr=peak)
    round_tokens = island.settings.sync.sync_every * rows * CONTEXT * len(eras)
    held_out = held_out_rows(eras)
    results["held_out"] = anchors.judge(model, held_out, round_tokens=round_tokens)
    if shard == 0:
        results["sample"] = write(model, OPENING, length=SAMPLE_BYTES)
    return results


def _results(
    island: atoll.torch.Island, log: MetricsLog, shard: int, *, lr: float
) -> IslandResults:
    metrics = island.metrics()
    return {
        "island": island.name,
        "shard": shard,
        "num_parameters": sum(tensor.numel() for tensor in island.anchor().values()),
        "started_unix_s": log.started_unix_s,
        "seconds": log.seconds,
        "round": island.round,
        "inner_steps": island.inner_steps,
        "tokens": int(metrics["atoll/tokens"]),
        "wait_s": metrics["atoll/wait_s"],
        "bytes_up": int(metrics["atoll/bytes_up"]),
        "bytes_down": int(metrics["atoll/bytes_down"]),
        "lr": lr,
        "digest": island.digest,
        "losses": log.losses,
        "rounds": log.rounds,
        "waits": log.waits,
        "held_out": [],
        "sample": "",
        "versions": {
            "atoll": atoll.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def run_island(
    eras: Sequence[Era], shard: int, results: Path, *, run: str | None = None
) -> None:
    """Run one island in this process, from its first step to its results."""
    torch.set_num_threads(1)  # the islands of one machine share its cores
    island_results = train_island(GPT(), eras, shard, run)
    unfinished = results.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(island_results))
    os.replace(unfinished, results)  # a reader sees all of it, or no file


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one island, and write its results to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", type=int, required=True, help="which era, from 0")
    parser.add_argument("--of", type=int, required=True, help="number of eras")
    parser.add_argument("--results", type=Path, required=True, help="a JSON file")
    options = parser.parse_args(arguments)
    eras = split_by_era(read_messages(), options.of)
    run_island(eras, options.shard, options.results)


if __name__ == "__main__":
    main()


OnStep = Callable[[int, int, float], None]
"""Called with the step, the number of steps and the loss."""


def train_on_same_tokens(
    islands: Sequence[IslandResults],
    eras: Sequence[Era],
    *,
    on_step: OnStep = lambda step, steps, loss: None,
) -> ParallelResults:
    """Train the demo's model on as many tokens as these islands did together."""
    steps = max(island["inner_steps"] for island in islands)
    return train_data_parallel(GPT(), eras, steps=steps, on_step=on_step)


def train_data_parallel(
    model: GPT,
    eras: Sequence[Era],
    *,
    steps: int,
    rows: int = ROWS,
    lr: float = DATA_PARALLEL_LR,
    looks: int = 12,
    on_step: OnStep = lambda step, steps, loss: None,
) -> ParallelResults:
    """Train on the batches that the islands had, those of one step together.

    Args:
        looks: number of evaluations on held-out text, evenly spaced.
    """
    optimizer, judge = make_optimizer(model), Judge(model, held_out_rows(eras))
    data = [batches(era.text, rows=rows, seed=shard) for shard, era in enumerate(eras)]
    look_after = {steps * look // looks for look in range(looks + 1)}
    step_tokens, started_s = rows * CONTEXT * len(eras), time.monotonic()
    judge.look(0)
    for step in range(1, steps + 1):
        set_lr(optimizer, lr, done=(step - 1) / steps)
        loss = loss_of(model, torch.cat([next(era_batches) for era_batches in data]))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        on_step(step, steps, loss.item())
        if step in look_after:
            judge.look(step * step_tokens)
    return {
        "steps": steps,
        "tokens": steps * step_tokens,
        "lr": lr,
        "seconds": time.monotonic() - started_s - judge.spent_s,
        "loss": judge.losses[-1][1],
        "held_out": judge.losses,
    }


@dataclass
class Judge:
    """Evaluates on held-out text, and counts the time it takes."""

    model: GPT
    held_out: Tensor
    losses: list[Point] = field(default_factory=list)
    spent_s: float = 0.0

    def look(self, tokens: int) -> None:
        started_s = time.monotonic()
        self.losses.append((float(tokens), evaluate(self.model, self.held_out)))
        self.spent_s += time.monotonic() - started_s
