"""One pass over a Hugging Face dataset with three islands of different speeds."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest

import atoll.torch
from atoll.security import Role, token_file
from atoll.torch import shard
from tests.coordinator.serving import serving
from tests.torch.runs import Weights, settings_of, sgd, together, train

pytestmark = pytest.mark.torch

ROWS, BATCH, EVERY = 600, 4, 5
STEP_S = {"a": 0.001, "b": 0.002, "c": 0.008}
MODES: dict[str, dict[str, Any]] = {
    "synchronous, with windows": {"dynamic_local_updates": True},
    "asynchronous": {"mode": "async", "overlap_steps": 2},
}


def words() -> datasets.Dataset:
    """Return a dataset as a tokenizer makes one, with its own fingerprint."""
    raw = datasets.Dataset.from_dict({"text": [f"row {n}" for n in range(ROWS)]})
    return raw.map(
        lambda row: {"input_ids": [len(row["text"])], "n": int(row["text"][4:])}
    )


def seen_by(run: str, data: datasets.Dataset, name: str) -> list[int]:
    """Train until the run has no more rows; return those that the loop was given."""
    model = Weights(1.0)
    optimizer = sgd(model, lr=0.1)
    seen: list[int] = []
    with atoll.torch.join(model, optimizer, run, island=name) as island:
        for number, row in enumerate(shard(data, island), 1):
            seen.append(row["n"])
            if number % BATCH == 0:
                time.sleep(STEP_S[name])  # what computing takes
                train(model, optimizer)
        if len(seen) % BATCH:
            train(model, optimizer)
    return seen


@pytest.mark.parametrize("sync", MODES.values(), ids=MODES)
def test_the_loops_see_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: dict[str, Any]
) -> None:
    """What three loops saw, without what was lost, is each row once; all have some."""
    data = words()
    table = {"order": "run", "unit_rows": 16}
    settings = settings_of(3, every=EVERY, sync=sync, data=table)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    with serving(tmp_path / "run", settings) as coordinator:
        token = token_file(coordinator.directory, Role.ISLAND)
        monkeypatch.setenv("ATOLL_TOKEN_FILE", str(token))
        url = coordinator.url
        seen = together(
            *(lambda name=name: seen_by(url, data, name) for name in STEP_S)
        )
        ledger = coordinator._threaded_service.look()[0].ledger

    # Nobody died, so that nothing is lost.
    assert Counter(row for rows in seen for row in rows) == Counter(range(ROWS))
    assert all(seen)
    assert len(seen[0]) > len(seen[2])
    assert ledger is not None
    assert ledger.counts.trained == ROWS
