"""Trainers that people already use, as processes of one run, killed and started again.

The examples are run as they stand: `transformers.Trainer`, `lightning.Trainer`, and a
plain loop with Accelerate.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.stage import Island, Stage, until

ISLANDS = {
    "north": "transformers_trainer.py",
    "south": "lightning_trainer.py",
    "west": "accelerate_loop.py",
}
PATIENT_S = 900.0
"""Loading these libraries on a busy machine takes most of it."""

ROUNDS = 6


def start(stage: Stage, name: str) -> Island:
    """Start an example, by the same command every time."""
    told = stage.folder / f"{name}.json"
    command = [
        *(sys.executable, "-m", "tests.e2e.trainer_island", ISLANDS[name]),
        *(str(stage.folder / name), str(told)),
    ]
    return stage._island(name, command, None)


def last_words(island: Island) -> tuple[str, str]:
    """Return loss and digest, once the island has ended well."""
    island.ends_well(PATIENT_S)
    *_, last = island.told.read_text().splitlines()
    found = re.fullmatch(r"loss ([\d.]+), digest ([0-9a-f]{32})", last)
    assert found is not None, last
    return found[1], found[2]


def has_checkpoint(folder: Path) -> bool:
    """Return whether a trainer has saved since a round was committed."""
    parts = folder.glob("checkpoint-*/island/checkpoint-*[0-9]/manifest.json")
    return any(parts) or any(folder.glob("*.ckpt"))


@pytest.mark.torch
@pytest.mark.timeout(2000)
def test_trainers_are_killed_and_end_with_the_run(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trainers are killed, go on from their checkpoints, and all end on one digest.

    The run waits for three islands, so that nobody ends it while two are away.
    """
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    stage.settings = {
        "run": {
            "name": "trainers",
            "start_islands": 3,
            "quorum": 3,
            "max_islands": 3,
            "end_rounds": ROUNDS,
        },
        "sync": {"sync_every": 10, "num_fragments": 1},
        "outer": {"momentum": 0.5},
    }
    stage.serve()
    islands = {name: start(stage, name) for name in ISLANDS}
    until("a round", lambda: stage.committed() >= 1, within_s=PATIENT_S)
    killed = ("north", "south")
    for name in killed:
        has_saved = partial(has_checkpoint, stage.folder / name)
        until(f"{name} saves", has_saved, within_s=PATIENT_S)
        islands[name].kill()
    before = stage.committed()
    for name in killed:
        islands[name] = start(stage, name)
    words = {name: last_words(island) for name, island in islands.items()}

    assert before < ROUNDS
    assert len(set(words.values())) == 1, words
    # Guessing evenly among 32 words costs log(32) = 3.47 nats.
    assert float(words["north"][0]) < 2.5
    assert stage.committed() == ROUNDS
    for name in killed:
        assert "fresh optimizer" not in islands[name].log.read_text()
        lives = {
            each["incarnation"] for each in stage.events("island_joined", island=name)
        }
        assert len(lives) == 2, lives
