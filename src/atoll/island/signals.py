"""How an island's process ends: by SIGTERM between two inner steps, or by an error.

Rule 1: the first SIGTERM asks. The loop has a while to come to its next inner step; one
        that stands still is interrupted where it is.
Rule 2: the second is the machine's own again: it ends the process at once. One that
        comes in the same moment is the first, told by two.
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

HEED_S = 5.0
"""How long a loop may take to its next inner step: who sent SIGTERM often kills 30 s
later, and the farewell needs most of that."""

ALIKE_S = 2.0
"""How soon after the first another one asks for the same: Slurm tells every process of
a task, and torchrun tells its ranks once more."""


ExceptHook = Callable[
    [type[BaseException], BaseException, TracebackType | None], object
]


class Interrupted(BaseException):
    """Ends a loop that did not heed SIGTERM. No `except Exception` stops it."""


class Termination:
    """Turns SIGTERM into `is_asked` while the block runs.

    A block that has `heed_s` 0 is interrupted at once.
    Only in the main thread, where Python handles signals; elsewhere nothing changes.
    """

    def __init__(self, *, heed_s: float = HEED_S) -> None:
        self._heed_s = heed_s
        self._is_asked = False
        self._asked_at_s = 0.0
        self._is_installed = False
        self._is_own = False
        """Whether the next SIGTERM is ours: it interrupts."""
        # The only queue that a signal handler may put into, whatever it interrupts.
        self._said: SimpleQueue[bool] = SimpleQueue()
        self._is_heeded = threading.Event()

    @property
    def is_asked(self) -> bool:
        """Whether the loop is to end."""
        return self._is_asked

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            name = "atoll-termination"
            threading.Thread(target=self._watch, name=name, daemon=True).start()
            signal.signal(signal.SIGTERM, self._handle)
            self._is_installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.heed()
        if self._is_installed:
            self._is_installed = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def heed(self) -> None:
        """Interrupt nothing any more: the loop is over. Safe to repeat."""
        self._is_heeded.set()
        self._said.put(False)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_asked:
            self._is_asked, self._asked_at_s = True, time.monotonic()
            if not self._heed_s and not self._is_heeded.is_set():
                raise Interrupted("SIGTERM came.")
            self._said.put(True)
        elif not self._is_own:
            if time.monotonic() < self._asked_at_s + ALIKE_S:
                return
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._is_own = False
            if not self._is_heeded.is_set():
                raise Interrupted("SIGTERM came, and no inner step ended since.")

    def _watch(self) -> None:
        """Run `_handle` again in the thread that trains, out of whatever it waits for.

        What comes when the loop is over changes nothing.
        """
        if self._said.get() and not self._is_heeded.wait(self._heed_s):
            self._is_own = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def use_exit_codes() -> None:
    """Let an uncaught `AtollError` end this process with its own code. Safe to repeat.

    Python ends with 1 after any exception. What was installed to show one is called
    first, so that a traceback, a debugger or a crash reporter sees it as before.
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
