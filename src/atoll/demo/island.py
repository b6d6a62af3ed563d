"""One island of the demo: a plain loop, joined to a run.

    ATOLL_RUN=... python -m atoll.demo.island --shard 0 --of 4 --results era.json

trains on one era until the run ends, and writes what it saw.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

import atoll.torch
from atoll.demo.anchors import Anchors
from atoll.demo.data import batches, held_out_rows
from atoll.demo.diary import Diary
from atoll.demo.eras import Era, read_messages, split_by_era
from atoll.demo.model import CONTEXT, GPT, loss_of, write
from atoll.demo.recipe import ROWS, inner_lr, make_optimizer, num_steps, set_lr
from atoll.demo.results import IslandResults
from atoll.exchange import MemoryRun

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
    diary, anchors = Diary(), Anchors(looks=LOOKS, shard=shard, of=len(eras))
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
    island: atoll.torch.Island, diary: Diary, shard: int, *, lr: float
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
