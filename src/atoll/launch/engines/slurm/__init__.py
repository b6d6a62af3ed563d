"""Islands as the tasks of a Slurm array job.

Start reading at `SlurmLauncher`, then `batch_script` and `leader`.

The directory of a launch is on a file system that its nodes share: the user's home.
Each task runs a leader, which starts the command, restarts it if it fails, and writes
the island's state; Slurm itself gives the task another node when its own fails or is
preempted. So an island's state remains when Slurm has forgotten the job.

    job.sh              the script that was submitted
    secrets.json        values of variables, readable by this user alone; deleted when
                        no task can start again
    3/state.json        the state of island 3, written by its leader
    3/cancel.json       that it is to end, and within which time
    3/island-3.log      the output of island 3, of all its starts

Rule 1: a state names the start of the task that wrote it: when Slurm has given the task
to another node, the state of the leader before is obsolete.

No accounting database is needed: `scontrol` lists live jobs and those that ended some
minutes ago, and leaders have written the rest.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.errors import (
    AtollError,
    CorruptError,
    Refused,
    RemoteError,
    Unreachable,
    UsageError,
)
from atoll.launch import base
from atoll.launch.bootstrap import bootstrap_argv
from atoll.launch.spec import (
    MAX_ISLANDS,
    PASS,
    PASS_FILE,
    IslandSpec,
    Resources,
    refuse_fields,
    refuse_stored_secrets,
)
from atoll.launch.supervise import IslandRecord, LaunchFiles
from atoll.security import Secret
from atoll.security.private_files import (
    read_private,
    remove_private,
    replace_private,
)


def open_launcher(options: Mapping[str, str]) -> base.Launcher:
    """Return the launcher of the cluster that this machine belongs to."""
    parsed = base.read_options(SlurmOptions, options, engine=ENGINE)
    # Loads the exchanges, which a supervisor does not need.
    from atoll.island.environment import credentials_from_environment

    default = credentials_from_environment().credentials.parent / ENGINE
    directory = (
        default if parsed.directory is None else Path(parsed.directory).absolute()
    )
    return SlurmLauncher(directory, parsed, options)


class SlurmLauncher:
    """Submits array jobs; their state is in files and at Slurm's controller."""

    def __init__(
        self, directory: Path, read: SlurmOptions, options: Mapping[str, str]
    ) -> None:
        self._directory, self._read, self._options = directory, read, dict(options)

    @property
    def traits(self) -> base.Traits:
        return base.Traits(is_elsewhere=False)

    def plan(self, order: base.LaunchOrder) -> base.LaunchPlan:
        script = batch_script(order, self._read, self._launch_directory(order.id))
        return base.LaunchPlan({"script": script}, script)

    def launch(self, order: base.LaunchOrder, *, keep: base.Keep) -> base.Handle:
        directory = self._launch_directory(order.id)
        script = batch_script(order, self._read, directory)
        _require_programs()
        LaunchFiles(directory).make()
        handle = order.handle(
            ENGINE,
            {"directory": str(directory), "job": None},
            options=self._options,
            begun_at_s=time.time(),
        )
        keep(handle)
        for index in order.indexes:
            IslandFiles(directory, index).make()
        write_secrets(directory, order.values)
        (directory / "job.sh").write_text(script)
        job = submit(directory / "job.sh")
        handle = replace(handle, reference={**handle.reference, "job": job})
        keep(handle)
        return handle

    def poll(self, handle: base.Handle) -> tuple[base.Report, ...]:
        accounts = accounts_of(handle)
        reports = tuple(
            _report(handle, index, accounts.get(index - handle.first))
            for index in handle.indexes
        )
        if _is_done(handle, reports, accounts.values()):
            drop_secrets(_launch_directory(handle))
        return reports

    def logs(self, handle: base.Handle, index: int, *, after: int = 0) -> list[str]:
        return _files(handle, index).lines(after)

    def cancel(
        self,
        handle: base.Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = base.GRACE_S,
    ) -> None:
        accounts = accounts_of(handle)
        cancelled = sorted(handle.indexes if indexes is None else indexes)
        task_ids = []
        for index in cancelled:
            account = accounts.get(index - handle.first)
            was_requested = _files(handle, index).request_cancel(grace_s)
            if account is not None and account.needs_scancel(
                was_requested=was_requested
            ):
                task_ids.append(account.task_id)
        scancel(task_ids)
        if set(cancelled) >= set(handle.indexes):
            drop_secrets(
                _launch_directory(handle)
            )  # a task that starts now finds the request

    def _launch_directory(self, launch: str) -> Path:
        return self._directory / launch


