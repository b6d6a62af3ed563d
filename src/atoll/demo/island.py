"""One island of the demo: a plain loop, joined to a run.

    ATOLL_RUN=... python -m atoll.demo.island --shard 0 --of 4 --results era.json

trains on one era until the run ends, and writes its results.

Anchors are kept during the run and evaluated at its end: an evaluation in between would
let every other island wait for this one. Anchors are the same on all islands, so each
island evaluates a share of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

import atoll.torch
from atoll.demo.dataset import Era, read_messages, split_by_era
from atoll.demo.model import (
    CONTEXT,
    GPT,
    ROWS,
    batches,
    evaluate,
    held_out_rows,
    inner_lr,
    loss_of,
    make_optimizer,
    num_rounds,
    num_steps,
    set_lr,
    write,
)
from atoll.demo.results import IslandResults, Point
from atoll.exchange import MemoryRun
from atoll.torch import Island


class KeptAnchors:
    """One shard's copies of the anchor: all have about `looks`, evenly over the run.

    The last one is shard 0's.
    """

    def __init__(self, *, looks: int, shard: int, of: int) -> None:
        self._looks, self._shard, self._of = looks, shard, of
        self._taken = -1
        self._kept: dict[int, dict[str, Tensor]] = {}

    def look(self, island: Island) -> None:
        """Keep the anchor if it is time to, and this shard's turn."""
        due = island.round * self._looks // num_rounds(island.settings)
        if due > self._taken:
            self._taken = due
            if (self._looks - due) % self._of == self._shard:
                self._kept[island.round] = island.anchor()

    def judge(self, model: GPT, held_out: Tensor, *, round_tokens: int) -> list[Point]:
        """Return each anchor's loss by the tokens of all islands that are in it.

        Afterwards the model is the last of them.
        """
        losses: list[Point] = []
        for round, weights in sorted(self._kept.items()):
            model.load_state_dict(weights)
            losses.append((float(round * round_tokens), evaluate(model, held_out)))
        return losses


SHORTEST_WAIT_S = 0.005
"""A shorter one is the cost of looking, and nobody would see it in a picture."""


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
        """Write down what an island counts of itself, once for each inner step."""
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


def train(
    model: GPT,
    eras: Sequence[Era],
    shard: int,
    run: MemoryRun | str | None = None,
    *,
    rows: int = ROWS,
) -> IslandResults:
    """Train on one era until the run ends, and judge a share of the anchors afterwards.

    Args:
        run: None reads ATOLL_RUN.
    """
    era, optimizer = eras[shard], make_optimizer(model)
    diary, anchors = MetricsLog(), KeptAnchors(looks=LOOKS, shard=shard, of=len(eras))
    with atoll.torch.join(model, optimizer, run, island=era.name) as island:
        peak, steps = inner_lr(island.settings), num_steps(island.settings)
        for batch in batches(era.text, rows=rows, seed=shard):
            set_lr(optimizer, peak, done=island.run_steps / steps)
            loss = loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            island.report(tokens=rows * CONTEXT, loss=loss)
            diary.note(island.metrics())
            anchors.look(island)
            optimizer.step()
            optimizer.zero_grad()
    diary.note(island.metrics())
    anchors.look(island)
    results = _results(island, diary, shard, lr=peak)
    round_tokens = island.settings.sync.sync_every * rows * CONTEXT * len(eras)
    held_out = held_out_rows(eras)
    results["held_out"] = anchors.judge(model, held_out, round_tokens=round_tokens)
    if shard == 0:
        results["sample"] = write(model, OPENING, length=SAMPLE_BYTES)
    return results


def _results(
    island: atoll.torch.Island, diary: MetricsLog, shard: int, *, lr: float
) -> IslandResults:
    metrics = island.metrics()
    return {
        "island": island.name,
        "shard": shard,
        "num_parameters": sum(each.numel() for each in island.anchor().values()),
        "started_unix_s": diary.started_unix_s,
        "seconds": diary.seconds,
        "round": island.round,
        "inner_steps": island.inner_steps,
        "tokens": int(metrics["atoll/tokens"]),
        "wait_s": metrics["atoll/wait_s"],
        "bytes_up": int(metrics["atoll/bytes_up"]),
        "bytes_down": int(metrics["atoll/bytes_down"]),
        "lr": lr,
        "digest": island.digest,
        "losses": diary.losses,
        "rounds": diary.rounds,
        "waits": diary.waits,
        "held_out": [],
        "sample": "",
        "versions": {
            "atoll": atoll.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def live(
    eras: Sequence[Era], shard: int, results: Path, *, run: str | None = None
) -> None:
    """Be one island from its first step to its results, in a process of its own."""
    torch.set_num_threads(1)  # the islands of one machine share its cores
    found = train(GPT(), eras, shard, run)
    unfinished = results.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(found))
    os.replace(unfinished, results)  # who sees the file sees all of it


def main(arguments: Sequence[str] | None = None) -> None:
    """Be one island, and leave the results where the caller looks for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", type=int, required=True, help="which era, from 0")
    parser.add_argument("--of", type=int, required=True, help="number of eras")
    parser.add_argument("--results", type=Path, required=True, help="a JSON file")
    asked = parser.parse_args(arguments)
    live(split_by_era(read_messages(), asked.of), asked.shard, asked.results)


if __name__ == "__main__":
    main()
