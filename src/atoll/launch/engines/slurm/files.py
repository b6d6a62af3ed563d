"""The directory of a launch on a cluster: how leaders of tasks and others meet.

    job.sh              what was submitted
    secrets.json        values of variables, for this user's eyes alone; gone when no
                        task can start any more
    3/state.json        what became of island 3, by the word of its leader
    3/cancel.json       that it is to go, and within which time
    3/island-3.log      what island 3 says, all of its lives

Rule 1: a state names the life of the task that wrote it: when Slurm has given the task
to another node, the word of the leader before is history.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import AtollError, CorruptError
from atoll.launch.engines.local.files import Known, LaunchFiles
from atoll.launch.states import Report
from atoll.security import Secret
from atoll.security.private import read_private, remove_private, replace_private

MAX_SECRETS_BYTES = 2**22


def write_secrets(place: Path, values: Mapping[str, Secret]) -> None:
    """Keep what the leaders of a launch give to their islands."""
    said = {name: value.reveal() for name, value in values.items()}
    replace_private(place / "secrets.json", json.dumps(said).encode())


def read_secrets(place: Path) -> dict[str, str]:
    """Return the values of variables.

    Raises:
        NoSuchFile: the launch was over.
    """
    path = place / "secrets.json"
    data = read_private(path, what="secrets", max_bytes=MAX_SECRETS_BYTES)
    try:
        return {str(name): str(value) for name, value in json.loads(data).items()}
    except (ValueError, AttributeError) as exc:
        raise CorruptError(f"{path} holds no secrets. Launch again.") from exc


def drop_secrets(place: Path) -> None:
    """Forget what no island is given any more. Safe to repeat."""
    with suppress(AtollError):  # a disk that fails now is asked again by the next poll
        remove_private(place / "secrets.json")


@dataclass(frozen=True)
class IslandFiles:
    """The files of one island."""

    place: Path
    index: int

    @property
    def _files(self) -> LaunchFiles:
        return LaunchFiles(self.place / str(self.index))

    @property
    def log(self) -> Path:
        return self._files.log(self.index)

    def make(self) -> None:
        """Make the directory."""
        self._files.directory.mkdir(mode=0o700)

    def lines(self, after: int) -> list[str]:
        """Return what the island has said, without the first lines."""
        return self._files.lines(self.index, after, 0)[0]

    def write_state(self, report: Report, *, life: int) -> None:
        """Keep what the leader knows, in the life of the task that is told."""
        self._files.write_state([Known(report, None, str(life))])

    def read_state(self, *, life: int | None) -> Report | None:
        """Return the leader's last word, if it is of this life of the task.

        None for `life` takes that of any: there is no task any more.
        """
        for known in self._files.read_state() or ():
            if life is None or known.started == str(life):
                return known.report
        return None

    def ask_to_go(self, grace_s: float) -> bool:
        """Ask the leader to let the island go; return whether that was asked before."""
        if not self._files.directory.is_dir():
            return False
        was_asked = self.was_asked_to_go()
        if not was_asked:
            self._files.write_request([self.index], grace_s)
        return was_asked

    def was_asked_to_go(self) -> bool:
        """Return whether somebody has cancelled the island."""
        return self.grace_s() is not None

    def grace_s(self) -> float | None:
        """Return within which time the island is to go, or None if it may stay."""
        asked = self._files.read_request()
        return None if asked is None else asked[1]
