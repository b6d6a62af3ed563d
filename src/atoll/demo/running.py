"""Runs the demo on one machine: a coordinator here, and a process for each island."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.coordinator.app import Coordinator, Listening
from atoll.errors import RemoteError
from atoll.security import Credentials, Role, token_file
from atoll.settings import RunSettings

LOOK_S = 0.5
"""How often the islands are looked at."""

GRACE_S = 20.0
"""For islands to go when the demo is interrupted."""

OnLook = Callable[[Mapping[str, Any]], None]


def run_islands(
    directory: Path, settings: RunSettings, *, on_look: OnLook
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train until the run ends; return what each island found out, and the status.

    Raises:
        RemoteError: an island failed; its log says why.
    """
    coordinator = Coordinator(directory, settings, listening=Listening(has_tls=True))
    coordinator.start()
    try:
        environment = _environment(coordinator, directory)
        count = settings.run.start_islands
        with _islands(count, directory, environment) as islands:
            _watch(islands, coordinator, directory, on_look)
        status = coordinator.status()
    finally:
        coordinator.close()
    read = [
        json.loads(_results(directory, shard).read_text()) for shard in range(count)
    ]
    return read, status


def _environment(coordinator: Coordinator, directory: Path) -> dict[str, str]:
    """Return what an island needs; the user's own credentials stay as they are."""
    home = directory / "home"
    Credentials(home / "atoll" / "runs").remember(
        coordinator.url,
        pin=coordinator.pin,
        tokens={Role.ISLAND: token_file(directory.resolve(), Role.ISLAND)},
    )
    threads = max(1, (os.cpu_count() or 1) // 4)
    return {
        **os.environ,
        "ATOLL_RUN": coordinator.url,
        "XDG_CONFIG_HOME": str(home.resolve()),
        "OMP_NUM_THREADS": str(threads),
    }


@contextmanager
def _islands(
    count: int, directory: Path, environment: Mapping[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    islands: list[subprocess.Popen[bytes]] = []
    try:
        for shard in range(count):
            command = [sys.executable, "-m", "atoll.demo.island"]
            command += ["--shard", str(shard), "--of", str(count)]
            command += ["--results", str(_results(directory, shard))]
            with _log(directory, shard).open("wb") as log:
                islands.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log)
                )
        yield islands
    finally:
        for island in islands:
            island.terminate()
        for island in islands:
            _wait_or_kill(island)


def _wait_or_kill(island: subprocess.Popen[bytes]) -> None:
    try:
        island.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        island.kill()
        island.wait()


def _watch(
    islands: list[subprocess.Popen[bytes]],
    coordinator: Coordinator,
    directory: Path,
    on_look: OnLook,
) -> None:
    while any(island.poll() is None for island in islands):
        _require_alive(islands, directory)
        on_look(coordinator.status())
        time.sleep(LOOK_S)
    _require_alive(islands, directory)
    on_look(coordinator.status())


def _require_alive(islands: list[subprocess.Popen[bytes]], directory: Path) -> None:
    for shard, island in enumerate(islands):
        if island.poll():
            said = _log(directory, shard).read_text(errors="replace").strip()
            raise RemoteError(
                f"Island {shard} ended with status {island.returncode}: "
                f"{said.splitlines()[-1] if said else 'it said nothing'}. "
                f"Its log is {_log(directory, shard)}."
            )


def _results(directory: Path, shard: int) -> Path:
    return directory / f"island-{shard}.json"


def _log(directory: Path, shard: int) -> Path:
    return directory / f"island-{shard}.log"