def _launch_directory(handle: base.Handle) -> Path:
    return Path(str(handle.reference["directory"]))


def _files(handle: base.Handle, index: int) -> IslandFiles:
    return IslandFiles(_launch_directory(handle), index)


def _is_done(
    handle: base.Handle, reports: Sequence[base.Report], accounts: Collection[Account]
) -> bool:
    """Return whether no task of a launch can start again.

    A launch without a job's number may be about to be submitted; and a leader's final
    state is not Slurm's, which may give its task to another node.
    """
    is_submitted = isinstance(handle.reference.get("job"), int)
    is_over = all(report.state.is_over for report in reports)
    return is_submitted and is_over and all(account.is_final for account in accounts)


def _report(handle: base.Handle, index: int, account: Account | None) -> base.Report:
    """Return the report of an island, from its leader's state and Slurm's account.

    The leader knows how an incarnation ended; Slurm knows whether another will start.
    """
    task = _files(handle, index)
    report = task.read_state(
        incarnation=None if account is None else account.num_requeues
    )
    requeues = 0 if account is None else account.num_requeues
    if account is not None and account.state in (
        base.State.PENDING,
        base.State.RESTARTING,
    ):
        pending = account.report(handle, index)
        # A pending island that is cancelled is over as soon as Slurm has processed it.
        return replace(pending, restarts=requeues)
    if report is None:
        report = (account or Account.unknown()).report(handle, index)
        if report.state is base.State.LOST and task.is_cancelled():
            report = replace(report, state=base.State.CANCELLED, reason="")
    elif not report.state.is_over:
        report = _unfinished_report(report, account, handle)
    elif report.state is base.State.CANCELLED and _may_come_back(task, account):
        report = replace(report, state=base.State.RUNNING)
    host = account.node if account is not None else report.host
    return replace(report, restarts=report.restarts + requeues, host=host)


def _may_come_back(task: IslandFiles, account: Account | None) -> bool:
    """Return whether Slurm sent SIGTERM to the island, and may start its task again."""
    is_ending = account is not None and not account.state.is_over
    return is_ending and not task.is_cancelled()


def _unfinished_report(
    report: base.Report, account: Account | None, handle: base.Handle
) -> base.Report:
    """Return the report of an island whose leader's last state is not final."""
    if account is not None and not account.state.is_over:
        return report
    final = (account or Account.unknown()).report(handle, report.index)
    return replace(final, restarts=report.restarts)


__all__: Sequence[str] = ["SlurmLauncher", "open_launcher"]


ENGINE = "slurm"
LEADER = "atoll.launch.engines.slurm.leader"
INDEX = "SLURM_ARRAY_TASK_ID"
BEFORE_LIMIT_S = 2 * base.GRACE_S
"""How long before its time limit an island receives SIGTERM: Slurm may be late."""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """The options of `--option`."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    directory: str | None = None
    """The directory of logs and states, which every node must see. Default: among the
    user's own files."""

    python: str | None = None
    """The Python of the nodes. Default: the one that launches."""

    most_at_a_time: int | None = None
    """How many islands Slurm may run at the same time."""


def batch_script(
    order: base.LaunchOrder, options: SlurmOptions, directory: Path
) -> str:
    """Return the script of an array job.

    Raises:
        UsageError: Slurm cannot fulfil the spec.
    """
    spec = order.spec
    _require_possible(spec)
    python = options.python or sys.executable
    bootstrap = bootstrap_argv(spec, index_from=INDEX, first=order.first, python=python)
    leader = [python, "-m", LEADER, "--place", str(directory), "--name", spec.name]
    leader += ["--first", str(order.first)] if order.first else []
    leader += ["--restarts", json.dumps(spec.restarts.to_dict())]
    lines = ["#!/bin/bash"]
    lines += [
        f"#SBATCH {directive}" for directive in _directives(order, options, directory)
    ]
    lines += [
        f"export {name}={shlex.quote(value)}"
        for name, value in sorted(spec.environment.items())
    ]
    # Exec: the leader receives the signals that Slurm sends to the batch script.
    lines.append("exec " + shlex.join([*leader, "--", *bootstrap]))
    return "\n".join(lines) + "\n"


