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
"""Whatever is not here has failed: BOOT_FAIL, DEADLINE, FAILED, NODE_FAIL,
OUT_OF_MEMORY, PREEMPTED, REVOKED, TIMEOUT."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """One task, as the controller tells of it."""

    state: State
    named: str = ""
    """By which `scancel` finds it."""

    num_requeues: int = 0
    exit_code: int | None = None
    reason: str = ""
    node: str = ""
    is_final: bool = False
    """Whether it is over, and Slurm does not say that it may come back."""

    @classmethod
    def unknown(cls) -> Account:
        """Return that of a task of which Slurm knows nothing."""
        return cls(state=State.LOST, reason="Slurm knows nothing of it")

    def wants_slurm(self, *, was_asked: bool) -> bool:
        """Return whether Slurm is to end it: its leader cannot, or did not when asked.

        A leader tells the island once, in its own time; Slurm would tell every process
        of the task at the same moment, and kill by its own `KillWait`.
        """
        is_waiting = self.state in (State.PENDING, State.RESTARTING)
        return is_waiting or (was_asked and not self.state.is_over)

    def report(self, handle: Handle, index: int) -> Report:
        """Return it as an engine's report."""
        return Report(
            index=index,
            name=handle.island(index),
            state=self.state,
            exit_code=self.exit_code,
            reason=self.reason,
            host=self.node,
        )


def accounts_of(handle: Handle) -> dict[int, Account]:
    """Return what Slurm knows of a launch, by the numbers of its tasks."""
    job = handle.reference.get("job")
    if not isinstance(job, int):
        # Whoever launched it has not lived to learn the number.
        job = number_named(handle.id)
    if job is None:
        return {}
    found: dict[int, Account] = {}
    for fields in shown(job):
        # The controller gives numbers anew after a restart without its state.
        if fields.get("JobName") != handle.id:
            continue
        for number in numbers(fields.get("ArrayTaskId", "")):
            found[number] = _account(fields, job, number)
    return found


def numbers(said: str) -> Iterator[int]:
    """Return the tasks that a record is about: `3`, or `0-3,7%2` of those that wait."""
    for part in said.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        last = last.partition(":")[0]
        if first.isdecimal() and (last or first).isdecimal():
            yield from range(int(first), min(int(last or first) + 1, MAX_ISLANDS))


def _account(fields: dict[str, str], job: int, number: int) -> Account:
    word, *flags = fields.get("JobState", "").split(",")
    state = STATES.get(word, State.FAILED)
    requeues = int(fields.get("Restarts", "0"))
    if state is State.PENDING and requeues:
        state = State.RESTARTING
    reason = fields.get("Reason", "None")
    node = fields.get("NodeList", "")
    return Account(
        state=state,
        named=f"{job}_{number}",
        num_requeues=requeues,
        exit_code=_exit_code(fields.get("ExitCode", "")) if state.is_over else None,
        reason=_why(state, word, reason, node),
        node="" if node in ("(null)", "None assigned") else node,
        is_final=state.is_over and not flags,
    )


def _exit_code(said: str) -> int | None:
    """Return how a task ended: Slurm writes `code:signal`."""
    code, _, number = said.partition(":")
    if not (code.isdecimal() and number.isdecimal()):
        return None
    return -int(number) if int(number) else int(code)


def _why(state: State, word: str, reason: str, node: str) -> str:
    told = "" if reason in ("None", "") else reason
    if state is State.FAILED:
        # A leader that dies with its node tells nobody: Slurm's word is all there is.
        where = f" on {node}" if word == "NODE_FAIL" else ""
        return f"{word}{where}" + (f" ({told})" if told else "")
    return told if not state.is_over else ""


PROGRAMS = ("sbatch", "scontrol", "squeue", "scancel")
ASK_S = 60.0
AT_ONCE = 256
"""Tasks that one `scancel` is told of."""

_ABSENT = re.compile(r"Invalid job id|job not found|already completing", re.I)
_UNREACHABLE = re.compile(
    r"unable to contact|connection (refused|timed out)|timed out|controller", re.I
)
_DENIED = re.compile(r"access.*denied|not permitted|permission|invalid account", re.I)


def submit(script: Path) -> int:
    """Submit a batch script, and return the number of its job."""
    said = ask(["sbatch", "--parsable", str(script)])
    number = said.strip().partition(";")[0]
    if not number.isdecimal():
        raise RemoteError(f"sbatch has answered with {said[:200]!r}, and no number.")
    return int(number)


def shown(job: int) -> list[dict[str, str]]:
    """Return what the controller knows of a job's tasks, [] if it knows nothing."""
    said = ask(["scontrol", "--oneliner", "show", "job", str(job)], absent="")
    return [_fields(line) for line in said.splitlines() if "JobId=" in line]


def number_named(name: str) -> int | None:
    """Return the job of a name, if one is waiting or running."""
    said = ask(["squeue", "--noheader", "--format=%A", f"--name={name}"])
    numbers = [int(each) for each in said.split() if each.isdecimal()]
    return min(numbers) if numbers else None


def scancel(named: Sequence[str]) -> None:
    """Have Slurm end tasks; those that it does not know are over."""
    for first in range(0, len(named), AT_ONCE):
        ask(["scancel", *named[first : first + AT_ONCE]], absent="")


def ask(words: Sequence[str], *, absent: str | None = None) -> str:
    """Return what a program says, or `absent` if it knows of no such job.

    Raises:
        UsageError, Refused, Unreachable: it failed; its own words are told.
    """
    # What this process was given to be an island is not for those it launches.
    hidden = {PASS, PASS_FILE, "ATOLL_RUN", "ATOLL_ISLAND", "ATOLL_ISLAND_INDEX"}
    around = {key: value for key, value in os.environ.items() if key not in hidden}
    try:
        done = subprocess.run(
            list(words), env=around, capture_output=True, text=True, timeout=ASK_S
        )
    except subprocess.TimeoutExpired as exc:
        raise Unreachable(
            f"{words[0]} has not answered for {ASK_S:g} s. Is Slurm's controller up?"
        ) from exc
    if done.returncode == 0:
        return done.stdout
    said = " ".join((done.stderr or done.stdout).split())[:500]
    if absent is not None and _ABSENT.search(said):
        return absent
    if _UNREACHABLE.search(said):
        raise Unreachable(f"Slurm's controller does not answer: {said}.")
    if _DENIED.search(said):
        raise Refused(f"Slurm does not let this user: {said}.")
    raise UsageError(f"{words[0]} says: {said or f'exit code {done.returncode}'}.")


def _fields(line: str) -> dict[str, str]:
    """Return the `Key=value` words of a line; a value may hold spaces, a key none."""
    fields: dict[str, str] = {}
    for match in re.finditer(r"(?:^| )([A-Za-z:/]+)=(.*?)(?= [A-Za-z:/]+=|$)", line):
        fields.setdefault(match[1], match[2])
    return fields
