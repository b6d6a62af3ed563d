"""A process that has copies of itself save, and kills each at another system call.

It is a separate program without threads, so that it may fork: see `test_writer`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import atoll.checkpoint
from tests.checkpoint.objects import Weights, newest_value, save_value


class Axe:
    """Kills this process, as kill -9 does, before or after the n-th system call."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __call__(self, frame: FrameType, event: str, what: object) -> None:
        if event in ("c_call", "c_return") and _is_system_call(what):
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1


def _is_system_call(what: object) -> bool:
    return type(what) is type(os.open) and what.__module__ == "posix"


def killed_at(root: Path, at: int) -> bool:
    """Have a copy of this process save the value 2; return whether it was killed."""
    pid = os.fork()
    if pid == 0:
        axe = Axe(at)
        threading.setprofile(axe)
        sys.setprofile(axe)
        objects = {"model": Weights(2.0), "trainer": {"steps": 2}}
        atoll.checkpoint.save(root, objects, components=list(objects), keep=1)
        sys.setprofile(None)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def main(root: Path) -> None:
    """Kill at every point in turn, and print the state of the directory as JSON."""
    found = []
    at = 0
    is_killed = True
    while is_killed:
        shutil.rmtree(root, ignore_errors=True)
        save_value(root, 1.0)
        is_killed = killed_at(root, at)
        newest = newest_value(root)
        save_value(root, 3.0, keep=1)
        left = sorted(path.name for path in root.iterdir() if path.name != "lock")
        found.append({"newest": newest, "next": newest_value(root), "left": len(left)})
        at += 1
    print(json.dumps(found))  # noqa: T201 (its answer to the test)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
