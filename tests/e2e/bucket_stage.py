"""A run in a store, and its islands as processes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from atoll.exchange.bucket import keys
from atoll.exchange.bucket.create import make_run
from atoll.exchange.bucket.view import LEASE_S
from atoll.settings import RunSettings
from atoll.store import Store, open_store
from tests.e2e.rounds_again import (
    Again,
    Report,
    bucket_rounds_again,
    require_all_work,
    require_nothing_twice,
    require_same_end,
)
from tests.e2e.stage import ROOT, Island, Settings, until


@dataclass
class BucketStage:
    """One run in a store. `close` ends all that is left."""

    folder: Path
    url: str
    lease_s: float = LEASE_S
    """How long islands wait for one that was killed."""

    environment: dict[str, str] = field(default_factory=dict)
    islands: list[Island] = field(default_factory=list)

    @property
    def store(self) -> Store:
        return open_store(self.url)

    def make(self, settings: Settings) -> None:
        """Make the run."""
        given = {key: dict(value) for key, value in settings.items()}
        make_run(self.store, RunSettings.from_dict(given), url=self.url)

    def island(
        self,
        name: str,
        *,
        elements: int = 64,
        step_s: float = 0.02,
        dies_at: str | None = None,
    ) -> Island:
        """Start an island of two fragments; its lives differ in what they learn."""
        told, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
        told.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "tests.e2e.bucket_island", self.url, name),
            *("--folder", str(self.folder), "--seed", str(len(self.islands))),
            *("--elements", str(elements), "--step-s", str(step_s)),
            *("--lease-s", str(self.lease_s)),
            *(["--dies-at", dies_at] if dies_at else []),
        ]
        places = {
            "XDG_CONFIG_HOME": str(self.folder / "user"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        with log.open("a") as errors:
            process = subprocess.Popen(
                command,
                env={**os.environ, **self.environment, **places},
                cwd=ROOT,
                stderr=errors,
            )
        island = Island(name, process, told, log)
        self.islands.append(island)
        return island

    def until_closed(self, round: int, fragment: int = 0) -> None:
        """Return when a round has its roster."""
        store, prefix = self.store, keys.round_prefix(fragment, round)
        wanted = keys.roster(fragment, round)
        until(
            f"round {round} to be closed",
            lambda: any(item.key == wanted for item in store.items(prefix)),
        )

    def ended_well(
        self, *islands: Island, may_drop: str = ""
    ) -> tuple[Again, dict[str, Report]]:
        """Wait for the end of the run; require one anchor, and nobody's work lost.

        `may_drop` names one that may have been away for longer than two rounds.
        """
        reports: dict[str, Report] = {each.name: each.wait() for each in islands}
        again = bucket_rounds_again(self.store, self.folder / "updates")
        require_same_end(again, reports.values())
        for name, report in reports.items():
            if name == may_drop and report["updates_dropped"]:
                require_nothing_twice(again, name, report)
            else:
                require_all_work(again, name, report)
        return again, reports

    def close(self) -> None:
        """End every process that still runs."""
        for each in self.islands:
            if each.process.poll() is None:
                each.process.kill()
                each.process.wait()
