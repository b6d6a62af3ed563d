"""Kill -9 at any step, then the same command: it ends where it would have ended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll import RunSettings
from tests.e2e.stage import Island, Settings, Stage

WAITS: Settings = {
    "run": {"name": "stage", "start_islands": 1, "end_rounds": 7},
    "sync": {"sync_every": 6, "num_fragments": 2, "overlap_steps": 2},
    "wire": {"up": "int8", "down": "bf16"},
    "outer": {"momentum": 0.5},
    # A round waits for an island as long as its restart may take on a busy machine.
    "limits": {"deadline_min_s": 120.0, "deadline_max_s": 240.0},
}


def settings_for(islands: int) -> Settings:
    run = {"name": "stage", "start_islands": islands, "end_rounds": 7}
    return {**WAITS, "run": run}


def start(
    stage: Stage, name: str, *, seed: int, dies_at: int = -1, url: str = ""
) -> Island:
    command = [
        *(sys.executable, "-m", "tests.e2e.resuming_island", url or stage.url, name),
        *("--folder", str(stage.folder), "--seed", str(seed), "--step-s", "0.01"),
        *("--dies-at", str(dies_at)),
    ]
    return stage._island(name, command, None)


def opened(stage: Stage, place: str) -> str:
    """Return the run's name, once islands can join it."""
    if place == "coordinator":
        stage.serve()
        return stage.url
    url = str(stage.folder / "bucket")
    atoll.init(url, RunSettings.from_dict(stage.settings))
    return url


def whole(stage: Stage, names: str, place: str = "coordinator") -> list[dict[str, Any]]:
    """Return what a run leads to in which nobody dies."""
    stage.settings = settings_for(len(names))
    url = opened(stage, place)
    islands = [
        start(stage, name, seed=seed, url=url) for seed, name in enumerate(names)
    ]
    led_to = [island.wait() for island in islands]
    stage.close()
    return led_to


def another(stage: Stage, folder: Path) -> Stage:
    folder.mkdir()
    return Stage(folder, settings=stage.settings)


def test_an_island_that_dies_twice_ends_where_it_would_have_ended(
    stage: Stage, tmp_path: Path
) -> None:
    """Weights, moments and anchor have the same bits; its rows are made again."""
    (expected,) = whole(stage, "a")
    cut = another(stage, tmp_path / "cut")
    try:
        cut.serve()
        for dies_at in (17, 14):
            first = start(cut, "a", seed=0, dies_at=dies_at)
            assert first.process.wait(60) == -9, first.log.read_text()[-3000:]
        found = start(cut, "a", seed=0).wait()
    finally:
        cut.close()

    assert found["told"] == []
    for what in ("bits", "anchor", "round", "inner_steps"):
        assert found[what] == expected[what], what


@pytest.mark.parametrize("place", ["coordinator", "store"])
def test_others_wait_for_an_island_that_comes_back_in_time(
    stage: Stage, tmp_path: Path, place: str
) -> None:
    """Both islands of a run end in the same bits as if nobody had died."""
    expected = whole(stage, "ab", place)
    cut = another(stage, tmp_path / "cut")
    try:
        url = opened(cut, place)
        b = start(cut, "b", seed=1, url=url)
        a = start(cut, "a", seed=0, dies_at=20, url=url)
        assert a.process.wait(60) == -9, a.log.read_text()[-3000:]
        found = [start(cut, "a", seed=0, url=url).wait(), b.wait()]
    finally:
        cut.close()

    for mine, its in zip(found, expected, strict=True):
        for what in ("bits", "anchor", "round", "inner_steps"):
            assert mine[what] == its[what], what


def test_an_island_of_a_bucket_ends_where_it_would_have_ended(
    stage: Stage, tmp_path: Path
) -> None:
    """The objects of the rounds that it makes again are there."""
    led_to: list[dict[str, Any]] = []
    for deaths in ([], [20, 13]):
        place = another(stage, tmp_path / f"deaths-{len(deaths)}")
        url = str(place.folder / "bucket")
        atoll.init(url, RunSettings.from_dict(settings_for(1)))
        for dies_at in deaths:
            a = start(place, "a", seed=0, dies_at=dies_at, url=url)
            assert a.process.wait(60) == -9, a.log.read_text()[-3000:]
        led_to.append(start(place, "a", seed=0, url=url).wait())

    assert led_to[1]["told"] == []
    for what in ("bits", "anchor", "round", "inner_steps"):
        assert led_to[1][what] == led_to[0][what], what
