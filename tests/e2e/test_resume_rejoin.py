"""Kill -9 and the same command again, when the run has the weights: nothing twice."""

from __future__ import annotations

import re
import sys

import pytest

import atoll
from atoll import RunSettings
from tests.e2e.stage import Island, Stage
from tests.e2e.test_resume_exact import settings_for


def start(stage: Stage, name: str, run: str, *, dies_at: int = -1) -> Island:
    command = [
        *(sys.executable, "-m", "tests.e2e.resuming_island", run, name),
        *("--folder", str(stage.folder), "--seed", "0", "--step-s", "0.01"),
        *("--dies-at", str(dies_at), "--rejoins"),
    ]
    return stage._island(name, command, None)


@pytest.mark.parametrize("place", ["coordinator", "store"])
def test_rows_that_the_run_counted_are_not_trained_again(
    stage: Stage, place: str
) -> None:
    """The next life goes on behind the last seal, and tells what it lost."""
    stage.settings = settings_for(1)
    if place == "store":
        run = str(stage.folder / "bucket")
        atoll.init(run, RunSettings.from_dict(stage.settings))
    else:
        stage.serve()
        run = stage.url
    first = start(stage, "a", run, dies_at=23)
    assert first.process.wait(60) == -9, first.log.read_text()[-3000:]
    second = start(stage, "a", run).wait()

    (told,) = second["told"]
    made, counted, saved, lost, tokens = map(
        int,
        re.fullmatch(
            r"Island 'a' had made (\d+) inner steps\. The run has counted (\d+), the "
            r"checkpoint holds (\d+): (\d+) inner steps with (\d+) tokens are lost\.",
            told,
        ).groups(),  # type: ignore[union-attr]
    )
    kept = max(counted, saved)  # the last seal may have died with its island
    assert made == 22
    assert counted in (15, 18, 21)
    assert (lost, tokens) == (made - kept, 32 * (made - kept))
    assert second["rows"][0] == kept
    assert second["round"] == 7