def _directives(
    order: base.LaunchOrder, options: SlurmOptions, directory: Path
) -> list[str]:
    limit = f"%{options.most_at_a_time}" if options.most_at_a_time else ""
    directives = [
        f"--job-name={order.id}",
        f"--array=0-{order.num_islands - 1}{limit}",
        "--nodes=1",
        "--ntasks=1",
        f"--output={directory}/%a-slurm.log",
        "--open-mode=append",
        "--requeue" if order.spec.restarts.max_restarts else "--no-requeue",
        *_resources(order.spec.resources),
    ]
    for name in ("partition", "account", "qos", "constraint"):
        if (value := getattr(options, name)) is not None:
            directives.append(f"--{name}={value}")
    if order.spec.directory:
        directives.append(f"--chdir={order.spec.directory}")
    for directive in directives:
        if "\n" in directive or '"' in directive or " " in directive:
            raise UsageError(f"{directive!r} cannot be written into a batch script.")
    return directives


def _resources(needs: Resources) -> list[str]:
    directives = []
    if needs.cpus is not None:
        directives.append(f"--cpus-per-task={math.ceil(needs.cpus)}")
    if needs.memory_bytes is not None:
        directives.append(f"--mem={math.ceil(needs.memory_bytes / 2**20)}M")
    if needs.accelerators:
        kind = f"{needs.accelerator}:" if needs.accelerator else ""
        directives.append(f"--gres=gpu:{kind}{needs.accelerators}")
    if needs.time_limit_s is not None:
        directives.append(f"--time={math.ceil(needs.time_limit_s / 60)}")
        directives.append(f"--signal=B:USR1@{BEFORE_LIMIT_S:.0f}")
    return directives


_NOT_INSTALLED = (
    "Slurm cannot install {} on its nodes. Install the requirements of islands there, "
    "and name that Python with --option python=PATH."
)


def _require_possible(spec: IslandSpec) -> None:
    refuse_fields(spec, dict.fromkeys(("image", "requirements"), _NOT_INSTALLED))
    refuse_stored_secrets(spec, "Slurm")
    limit_s = spec.resources.time_limit_s
    if limit_s is not None and limit_s <= BEFORE_LIMIT_S:
        raise UsageError(
            f"time_limit_s={limit_s:g} leaves no time to train: islands receive "
            f"SIGTERM {BEFORE_LIMIT_S:g} s before. Give more."
        )


MAX_SECRETS_BYTES = 2**22


def write_secrets(directory: Path, values: Mapping[str, Secret]) -> None:
    """Store the secrets that leaders pass to their islands."""
    form = {name: value.reveal() for name, value in values.items()}
    replace_private(directory / "secrets.json", json.dumps(form).encode())


def read_secrets(directory: Path) -> dict[str, str]:
    """Return the values of variables.

    Raises:
        NoSuchFile: the launch was over.
    """
    path = directory / "secrets.json"
    data = read_private(path, content="secrets", max_bytes=MAX_SECRETS_BYTES)
    try:
        return {str(name): str(value) for name, value in json.loads(data).items()}
    except (ValueError, AttributeError) as exc:
        raise CorruptError(f"{path} holds no secrets. Launch again.") from exc


def drop_secrets(directory: Path) -> None:
    """Delete the secrets, which no island needs again. Safe to repeat."""
    with suppress(AtollError):  # the next poll repeats it if the disk fails now
        remove_private(directory / "secrets.json")


@dataclass(frozen=True)
class IslandFiles:
    """The files of one island."""

    directory: Path
    index: int

    @property
    def _files(self) -> LaunchFiles:
        return LaunchFiles(self.directory / str(self.index))

    @property
    def log(self) -> Path:
        return self._files.log(self.index)

    def make(self) -> None:
        """Make the directory."""
        self._files.directory.mkdir(mode=0o700)

    def lines(self, after: int) -> list[str]:
        """Return the log of the island, without the first `after` lines."""
        return self._files.lines(self.index, after, 0)[0]

    def write_state(self, report: base.Report, *, incarnation: int) -> None:
        """Store the leader's state, with the incarnation of its task."""
        self._files.write_state([IslandRecord(report, None, str(incarnation))])

    def read_state(self, *, incarnation: int | None) -> base.Report | None:
        """Return the leader's last state, if it is of this incarnation of the task.

        None for any incarnation, if the task no longer exists.
        """
        for record in self._files.read_state() or ():
            if incarnation is None or record.identity == str(incarnation):
                return record.report
        return None

    def request_cancel(self, grace_s: float) -> bool:
        """Request the end of the island; return whether that was requested before."""
        if not self._files.directory.is_dir():
            return False
        was_requested = self.is_cancelled()
        if not was_requested:
            self._files.write_request([self.index], grace_s)
        return was_requested

    def is_cancelled(self) -> bool:
        """Return whether a user has cancelled the island."""
        return self.grace_s() is not None

    def grace_s(self) -> float | None:
        """Return the grace of a request to cancel, or None if there is none."""
        request = self._files.read_request()
        return None if request is None else request[1]


