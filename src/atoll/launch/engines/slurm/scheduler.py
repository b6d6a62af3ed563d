"""Slurm's programs: their calls, and their output as states of islands.

No accounting database is needed: `scontrol` lists live jobs and those that ended some
minutes ago, and leaders have written the rest.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import Refused, RemoteError, Unreachable, UsageError
from atoll.launch.base import Handle, Report, State
from atoll.launch.credentials import PASS, PASS_FILE
from atoll.launch.spec import MAX_ISLANDS

STATES = {
    "PENDING": State.PENDING,
    "CONFIGURING": State.PENDING,
    "REQUEUED": State.PENDING,
    "REQUEUE_FED": State.PENDING,
    "REQUEUE_HOLD": State.PENDING,
    "RESV_DEL_HOLD": State.PENDING,
    "SPECIAL_EXIT": State.PENDING,
    "RUNNING": State.RUNNING,
    "COMPLETING": State.RUNNING,
    "SUSPENDED": State.RUNNING,
    "STOPPED": State.RUNNING,
    "SIGNALING": State.RUNNING,
    "STAGE_OUT": State.RUNNING,
    "RESIZING": State.RUNNING,
    "COMPLETED": State.FINISHED,
    "CANCELLED": State.CANCELLED,
}
"""All other states mean that the job failed: BOOT_FAIL, DEADLINE, FAILED, NODE_FAIL,
OUT_OF_MEMORY, PREEMPTED, REVOKED, TIMEOUT."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """One task, as the controller reports it."""

    state: State
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
        return cls(state=State.LOST, reason="Slurm does not know it")

    def needs_scancel(self, *, was_requested: bool) -> bool:
        """Return whether `scancel` has to end it: its leader cannot, or did not so far.

        A leader sends SIGTERM to the island once, and waits for the requested grace;
        Slurm would signal every process of the task, and kill after its own `KillWait`.
        """
        is_waiting = self.state in (State.PENDING, State.RESTARTING)
        return is_waiting or (was_requested and not self.state.is_over)

    def report(self, handle: Handle, index: int) -> Report:
        """Return the report of the task's island."""
        return Report(
            index=index,
            name=handle.island(index),
            state=self.state,
            exit_code=self.exit_code,
            reason=self.reason,
            host=self.node,
        )


def accounts_of(handle: Handle) -> dict[int, Account]:
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
    state = STATES.get(job_state, State.FAILED)
    requeues = int(fields.get("Restarts", "0"))
    if state is State.PENDING and requeues:
        state = State.RESTARTING
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


def _reason(state: State, job_state: str, reason: str, node: str) -> str:
    detail = "" if reason in ("None", "") else reason
    if state is State.FAILED:
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


def run_program(argv: Sequence[str], *, absent: str | None = None) -> str:
    """Return the output of a program, or `absent` if it knows no such job.

    Raises:
        UsageError, Refused, Unreachable: it failed; the message has its output.
    """
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
