"""The restarts of one island on this machine, as a state machine.

    pending -> running -> finished
                  |----> restarting -> running ...
                  |----> failed
                  +----> cancelled

Rule 1: only a command that failed is restarted; one that ended with 0 is done.
Rule 2: an island that was cancelled ends as `cancelled`, with any exit code.
Rule 3: an incarnation that outlasts the crash window resets the count of crashes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from atoll.launch.base import Report, State
from atoll.launch.spec import Restarts


class Process(Protocol):
    """One incarnation of an island: a process and all that it starts."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Return its exit code, minus the signal's number if one ended it, or None."""
        ...

    def send(self, number: int) -> None:
        """Send a signal to all its processes; nothing happens if they have ended."""
        ...


@dataclass(frozen=True, kw_only=True)
class ProcessHooks:
    """How a supervisor starts a process, and writes to the island's log."""

    log: Callable[[str], None]
    start: Callable[[], Process]


class IslandSupervisor:
    """Starts, polls, restarts and cancels the process of one island."""

    def __init__(
        self, index: int, name: str, restarts: Restarts, hooks: ProcessHooks
    ) -> None:
        self._index, self._name = index, name
        self._restarts, self._hooks = restarts, hooks
        self._state = State.PENDING
        self._process: Process | None = None
        self._num_restarts = self._num_crashes = 0
        self._exit_code: int | None = None
        self._reason = ""
        self._since_s = self._until_s = 0.0
        self._is_cancelled = False

    @property
    def report(self) -> Report:
        """The state of the island."""
        pid = self._process.pid if self._process else None
        return Report(
            index=self._index,
            name=self._name,
            state=self._state,
            restarts=self._num_restarts,
            exit_code=self._exit_code,
            reason=self._reason,
            host="" if pid is None else f"process {pid}",
        )

    @property
    def is_over(self) -> bool:
        return self._state.is_over

    def look(self, now_s: float) -> None:
        """Poll the process, and take the transition that is due."""
        if self._state is State.PENDING:
            self._start(now_s)
        elif self._state is State.RUNNING:
            self._look_at_process(now_s)
        elif self._state is State.RESTARTING and now_s >= self._until_s:
            self._num_restarts += 1
            self._start(now_s)

    def cancel(self, now_s: float, *, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace_s`. Only the first call counts."""
        if self.is_over or self._is_cancelled:
            return
        self._is_cancelled = True
        if self._process is None:
            self._end(State.CANCELLED, "")
            return
        self._until_s = now_s + grace_s
        self._process.send(signal.SIGTERM)

    def _start(self, now_s: float) -> None:
        try:
            self._process = self._hooks.start()
        except OSError as exc:
            self._end(State.FAILED, f"it cannot be run: {exc.strerror}")
            self._hooks.log(f"{self._name} cannot be run: {exc.strerror}.")
            return
        self._state, self._since_s = State.RUNNING, now_s

    def _look_at_process(self, now_s: float) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            # Its children must not outlive it, and act under the name of the island.
            self._process.send(signal.SIGKILL)
            self._process, self._exit_code = None, code
            self._ended(code, now_s)
        elif self._is_cancelled and now_s >= self._until_s:
            self._process.send(signal.SIGKILL)

    def _ended(self, code: int, now_s: float) -> None:
        reason = exit_text(code)
        if self._is_cancelled:
            self._end(State.CANCELLED, reason)
        elif code == 0:
            self._end(State.FINISHED, "")
        else:
            has_lasted = now_s - self._since_s >= self._restarts.crash_window_s
            self._num_crashes = 0 if has_lasted else self._num_crashes + 1
            self._failed(reason, now_s)

    def _failed(self, reason: str, now_s: float) -> None:
        policy = self._restarts
        if self._num_restarts >= policy.max_restarts:
            self._end(State.FAILED, reason)
        elif self._num_crashes >= policy.max_crashes:
            self._end(
                State.FAILED, f"crashed {self._num_crashes} times in a row: {reason}"
            )
            self._hooks.log(f"{self._name} ended with {reason}, and is not restarted.")
        else:
            pause_s = policy.pause_s(self._num_crashes)
            self._until_s = now_s + pause_s
            self._state, self._reason = State.RESTARTING, reason
            self._hooks.log(
                f"{self._name} ended with {reason}, and is restarted in {pause_s:g} s."
            )

    def _end(self, state: State, reason: str) -> None:
        self._state, self._reason = state, reason


def exit_text(code: int) -> str:
    """Return the text of an exit code or of the signal that ended a process."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"