STATES = {
    "PENDING": base.State.PENDING,
    "CONFIGURING": base.State.PENDING,
    "REQUEUED": base.State.PENDING,
    "REQUEUE_FED": base.State.PENDING,
    "REQUEUE_HOLD": base.State.PENDING,
    "RESV_DEL_HOLD": base.State.PENDING,
    "SPECIAL_EXIT": base.State.PENDING,
    "RUNNING": base.State.RUNNING,
    "COMPLETING": base.State.RUNNING,
    "SUSPENDED": base.State.RUNNING,
    "STOPPED": base.State.RUNNING,
    "SIGNALING": base.State.RUNNING,
    "STAGE_OUT": base.State.RUNNING,
    "RESIZING": base.State.RUNNING,
    "COMPLETED": base.State.FINISHED,
    "CANCELLED": base.State.CANCELLED,
}
"""All other states mean that the job failed: BOOT_FAIL, DEADLINE, FAILED, NODE_FAIL,
OUT_OF_MEMORY, PREEMPTED, REVOKED, TIMEOUT."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """One task, as the controller reports it."""

    state: base.State
    task_id: str = ""
    """Its id for `scancel`."""

    num_requeues: int = 0
    exit_code: int | None = None
    reason: str = ""
    node: str = ""
    is_final: bool = False
    """Whether it is over, and Slurm reports nothing that may restart it."""

    @classmethod
    def unknown(cls) -> Account:
        """Return the account of a task that Slurm does not know."""
        return cls(state=base.State.LOST, reason="Slurm does not know it")

    def needs_scancel(self, *, was_requested: bool) -> bool:
        """Return whether `scancel` has to end it: its leader cannot, or did not so far.

        A leader sends SIGTERM to the island once, and waits for the requested grace;
        Slurm would signal every process of the task, and kill after its own `KillWait`.
        """
        is_waiting = self.state in (base.State.PENDING, base.State.RESTARTING)
        return is_waiting or (was_requested and not self.state.is_over)

    def report(self, handle: base.Handle, index: int) -> base.Report:
        """Return the report of the task's island."""
        return base.Report(
            index=index,
            name=handle.island(index),
            state=self.state,
            exit_code=self.exit_code,
            reason=self.reason,
            host=self.node,
        )


def accounts_of(handle: base.Handle) -> dict[int, Account]:
    """Return the accounts of a launch, by the numbers of its tasks."""
    job = handle.reference.get("job")
    if not isinstance(job, int):
        # The launching process ended before it received the number.
        job = job_named(handle.id)
    if job is None:
        return {}
    accounts: dict[int, Account] = {}
    for fields in records_of(job):
        # A controller that restarts without its state assigns the same numbers again.
        if fields.get("JobName") != handle.id:
            continue
        for number in numbers(fields.get("ArrayTaskId", "")):
            accounts[number] = _account(fields, job, number)
    return accounts


def numbers(text: str) -> Iterator[int]:
    """Return the tasks that a record is about: `3`, or `0-3,7%2` of those that wait."""
    for part in text.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        last = last.partition(":")[0]
        if first.isdecimal() and (last or first).isdecimal():
            yield from range(int(first), min(int(last or first) + 1, MAX_ISLANDS))


def _account(fields: dict[str, str], job: int, number: int) -> Account:
    job_state, *flags = fields.get("JobState", "").split(",")
    state = STATES.get(job_state, base.State.FAILED)
    requeues = int(fields.get("Restarts", "0"))
    if state is base.State.PENDING and requeues:
        state = base.State.RESTARTING
    reason = fields.get("Reason", "None")
    node = fields.get("NodeList", "")
    return Account(
        state=state,
        task_id=f"{job}_{number}",
        num_requeues=requeues,
        exit_code=_exit_code(fields.get("ExitCode", "")) if state.is_over else None,
        reason=_reason(state, job_state, reason, node),
        node="" if node in ("(null)", "None assigned") else node,
        is_final=state.is_over and not flags,
    )


