"""What `atoll serve --init FILE` does before a run is served, and after a crash."""

from __future__ import annotations

from pathlib import Path

import typer

from atoll.coordinator.directory import open_service
from atoll.coordinator.initial_weights import (
    INIT_FILE,
    WeightsFile,
    discard,
    find_init_file,
    store_init_file,
)
from atoll.coordinator.move import JOURNAL
from atoll.coordinator.service import Service
from atoll.disk import SystemDisk
from atoll.errors import CorruptError, UsageError
from atoll.settings import RunSettings


def settle(directory: Path, settings: RunSettings | None, init: Path | None) -> None:
    """Found a run with a file that says its model's order; else let the file wait.

    Without `init` this is about a file that was given before, and waits still. A run
    that has weights keeps them.

    Raises:
        UsageError: the file cannot be read, or no run can be founded on it.
        CorruptError: it is no safetensors file.
    """
    root = directory / JOURNAL
    if init is not None:
        WeightsFile(init)  # judged before anything is made
    elif find_init_file(root) is None:
        return
    is_kept = init is None or _is_kept_for_new_run(root, init)
    disk, service = open_service(directory, settings, now_s=0.0)
    try:
        if service.state.model is not None:
            discard(root)
            _tell_unused(directory, init)
            return
        if init is not None and not is_kept:
            store_init_file(disk, init)
        _found_or_wait(service, root, called=str(init or INIT_FILE))
    finally:
        disk.close()


def _is_kept_for_new_run(root: Path, init: Path) -> bool:
    """Make the copy durable before there is a run: it is never without its file."""
    disk = SystemDisk(root)
    try:
        if disk.names("log/"):
            return False
        store_init_file(disk, init)
        return True
    finally:
        disk.close()


def _found_or_wait(service: Service, root: Path, *, called: str) -> None:
    path = find_init_file(root)
    assert path is not None
    try:
        file = WeightsFile(path, called=called)
        model = file.model()
        if model is None:
            _tell_waiting(called, path)
            return
        state = service.state
        states = file.states(model, state.settings, run=state.run)
        constants = file.constants(model, state.settings)
    except (UsageError, CorruptError):
        discard(root)  # it would be in the way of every start from now on
        raise
    for constant, parts in constants.items():
        service.journal.constants.store(constant, parts)
    service.journal.found(model, states)
    discard(root)


def _tell_unused(directory: Path, init: Path | None) -> None:
    if init is not None:
        _say(f"{directory} has its weights; {init} is not looked at.")


def _tell_waiting(called: str, path: Path) -> None:
    _say(
        f"The run waits for its first island, and is founded with {called} then. "
        f"A copy is kept as {path} until that; remove it to let the island bring its "
        "own weights."
    )


def _say(text: str) -> None:
    typer.echo(f"atoll: {text}", err=True)
