"""How an island's process ends: by SIGTERM between two inner steps, or by an error.

Rule 1: the first SIGTERM is a request. The loop has `grace_s` to reach its next inner
        step; a loop that does not is interrupted.
Rule 2: the second has its default effect: it ends the process immediately. A signal
        within `SAME_SIGNAL_S` of the first is taken for the same request.
Rule 3: a program that handles SIGTERM itself keeps doing so.
Rule 4: an uncaught AtollError ends the process with the exit code of the command line
        (5 for bytes that do not verify), after its traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Self

from atoll.errors import AtollError, exit_code

STOP_GRACE_S = 5.0
"""How long a loop may take to its next inner step: schedulers often kill 30 s after
SIGTERM, and leaving the run needs most of that."""

SAME_SIGNAL_S = 2.0
"""Time after the first SIGTERM in which others are ignored: Slurm signals every process
of a task, and torchrun signals its ranks again."""


ExceptHook = Callable[
    [type[BaseException], BaseException, TracebackType | None], object
]


class Interrupted(BaseException):
    """Ends a loop that did not react to SIGTERM. No `except Exception` stops it."""


class Termination:
    """Turns SIGTERM into `is_asked` while the block runs.

    With `grace_s` 0 the block is interrupted immediately.
    Only in the main thread, where Python handles signals; elsewhere nothing changes.
    """

    def __init__(self, *, grace_s: float = STOP_GRACE_S) -> None:
        self._grace_s = grace_s
        self._is_asked = False
        self._asked_at_s = 0.0
        self._is_installed = False
        self._is_own = False
        """Whether `_watch` sends the next SIGTERM: it interrupts the loop."""
        # The only queue with a reentrant `put`, which a signal handler needs.
        self._requests: SimpleQueue[bool] = SimpleQueue()
        self._is_heeded = threading.Event()

    @property
    def is_asked(self) -> bool:
        """Whether SIGTERM has requested the end of the loop."""
        return self._is_asked

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            name = "atoll-termination"
            threading.Thread(target=self._watch, name=name, daemon=True).start()
            signal.signal(signal.SIGTERM, self._handle)
            self._is_installed = True
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.heed()
        if self._is_installed:
            self._is_installed = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def heed(self) -> None:
        """Note that the loop is over: it is no longer interrupted. Safe to repeat."""
        self._is_heeded.set()
        self._requests.put(False)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_asked:
            self._is_asked, self._asked_at_s = True, time.monotonic()
            if not self._grace_s and not self._is_heeded.is_set():
                raise Interrupted("SIGTERM came.")
            self._requests.put(True)
        elif not self._is_own:
            if time.monotonic() < self._asked_at_s + SAME_SIGNAL_S:
                return
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._is_own = False
            if not self._is_heeded.is_set():
                raise Interrupted("SIGTERM came, and no inner step ended since.")

    def _watch(self) -> None:
        """Interrupt the thread that trains if the loop does not end in `grace_s`.

        The second signal runs `_handle` in that thread, even if it waits for a lock or
        for I/O. After the end of the loop it has no effect.
        """
        if self._requests.get() and not self._is_heeded.wait(self._grace_s):
            self._is_own = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def use_exit_codes() -> None:
    """Let an uncaught `AtollError` end this process with its own code. Safe to repeat.

    Python exits with 1 after any exception. The former exception hook is called first,
    so that tracebacks, debuggers and crash reporters work as before.
    """
    before = sys.excepthook
    if isinstance(before, _ExitCodes):
        return
    sys.excepthook = _ExitCodes(before)


class _ExitCodes:
    """Exception hook that sets the exit code."""

    def __init__(self, before: ExceptHook) -> None:
        self._before = before

    def __call__(
        self,
        kind: type[BaseException],
        exc: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        self._before(kind, exc, traceback)
        if isinstance(exc, AtollError):
            raise SystemExit(exit_code(exc))