def _exit_code(text: str) -> int | None:
    """Return the exit code of a task: Slurm writes `code:signal`."""
    code, _, signal_number = text.partition(":")
    if not (code.isdecimal() and signal_number.isdecimal()):
        return None
    return -int(signal_number) if int(signal_number) else int(code)


def _reason(state: base.State, job_state: str, reason: str, node: str) -> str:
    detail = "" if reason in ("None", "") else reason
    if state is base.State.FAILED:
        # A leader that dies with its node writes no reason: only Slurm has one.
        location = f" on {node}" if job_state == "NODE_FAIL" else ""
        return f"{job_state}{location}" + (f" ({detail})" if detail else "")
    return detail if not state.is_over else ""


PROGRAMS = ("sbatch", "scontrol", "squeue", "scancel")
ASK_S = 60.0
AT_ONCE = 256
"""Tasks of one call of `scancel`."""

_ABSENT = re.compile(r"Invalid job id|job not found|already completing", re.I)
_UNREACHABLE = re.compile(
    r"unable to contact|connection (refused|timed out)|timed out|controller", re.I
)
_DENIED = re.compile(r"access.*denied|not permitted|permission|invalid account", re.I)


def submit(script: Path) -> int:
    """Submit a batch script, and return the number of its job."""
    output = run_program(["sbatch", "--parsable", str(script)])
    number = output.strip().partition(";")[0]
    if not number.isdecimal():
        raise RemoteError(f"sbatch printed {output[:200]!r}, and no number.")
    return int(number)


def records_of(job: int) -> list[dict[str, str]]:
    """Return the controller's records of a job's tasks, [] if it has none."""
    output = run_program(["scontrol", "--oneliner", "show", "job", str(job)], absent="")
    return [_fields(line) for line in output.splitlines() if "JobId=" in line]


def job_named(name: str) -> int | None:
    """Return the job of a name, if one is waiting or running."""
    output = run_program(["squeue", "--noheader", "--format=%A", f"--name={name}"])
    numbers = [int(number) for number in output.split() if number.isdecimal()]
    return min(numbers) if numbers else None


def scancel(task_ids: Sequence[str]) -> None:
    """Have Slurm end tasks; those that it does not know are over."""
    for first in range(0, len(task_ids), AT_ONCE):
        run_program(["scancel", *task_ids[first : first + AT_ONCE]], absent="")


def _require_programs() -> None:
    for program in PROGRAMS:
        if shutil.which(program) is None:
            raise UsageError(
                f"Slurm's {program} is not on this machine. Launch from one that "
                "submits jobs, such as the cluster's login node."
            )


def run_program(argv: Sequence[str], *, absent: str | None = None) -> str:
    """Return the output of a program, or `absent` if it knows no such job.

    Raises:
        UsageError, Refused, Unreachable: it failed; the message has its output.
    """
    _require_programs()
    # If this process is an island itself, its own variables are not for new islands.
    hidden = {PASS, PASS_FILE, "ATOLL_RUN", "ATOLL_ISLAND", "ATOLL_ISLAND_INDEX"}
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    try:
        done = subprocess.run(
            list(argv), env=environment, capture_output=True, text=True, timeout=ASK_S
        )
    except subprocess.TimeoutExpired as exc:
        raise Unreachable(
            f"{argv[0]} has not answered for {ASK_S:g} s. Is Slurm's controller up?"
        ) from exc
    if done.returncode == 0:
        return done.stdout
    output = " ".join((done.stderr or done.stdout).split())[:500]
    if absent is not None and _ABSENT.search(output):
        return absent
    if _UNREACHABLE.search(output):
        raise Unreachable(f"Slurm's controller does not answer: {output}.")
    if _DENIED.search(output):
        raise Refused(f"Slurm refuses this user: {output}.")
    message = output or f"exit code {done.returncode}"
    raise UsageError(f"{argv[0]} says: {message}.")


def _fields(line: str) -> dict[str, str]:
    """Return the `Key=value` pairs of a line; a value may have spaces, a key none."""
    fields: dict[str, str] = {}
    for match in re.finditer(r"(?:^| )([A-Za-z:/]+)=(.*?)(?= [A-Za-z:/]+=|$)", line):
        fields.setdefault(match[1], match[2])
    return fields
