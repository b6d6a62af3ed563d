"""A run that is taken from place to place, and its islands, which follow."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.create import make_run
from atoll.exchange.bucket.documents import fetch
from atoll.security import Credentials, Role, credentials_directory, token_file
from atoll.settings import RunSettings
from atoll.store import open_store
from tests.e2e.places_again import rounds_at
from tests.e2e.rounds_again import Again, Report, require_all_work, require_same_end
from tests.e2e.stage import PATIENT_S, ROOT, Island, Settings, Stage, until


def control(run: str, action: str, environment: Mapping[str, str]) -> None:
    """Say `atoll control RUN ACTION`."""
    subprocess.run(
        [sys.executable, "-c", CONTROL, run, action],
        env={**os.environ, **environment},
        cwd=ROOT,
        timeout=PATIENT_S,
        check=True,
    )


CONTROL = "import sys; from atoll.cli import main; main(['control', *sys.argv[1:]])"


@dataclass
class MoveStage:
    """One run in a store, and the coordinator that it may go to. Close it."""

    folder: Path
    settings: Settings
    islands: list[Island] = field(default_factory=list)
    coordinator: Stage = field(init=False)

    def __post_init__(self) -> None:
        self.coordinator = Stage(self.folder, self.settings, name="target")

    @property
    def bucket(self) -> str:
        return str(self.folder / "bucket")

    def make(self) -> None:
        """Make the run in the store."""
        given = {key: dict(value) for key, value in self.settings.items()}
        store = open_store(self.bucket)
        make_run(store, RunSettings.from_dict(given), url=self.bucket)

    def island(
        self, name: str, *, url: str | None = None, user: str = "user"
    ) -> Island:
        """Start an island that goes where its run goes, with a user's credentials."""
        told, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
        told.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "tests.e2e.following_island", url or self.bucket),
            *(name, "--folder", str(self.folder), "--seed", str(len(self.islands))),
            *("--elements", "64", "--step-s", "0.02"),
        ]
        environment = self._environment | {"XDG_CONFIG_HOME": str(self.folder / user)}
        with log.open("a") as errors:
            process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stderr=errors
            )
        island = Island(name, process, told, log)
        self.islands.append(island)
        return island

    def until_closed(self, round: int) -> None:
        """Return when a round of every fragment has its roster in the store."""
        store = open_store(self.bucket)
        for fragment in range(self.coordinator.num_fragments):
            prefix, wanted = (
                keys.round_prefix(fragment, round),
                keys.roster(fragment, round),
            )
            until(
                f"round {round} of fragment {fragment} to be closed",
                lambda prefix=prefix, wanted=wanted: any(  # type: ignore[misc]
                    item.key == wanted for item in store.items(prefix)
                ),
            )

    def move(
        self, *options: str, source: str | None = None, target: Stage | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Take the run from the store to the coordinator, or begin to."""
        to = target or self.coordinator
        return self.say(
            source or self.bucket, to.url, "--dir", str(to.directory), *options
        )

    def control(self, action: str) -> None:
        """Say `atoll control` about the run, wherever it is."""
        run = self.coordinator.url if self._served else self.bucket
        control(run, action, self._environment)

    def say(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Say `atoll move` with these words."""
        return subprocess.run(
            [sys.executable, "-m", "tests.e2e.move_process", *words],
            env=self._environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENT_S,
            check=False,
        )

    def ended_at(
        self, islands: list[Island], *where: Path | str
    ) -> tuple[Again, dict[str, Report]]:
        """Wait for the end; require one anchor, and nobody's work lost or twice.

        `where` are the places that the run has been at.
        """
        reports: dict[str, Report] = {each.name: each.wait() for each in islands}
        for stage in self._served:
            stage.close_coordinator()
        again = rounds_at(self.folder / "updates", *where)
        require_same_end(again, reports.values())
        for name, report in reports.items():
            require_all_work(again, name, report)
        return again, reports

    def serve(self, stage: Stage | None = None, *, is_up: bool = False) -> None:
        """Start a coordinator on its directory, unless it is up."""
        stage = stage or self.coordinator
        assert is_up or stage.serve()
        self._served.append(stage)

    def can_be_served(self) -> bool:
        """Return whether the coordinator starts on its directory; then it is up."""
        is_up = self.coordinator.serve()
        if not is_up:
            self.coordinator.kill()
        return is_up

    def know(self, user: str) -> None:
        """Give a user the credentials of the coordinator."""
        place = credentials_directory(Path(), xdg_config_home=str(self.folder / user))
        files = {role: token_file(self.coordinator.directory, role) for role in Role}
        Credentials(place).remember(self.coordinator.url, pin=None, tokens=files)

    def words(self) -> list[str]:
        """Return what operators have said in the store."""
        store, said = open_store(self.bucket), []
        for number in range(1, len(list(store.items(keys.CONTROL))) + 1):
            said.append(fetch(store, documents.CONTROL, keys.control(number)).action)
        return said

    def close(self) -> None:
        """End every process that still runs."""
        for each in self.islands:
            if each.process.poll() is None:
                each.process.kill()
                each.process.wait()
        for stage in self._served:
            stage.close()

    _served: list[Stage] = field(default_factory=list)

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.coordinator.environment}
