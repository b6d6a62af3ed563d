"""Runs the demo on one machine: a coordinator here, and a process for each island."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.demo import files
from atoll.demo.eras import read_messages, split_by_era, write_eras
from atoll.demo.processes import Islands
from atoll.security import Credentials, Role, token_file
from atoll.settings import RunSettings

if TYPE_CHECKING:
    from atoll.coordinator.app import Coordinator

LOOK_S = 0.5
"""How often the islands are looked at."""

OnLook = Callable[[Mapping[str, Any]], None]


def run_islands(
    directory: Path, settings: RunSettings, *, on_look: OnLook
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train until the run ends; return what each island found out, and the status.

    Raises:
        RemoteError: an island failed; its log says why.
        UsageError: the text is not installed.
    """
    count = settings.run.start_islands
    with ExitStack() as ending:
        # They load the longest, so all else is done meanwhile.
        islands = ending.enter_context(Islands(directory, _environment(directory)))
        from atoll.coordinator.app import Coordinator, Listening

        write_eras(files.text(directory), split_by_era(read_messages(), count))
        coordinator = Coordinator(directory, settings, listening=Listening())
        ending.callback(coordinator.close)
        ending.callback(islands.end)  # while there is a coordinator to leave
        coordinator.start()
        _remember(coordinator, directory)
        islands.begin(coordinator.url)
        _watch(islands, count, coordinator, on_look)
        status = coordinator.status()
    read = [
        json.loads(files.results(directory, shard).read_text())
        for shard in range(count)
    ]
    return read, status


def _environment(directory: Path) -> dict[str, str]:
    return {
        **os.environ,
        "XDG_CONFIG_HOME": str(files.home(directory).resolve()),
        "OMP_NUM_THREADS": "1",  # each has a core at most, and a fork knows no pool
    }


def _remember(coordinator: Coordinator, directory: Path) -> None:
    """Put what an island needs where it looks; the user's own stays as it is."""
    Credentials(files.home(directory) / "atoll" / "runs").remember(
        coordinator.url,
        pin=coordinator.pin,
        tokens={Role.ISLAND: token_file(directory.resolve(), Role.ISLAND)},
    )


def _watch(
    islands: Islands, count: int, coordinator: Coordinator, on_look: OnLook
) -> None:
    """Wait for the islands, and show what they do meanwhile."""
    while count:
        on_look(coordinator.status())
        count -= islands.next_end(LOOK_S) is not None
    on_look(coordinator.status())
