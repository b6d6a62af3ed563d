"""Islands as the tasks of a Slurm array job.

Start reading at `SlurmLauncher`, then `batch_script`, `leader` and `scheduler`.

The directory of a launch is on a file system that its nodes share: the user's home.
Each task runs a leader, which starts the command, restarts it if it fails, and writes
the island's state; Slurm itself gives the task another node when its own fails or is
preempted. So an island's state is there when Slurm has forgotten the job.

    job.sh              the script that was submitted
    secrets.json        values of variables, readable by this user alone; deleted when
                        no task can start any more
    3/state.json        the state of island 3, written by its leader
    3/cancel.json       that it is to end, and within which time
    3/island-3.log      the output of island 3, of all its starts

Rule 1: a state names the start of the task that wrote it: when Slurm has given the task
to another node, the state of the leader before is obsolete.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.errors import AtollError, CorruptError, UsageError
from atoll.island.environment import surroundings_from_environment
from atoll.launch.base import (
    GRACE_S,
    Handle,
    Keep,
    Launcher,
    Order,
    Plan,
    Report,
    State,
    Traits,
    read_options,
)
from atoll.launch.bootstrap import bootstrap_words
from atoll.launch.engines.local.supervisor import Known, LaunchFiles
from atoll.launch.engines.slurm.scheduler import (
    PROGRAMS,
    Account,
    accounts_of,
    scancel,
    submit,
)
from atoll.launch.spec import IslandSpec, Resources, in_engine
from atoll.security import Secret
from atoll.security.private_files import (
    private_directory,
    read_private,
    remove_private,
    replace_private,
)


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
            said = replace(said, state=State.CANCELLED, reason="")
    elif not said.state.is_over:
        said = _led(said, account, handle)
    elif said.state is State.CANCELLED and _may_come_back(task, account):
        said = replace(said, state=State.RUNNING)
    place = account.node if account is not None else said.host
    return replace(said, restarts=said.restarts + requeues, host=place)


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


ENGINE = "slurm"
LEADER = "atoll.launch.engines.slurm.leader"
INDEX = "SLURM_ARRAY_TASK_ID"
BEFORE_LIMIT_S = 2 * GRACE_S
"""How long before its time limit an island is told to leave: Slurm may be this late."""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What `--option` takes."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    directory: str | None = None
    """Where logs and states of launches are, seen from every node; among the user's own
    files without."""

    python: str | None = None
    """On the nodes; the one that launches without."""

    most_at_a_time: int | None = None
    """How many islands Slurm may run at the same time."""


def batch_script(order: Order, options: SlurmOptions, place: Path) -> str:
    """Return the script of an array job.

    Raises:
        UsageError: Slurm cannot do what the spec asks for.
    """
    spec = order.spec
    _require_possible(spec)
    python = options.python or sys.executable
    words = bootstrap_words(spec, index_from=INDEX, first=order.first, python=python)
    leader = [python, "-m", LEADER, "--place", str(place), "--name", spec.name]
    leader += ["--first", str(order.first)] if order.first else []
    leader += ["--restarts", json.dumps(spec.restarts.to_dict())]
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {each}" for each in _directives(order, options, place)]
    lines += [
        f"export {name}={shlex.quote(value)}"
        for name, value in sorted(spec.environment.items())
    ]
    # Exec: what Slurm tells the batch script is told to the leader.
    lines.append("exec " + shlex.join([*leader, "--", *words]))
    return "\n".join(lines) + "\n"


def _directives(order: Order, options: SlurmOptions, place: Path) -> list[str]:
    most = f"%{options.most_at_a_time}" if options.most_at_a_time else ""
    said = [
        f"--job-name={order.id}",
        f"--array=0-{order.num_islands - 1}{most}",
        "--nodes=1",
        "--ntasks=1",
        f"--output={place}/%a-slurm.log",
        "--open-mode=append",
        "--requeue" if order.spec.restarts.max_restarts else "--no-requeue",
        *_resources(order.spec.resources),
    ]
    for name in ("partition", "account", "qos", "constraint"):
        if (value := getattr(options, name)) is not None:
            said.append(f"--{name}={value}")
    if order.spec.directory:
        said.append(f"--chdir={order.spec.directory}")
    for each in said:
        if "\n" in each or '"' in each or " " in each:
            raise UsageError(f"{each!r} cannot be written into a batch script.")
    return said


def _resources(needs: Resources) -> list[str]:
    said = []
    if needs.cpus is not None:
        said.append(f"--cpus-per-task={math.ceil(needs.cpus)}")
    if needs.memory_bytes is not None:
        said.append(f"--mem={math.ceil(needs.memory_bytes / 2**20)}M")
    if needs.accelerators:
        kind = f"{needs.accelerator}:" if needs.accelerator else ""
        said.append(f"--gres=gpu:{kind}{needs.accelerators}")
    if needs.time_limit_s is not None:
        said.append(f"--time={math.ceil(needs.time_limit_s / 60)}")
        said.append(f"--signal=B:USR1@{BEFORE_LIMIT_S:.0f}")
    return said


def _require_possible(spec: IslandSpec) -> None:
    for name in ("image", "requirements"):
        if getattr(spec, name):
            raise UsageError(
                f"{name}={getattr(spec, name)!r} is nothing that Slurm brings to its "
                "nodes. Install there what islands need, and name its Python with "
                "--option python=PATH."
            )
    if kept := in_engine(spec.secrets):
        name = next(iter(kept))
        raise UsageError(
            f"The secret {name} is to come from the engine, and Slurm keeps none. Give "
            f"{name}=env:NAME or {name}=file:PATH."
        )
    limit_s = spec.resources.time_limit_s
    if limit_s is not None and limit_s <= BEFORE_LIMIT_S:
        raise UsageError(
            f"time_limit_s={limit_s:g} leaves no time to train: islands are told to "
            f"leave {BEFORE_LIMIT_S:g} s before. Give more."
        )


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
    data = read_private(path, content="secrets", max_bytes=MAX_SECRETS_BYTES)
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
