"""A pass of four islands in real processes, of which one dies again and again."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from _served import Served, serving

ISLANDS, VICTIM = 4, 3
WINDOW = 5
"""Inner steps."""

LOOK_S = 0.05


def share_trained(order: str, *, rows: int, killed_every: int) -> float:
    """Return which share of the rows is trained when nobody else has any left.

    The last island is killed every `killed_every` rounds, and starts again at once.
    With shares by number this is an upper bound: all rows of inner steps.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        served = stack.enter_context(serving(folder, settings(order)))
        crew = Crew(served, folder, rows, stack)
        crew.kill_until_over(killed_every)
        if order == "run":
            trained: int = served.status()["data"]["trained"]
            return trained / rows
        return crew.num_seen() / rows


class Crew:
    """The processes of all islands."""

    def __init__(
        self, served: Served, folder: Path, rows: int, stack: ExitStack
    ) -> None:
        self._served, self._folder, self._rows = served, folder, rows
        self._stack = stack
        self._islands = [self._start(number) for number in range(ISLANDS)]

    def kill_until_over(self, every: int) -> None:
        """Kill the victim every so many rounds until the others have ended."""
        others, next_death = self._islands[:VICTIM], every
        is_dealt = self._served.status()["data"] is not None

        def is_over() -> bool:
            return all(island.poll() is not None for island in others)

        while not is_over():
            if self._round() >= next_death:
                self._islands[VICTIM].kill()
                self._islands[VICTIM].wait()
                self._islands[VICTIM] = self._start(VICTIM)
                next_death = self._round() + every
            time.sleep(LOOK_S)
        assert all(island.returncode == 0 for island in others), self._log()
        if is_dealt:
            assert self._islands[VICTIM].wait(300.0) == 0, self._log()

    def num_seen(self) -> int:
        """Return the number of rows on which some inner step was made."""
        files = self._folder.glob("*.seen")
        seen = [np.fromfile(file, np.int64) for file in files]
        return len(np.unique(np.concatenate(seen)))

    def _round(self) -> int:
        commits = self._served.events("round_committed")
        return int(commits[-1]["round"]) if commits else 0

    def _log(self) -> str:
        return "".join(file.read_text() for file in self._folder.glob("i*.log"))

    def _start(self, number: int) -> subprocess.Popen[Any]:
        name, script = f"i{number}", Path(__file__).with_name("_data_island.py")
        seen = str(self._folder / f"{name}.seen")
        log = self._stack.enter_context((self._folder / f"{name}.log").open("ab"))
        process = subprocess.Popen(
            [
                *(sys.executable, str(script)),
                *(self._served.url, name, str(self._rows), seen),
            ],
            env=dict(self._served.environment),
            stderr=log,
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process


def settings(order: str) -> dict[str, dict[str, Any]]:
    """Return the settings of a run that divides its data in one of the two ways."""
    return {
        "run": {"name": "deaths", "start_islands": ISLANDS},
        "sync": {"sync_every": WINDOW, "num_fragments": 1},
        "limits": {"deadline_max_s": 60.0},
        "data": {"order": order, **({"unit_rows": 32} if order == "run" else {})},
    }
