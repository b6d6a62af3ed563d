"""Islands as the tasks of a Slurm array job.

Start reading at `SlurmLauncher`, then `script`, `leader` and `accounts`.

The directory of a launch is where its nodes see it too: Slurm's users have one home.
Each task runs a leader, which starts the command, starts it again if it fails, and
writes down what became of it; Slurm itself gives the task another node when its own
dies or is taken away. So an island's state is there when Slurm has forgotten the job,
and nothing depends on an accounting database.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from atoll.errors import UsageError
from atoll.island.environment import surroundings_from_environment
from atoll.launch.base import GRACE_S, Keep, Launcher, Order, Plan, Traits
from atoll.launch.engines.slurm.accounts import Account, accounts_of
from atoll.launch.engines.slurm.calls import PROGRAMS, scancel, submit
from atoll.launch.engines.slurm.files import (
    IslandFiles,
    drop_secrets,
    write_secrets,
)
from atoll.launch.engines.slurm.script import ENGINE, SlurmOptions, batch_script
from atoll.launch.handle import Handle
from atoll.launch.options import read_options
from atoll.launch.states import Report, State
from atoll.security.private import private_directory


def open_launcher(options: Mapping[str, str]) -> Launcher:
    """Return the launcher of the cluster that this machine belongs to."""
    read = read_options(SlurmOptions, options, engine=ENGINE)
    for program in PROGRAMS:
        if shutil.which(program) is None:
            raise UsageError(
                f"Slurm's {program} is not on this machine. Launch from one that "
                "submits jobs, such as the cluster's login node."
            )
    usual = surroundings_from_environment().credentials.parent / ENGINE
    directory = usual if read.directory is None else Path(read.directory).absolute()
    return SlurmLauncher(directory, read, options)


class SlurmLauncher:
    """Submits array jobs; what it knows is in files and at Slurm's controller."""

    def __init__(
        self, directory: Path, read: SlurmOptions, options: Mapping[str, str]
    ) -> None:
        self._directory, self._read, self._options = directory, read, dict(options)

    @property
    def traits(self) -> Traits:
        return Traits(is_elsewhere=False)

    def plan(self, order: Order) -> Plan:
        script = batch_script(order, self._read, self._place(order.id))
        return Plan({"script": script}, script)

    def launch(self, order: Order, *, keep: Keep) -> Handle:
        place = self._place(order.id)
        script = batch_script(order, self._read, place)
        _make(place)
        handle = order.handle(
            ENGINE,
            {"directory": str(place), "job": None},
            options=self._options,
            begun_at_s=time.time(),
        )
        keep(handle)
        for index in order.indexes:
            IslandFiles(place, index).make()
        write_secrets(place, order.values)
        (place / "job.sh").write_text(script)
        job = submit(place / "job.sh")
        handle = replace(handle, reference={**handle.reference, "job": job})
        keep(handle)
        return handle

    def poll(self, handle: Handle) -> tuple[Report, ...]:
        accounts = accounts_of(handle)
        reports = tuple(
            _report(handle, index, accounts.get(index - handle.first))
            for index in handle.indexes
        )
        if _is_done(handle, reports, accounts.values()):
            drop_secrets(_place(handle))
        return reports

    def logs(self, handle: Handle, index: int, *, after: int = 0) -> list[str]:
        return _files(handle, index).lines(after)

    def cancel(
        self,
        handle: Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        accounts = accounts_of(handle)
        going = sorted(handle.indexes if indexes is None else indexes)
        ending = []
        for index in going:
            account = accounts.get(index - handle.first)
            was_asked = _files(handle, index).ask_to_go(grace_s)
            if account is not None and account.wants_slurm(was_asked=was_asked):
                ending.append(account.named)
        scancel(ending)
        if set(going) >= set(handle.indexes):
            drop_secrets(_place(handle))  # who starts now finds that it is to go

    def _place(self, launch: str) -> Path:
        return self._directory / launch


def _place(handle: Handle) -> Path:
    return Path(str(handle.reference["directory"]))


def _files(handle: Handle, index: int) -> IslandFiles:
    return IslandFiles(_place(handle), index)


def _is_done(
    handle: Handle, reports: Sequence[Report], accounts: Collection[Account]
) -> bool:
    """Return whether no task of a launch can start any more, nor again.

    Who has no number yet may be about to be submitted; and a leader's last word is not
    Slurm's, which may give its task to another node.
    """
    is_submitted = isinstance(handle.reference.get("job"), int)
    is_over = all(each.state.is_over for each in reports)
    return is_submitted and is_over and all(each.is_final for each in accounts)


def _make(place: Path) -> None:
    private_directory(place.parent)
    try:
        place.mkdir(mode=0o700)
    except FileExistsError as exc:
        raise UsageError(
            f"{place.name!r} was launched on this cluster already. Launch under "
            "another name."
        ) from exc


def _report(handle: Handle, index: int, account: Account | None) -> Report:
    """Return what is true of an island, by its leader's word and by Slurm's.

    The leader knows how a life ended; Slurm knows whether there will be another task.
    """
    task = _files(handle, index)
    said = task.read_state(life=None if account is None else account.num_requeues)
    requeues = 0 if account is None else account.num_requeues
    if account is not None and account.state in (State.PENDING, State.RESTARTING):
        report = account.report(handle, index)
        # Who is asked to go while it waits is over as soon as Slurm has heard it.
        return replace(report, restarts=requeues)
    if said is None:
        said = (account or Account.unknown()).report(handle, index)
        if said.state is State.LOST and task.was_asked_to_go():
            said = replace(said, state=State.CANCELLED, why="")
    elif not said.state.is_over:
        said = _led(said, account, handle)
    elif said.state is State.CANCELLED and _may_come_back(task, account):
        said = replace(said, state=State.RUNNING)
    place = account.node if account is not None else said.place
    return replace(said, restarts=said.restarts + requeues, place=place)


def _may_come_back(task: IslandFiles, account: Account | None) -> bool:
    """Return whether Slurm told the island to go, and is not done with its task."""
    is_ending = account is not None and not account.state.is_over
    return is_ending and not task.was_asked_to_go()


def _led(said: Report, account: Account | None, handle: Handle) -> Report:
    """Return what is true of an island whose leader's last word is no end."""
    if account is not None and not account.state.is_over:
        return said
    ended = (account or Account.unknown()).report(handle, said.index)
    return replace(ended, restarts=said.restarts)


__all__: Sequence[str] = ["SlurmLauncher", "open_launcher"]
