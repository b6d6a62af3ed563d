"""Text and a model so small that a whole demo takes a second."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from atoll import RunSettings
from atoll.demo.dataset import (
    Era,
    PresidentialMessage,
    split_by_era,
)
from atoll.demo.results import IslandResults, ParallelResults, Results, summarise
from atoll.demo.train import GPT, train_data_parallel, train_island
from atoll.exchange import MemoryRun

ROWS = 1
STATUS: dict[str, object] = {
    "run": "demo-abcdef123456",
    "version": "0.1",
    "bytes_in": 1000,
    "bytes_out": 3000,
    "islands": [
        {"counted": 8, "late": 1, "refused": 0},
        {"counted": 9, "late": 0, "refused": 2},
    ],
}
"""The part of a coordinator's status that the demo reads."""

SETTINGS = RunSettings.from_dict(
    {
        "run": {"start_islands": 2, "end_rounds": 4},
        "sync": {"sync_every": 3, "num_fragments": 2, "overlap_steps": 1},
        "wire": {"up": "e3m0", "down": "int8"},
        "outer": {"momentum": 0.5},
    }
)


def messages(count: int = 48) -> list[PresidentialMessage]:
    """Return one message a year, all of them as long."""
    return [
        PresidentialMessage(1900 + n, f"{n:03} The Union is well. ".encode() * 40)
        for n in range(count)
    ]


def eras() -> list[Era]:
    """Return two eras of these messages."""
    return split_by_era(messages(), 2)


def tiny() -> GPT:
    """Return a model of seven thousand weights."""
    return GPT(width=16, depth=2, heads=2)


@cache
def _trained() -> str:
    run, texts = MemoryRun(SETTINGS), eras()

    def live(shard: int) -> IslandResults:
        return train_island(tiny(), texts, shard, run, rows=ROWS)

    with ThreadPoolExecutor(2) as threads:
        return json.dumps(list(threads.map(live, (0, 1))))


def trained() -> list[IslandResults]:
    """Return what two islands wrote, as it comes back from their files."""
    found: list[IslandResults] = json.loads(_trained())
    return found


@cache
def trained_in_parallel() -> ParallelResults:
    """Return what data parallel came to in as many steps."""
    steps = trained()[0]["inner_steps"]
    return train_data_parallel(tiny(), eras(), steps=steps, rows=ROWS, looks=3)


def results(*, compares: bool = True) -> Results:
    """Return the results of the small demo."""
    other = trained_in_parallel().copy() if compares else None
    return summarise(trained(), SETTINGS, status=STATUS, parallel=other)
