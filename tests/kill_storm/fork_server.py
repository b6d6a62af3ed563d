"""Starts processes in milliseconds: a server forks them, with all modules imported.

    python -m tests.kill_storm.fork_server

A `ForkServer` is the storm's side. The other side reads one request per line, and
answers with one line: `start` forks a child, `poll` returns its exit status. The poll
that reports the end of a child reaps it, and its pid is not signalled after that, when
it could be another process.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.e2e.stage import ROOT

PRELOADED = ("tests.kill_storm.island", "tests.e2e.coordinator_process")


@dataclass
class Forked:
    """A forked process, with the part of `subprocess.Popen` that storms use."""

    pid: int
    _fork_server: ForkServer
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._fork_server.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until_s = time.monotonic() + (60.0 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > until_s:
                raise TimeoutError(f"process {self.pid} has not ended")
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ForkServer:
    """Forks processes that run a module's `main`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kill_storm.fork_server"],
            env={**os.environ, **environment},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, module: str, words: Sequence[str], log: Path) -> Forked:
        """Run `python -m module words`, with its errors appended to a log."""
        said = {"start": module, "words": [*words], "log": str(log)}
        return Forked(self.ask(said), self)

    def ask(self, said: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(said) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the server; processes that it has started continue."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def main() -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    for line in sys.stdin:
        said = json.loads(line)
        answer = _start(said) if "start" in said else _poll(said["poll"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _start(said: Mapping[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        _live(said)
    return pid


def _poll(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _live(said: Mapping[str, Any]) -> NoReturn:
    """Run as another process, without the pipes of the fork server."""
    code = 1
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        log = os.open(said["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        for file, at in ((nowhere, 0), (nowhere, 1), (log, 2)):
            os.dup2(file, at)
        sys.argv = [said["start"], *said["words"]]
        importlib.import_module(said["start"]).main()
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:  # as the interpreter does at the end of a program
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
