"""What Slurm says of the tasks of a job, in the words of `launch.states`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from atoll.launch.engines.slurm.calls import number_named, shown
from atoll.launch.handle import Handle
from atoll.launch.spec import MAX_ISLANDS
from atoll.launch.states import Report, State

STATES = {
    "PENDING": State.PENDING,
    "CONFIGURING": State.PENDING,
    "REQUEUED": State.PENDING,
    "REQUEUE_FED": State.PENDING,
    "REQUEUE_HOLD": State.PENDING,
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
    why: str = ""
    node: str = ""
    is_final: bool = False
    """Whether it is over, and Slurm does not say that it may come back."""

    @classmethod
    def unknown(cls) -> Account:
        """Return that of a task of which Slurm knows nothing."""
        return cls(state=State.LOST, why="Slurm knows nothing of it")

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
            why=self.why,
            place=self.node,
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
        why=_why(state, word, reason, node),
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
