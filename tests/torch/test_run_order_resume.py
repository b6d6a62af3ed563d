"""Islands that die in a run that deals out its rows: no row twice, and none left out.

Nothing is saved of the position in the data: the run knows which rows have counted.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import atoll.torch
from atoll.checkpoint import COMPONENTS, Policy
from atoll.exchange import MemoryRun
from atoll.torch import Island, shard
from atoll.torch.island import handle_of
from tests.torch.runs import Weights, run_of, sgd, together, train
from tests.torch.test_resume import die
from tests.torch.test_run_order import spans_of

pytestmark = [
    pytest.mark.torch,
    # An island without its optimizer's moments is warned of.
    pytest.mark.filterwarnings("ignore:Island .* (continues|had made|rejoins)"),
]

ROWS, BATCH, EVERY = 90, 2, 4


def dealing_run(islands: int = 1, *, fragments: int = 1, overlap: int = 0) -> MemoryRun:
    return run_of(
        islands,
        every=EVERY,
        data={"order": "run", "unit_rows": 8, "seed": 5},
        sync={"overlap_steps": overlap, "num_fragments": fragments},
    )


class Loop:
    """One start of a training script."""

    def __init__(self, run: MemoryRun, directory: Path | None, **policy: Any) -> None:
        self.run, self.directory, self.policy = run, directory, policy
        self.rows: list[int] = []

    def live(self, name: str, *, dies_at: int | None = None) -> Island:
        """Train until the data ends, or die after an inner step."""
        model = torch.nn.Sequential(Weights(1.0, 2.0), Weights(3.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = self.directory and Policy(
            str(self.directory / name), **{"every_rounds": 1, **self.policy}
        )
        island = atoll.torch.join(
            model, optimizer, self.run, island=name, checkpoint=policy
        )
        loader = DataLoader(TensorDataset(torch.arange(ROWS)), batch_size=BATCH)
        with island:
            for (batch,) in shard(loader, island):
                self.rows += batch.tolist()
                sum(part() for part in model).backward()
                optimizer.step()
                optimizer.zero_grad()
                if island.inner_steps == dies_at:
                    end(island)
                    break
        return island


def end(island: Island) -> None:
    """End an incarnation as an error does: it leaves, and publishes nothing more."""
    if island._checkpointing is not None:
        die(island)
        return
    island._detach()
    handle_of(island).leave(depart=False, is_alone=True)


def counted_turns(run: MemoryRun, fragment: int = 0) -> Counter[int]:
    """Return how often each turn has counted."""
    counted: Counter[int] = Counter()
    for _, spans in spans_of(run, fragment):
        for first, last in spans:
            counted.update(range(first, last))
    return counted


EVERY_ROW = Counter(range(ROWS))


@pytest.mark.parametrize("dies_at", [1, 3, 4, 5, 9, 12])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("components", [None, COMPONENTS], ids=["rejoin", "exact"])
def test_every_row_counts_once_although_an_island_dies(
    dies_at: int,
    fragments: int,
    overlap: int,
    components: tuple[str, ...] | None,
    tmp_path: Path,
) -> None:
    """Its next incarnation trains all rows that no fragment has counted."""
    run = dealing_run(fragments=fragments, overlap=overlap)
    Loop(run, tmp_path, components=components).live("a", dies_at=dies_at)
    Loop(run, tmp_path, components=components).live("a")

    counted = [counted_turns(run, fragment) for fragment in range(fragments)]
    assert all(set(turns.values()) == {1} for turns in counted)
    assert set(chain(*counted)) == set(EVERY_ROW)


@pytest.mark.parametrize("dies_at", [1, 4, 6])
def test_a_restart_without_a_checkpoint_trains_what_has_not_counted(
    dies_at: int,
) -> None:
    """The rows of its lost window are its first ones."""
    run = dealing_run()
    first, again = Loop(run, None), Loop(run, None)
    first.live("a", dies_at=dies_at)
    again.live("a")

    assert counted_turns(run) == EVERY_ROW
    lost = first.rows[dies_at // EVERY * EVERY * BATCH :]
    assert again.rows[: len(lost)] == lost


def test_another_island_trains_the_rows_of_one_that_has_gone(tmp_path: Path) -> None:
    """It left without its last work, so the run deals those rows again."""
    run = dealing_run()
    lost, rest = Loop(run, None), Loop(run, None)
    lost.live("a", dies_at=6)
    rest.live("b")

    assert counted_turns(run) == EVERY_ROW
    assert sorted(lost.rows[: EVERY * BATCH] + rest.rows) == list(range(ROWS))


def test_islands_that_die_and_come_back_share_a_pass(tmp_path: Path) -> None:
    """Three at the same time, one of which dies twice."""
    run = dealing_run(3)

    def mortal() -> None:
        for dies_at in (3, 6, None):
            Loop(run, tmp_path).live("a", dies_at=dies_at)

    together(
        mortal,
        lambda: Loop(run, tmp_path).live("b"),
        lambda: Loop(run, tmp_path).live("c"),
    )

    assert counted_turns(run) == EVERY_ROW


def test_no_position_of_the_data_is_saved(tmp_path: Path) -> None:
    """A checkpoint has no component `data`: the run has the position."""
    run = dealing_run()
    model = Weights(1.0)
    optimizer = sgd(model)
    policy = Policy(str(tmp_path), every_rounds=1)
    with atoll.torch.join(model, optimizer, run, checkpoint=policy) as island:
        for _ in shard(DataLoader(TensorDataset(torch.arange(ROWS))), island):
            train(model, optimizer)

    names = {path.name for path in tmp_path.rglob("*")}
    assert any("island" in name for name in names)
    assert not any(name.startswith("data") or name == "cursors" for name in names)
