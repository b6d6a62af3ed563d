"""Programs of other people that some tests run against; `make engines` installs them.

Without one its tests are skipped, naming that command; with CI=true they fail.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[1]
PLACES = (Path(sys.executable).parent, ROOT / ".engines" / "node_modules" / ".bin")
STARTS_S = 60.0


def engine(name: str, *, needs: Sequence[str] = ()) -> Path:
    """Return where a program is, or skip the test that needs it.

    `needs` are programs of the machine without which it neither runs nor installs.
    """
    found = shutil.which(name, path=os.pathsep.join(map(str, PLACES)))
    absent = [each for each in needs if shutil.which(each) is None]
    if found is not None and not absent:
        return Path(found)
    first = f"install {' and '.join(absent)}, then: " if absent else ""
    _absent(f"{name} is not installed. Try: {first}make engines")


def system_engine(name: str) -> Path:
    """Return where a program of the machine's packages is, or skip the test."""
    found = shutil.which(name)
    if found is not None:
        return Path(found)
    _absent(f"{name} is not installed. Try: make engines")


def interpreter_with(program: str) -> Path:
    """Return a Python that has what ours cannot have, or skip the test.

    It has a virtual environment of the program's name, and the program is in it.
    """
    programs = ROOT / ".engines" / program / "bin"
    if (programs / program).exists() and (programs / "pytest").exists():
        return programs / "python"
    _absent(f"{program} is not installed. Try: make engines")


def _absent(said: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(said)
    pytest.skip(said)


def free_port() -> int:
    """Return a port that nobody listens at just now."""
    return free_ports(1)[0]


def free_ports(number: int) -> list[int]:
    """Return different ports that nobody listens at just now."""
    with ExitStack() as open_until_all_are_known:
        sockets = [
            open_until_all_are_known.enter_context(socket.socket())
            for _ in range(number)
        ]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


@contextmanager
def running(
    words: Sequence[object], *, home: Path, is_ready: Callable[[], bool]
) -> Iterator[None]:
    """Run a program while the block lasts, from when it is ready on."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / "said.txt").open("wb") as said:
        process = subprocess.Popen(
            [str(word) for word in words],
            cwd=home,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _await(process, is_ready, home / "said.txt")
        yield
    finally:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await(
    process: subprocess.Popen[bytes], is_ready: Callable[[], bool], said: Path
) -> None:
    until_s = time.monotonic() + STARTS_S
    while not is_ready():
        if process.poll() is not None or time.monotonic() > until_s:
            tail = said.read_text(errors="replace")[-2000:]
            raise AssertionError(f"{process.args!r} did not start:\n{tail}")
        time.sleep(0.1)
