"""The lives of one island on this machine, as its supervisor leads them.

    pending -> running -> finished
                  |----> restarting -> running ...
                  |----> failed
                  +----> cancelled

Rule 1: only a command that failed is started again; one that ended with 0 is done.
Rule 2: an island that was told to go is cancelled, whatever its command ends with.
Rule 3: a life that lasted forgives the deaths at once before it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from atoll.launch.base import Report, State
from atoll.launch.spec import Restarts


class Process(Protocol):
    """A life of an island: a process and all that it starts."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Return how it ended: minus the number of the signal, if one ended it."""
        ...

    def send(self, number: int) -> None:
        """Send a signal to all of it; nothing happens if it is gone."""
        ...


@dataclass(frozen=True, kw_only=True)
class Words:
    """What a life says to the island's log between two lives."""

    say: Callable[[str], None]
    start: Callable[[], Process]


class Life:
    """One island: started, looked at, told to go."""

    def __init__(self, index: int, name: str, restarts: Restarts, words: Words) -> None:
        self._index, self._name = index, name
        self._restarts, self._words = restarts, words
        self._state = State.PENDING
        self._process: Process | None = None
        self._num_restarts = self._num_crashes = 0
        self._exit_code: int | None = None
        self._why = ""
        self._since_s = self._until_s = 0.0
        self._is_told = False

    @property
    def report(self) -> Report:
        """What is said of it."""
        pid = self._process.pid if self._process else None
        return Report(
            index=self._index,
            name=self._name,
            state=self._state,
            restarts=self._num_restarts,
            exit_code=self._exit_code,
            reason=self._why,
            host="" if pid is None else f"process {pid}",
        )

    @property
    def is_over(self) -> bool:
        return self._state.is_over

    def look(self, now_s: float) -> None:
        """Notice what has happened, and do what is due."""
        if self._state is State.PENDING:
            self._start(now_s)
        elif self._state is State.RUNNING:
            self._look_at_process(now_s)
        elif self._state is State.RESTARTING and now_s >= self._until_s:
            self._num_restarts += 1
            self._start(now_s)

    def cancel(self, now_s: float, *, grace_s: float) -> None:
        """Tell it to go, within a time. Safe to repeat: the first time counts."""
        if self.is_over or self._is_told:
            return
        self._is_told = True
        if self._process is None:
            self._end(State.CANCELLED, "")
            return
        self._until_s = now_s + grace_s
        self._process.send(signal.SIGTERM)

    def _start(self, now_s: float) -> None:
        try:
            self._process = self._words.start()
        except OSError as exc:
            self._end(State.FAILED, f"it cannot be run: {exc.strerror}")
            self._words.say(f"{self._name} cannot be run: {exc.strerror}.")
            return
        self._state, self._since_s = State.RUNNING, now_s

    def _look_at_process(self, now_s: float) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            # What it had started must not outlive it and speak for it.
            self._process.send(signal.SIGKILL)
            self._process, self._exit_code = None, code
            self._ended(code, now_s)
        elif self._is_told and now_s >= self._until_s:
            self._process.send(signal.SIGKILL)

    def _ended(self, code: int, now_s: float) -> None:
        how = ending(code)
        if self._is_told:
            self._end(State.CANCELLED, how)
        elif code == 0:
            self._end(State.FINISHED, "")
        else:
            has_lasted = now_s - self._since_s >= self._restarts.crash_window_s
            self._num_crashes = 0 if has_lasted else self._num_crashes + 1
            self._failed(how, now_s)

    def _failed(self, how: str, now_s: float) -> None:
        policy = self._restarts
        if self._num_restarts >= policy.max_restarts:
            self._end(State.FAILED, how)
        elif self._num_crashes >= policy.max_crashes:
            self._end(State.FAILED, f"died at once {self._num_crashes} times: {how}")
            self._words.say(f"{self._name} ended with {how}, and is left dead.")
        else:
            pause_s = policy.pause_s(self._num_crashes)
            self._until_s = now_s + pause_s
            self._state, self._why = State.RESTARTING, how
            self._words.say(
                f"{self._name} ended with {how}, and is started again in {pause_s:g} s."
            )

    def _end(self, state: State, why: str) -> None:
        self._state, self._why = state, why


def ending(code: int) -> str:
    """Return how a process ended, for people."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"
