"""A live process that gets no processor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def starved(pid: int) -> Iterator[None]:
    """Let a process have only what another one leaves of one processor."""
    everywhere = os.sched_getaffinity(pid)
    alone = {max(everywhere)}
    usual = os.sched_param(0)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(busy.pid, alone)
        for thread in threads_of(pid):
            os.sched_setaffinity(thread, alone)
            os.sched_setscheduler(thread, os.SCHED_IDLE, usual)
        yield
    finally:
        busy.kill()
        busy.wait()
        for thread in threads_of(pid):
            os.sched_setscheduler(thread, os.SCHED_OTHER, usual)
            os.sched_setaffinity(thread, everywhere)


def threads_of(pid: int) -> list[int]:
    """Return the threads of a process."""
    return [int(each.name) for each in Path(f"/proc/{pid}/task").iterdir()]
