"""Two network namespaces joined by a cable of a given rate: the kernel's own TCP.

Needs root, `ip`, and `tc` with its token bucket filter. Removing the two namespaces
removes the cable, and kills the programs in them. There is no delay here, because few
kernels are built with it; `Link` has that.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from atoll.errors import UsageError

CABLE = "cable0"
"""The name of the cable's end in either namespace."""

_NAME = re.compile(r"atoll-(\d+)-\d+-(?:left|right)")
_NUMBERS = itertools.count()


class Namespace:
    """One end of the cable: an address, and the programs started at it."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        """The address for programs in the other namespace."""
        self._started: list[subprocess.Popen[Any]] = []

    def popen(
        self, argv: Sequence[str | Path], **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a program here; it is killed when the namespaces are removed.

        Args:
            options: those of `subprocess.Popen`.
        """
        program = subprocess.Popen(self._inside(argv), **options)
        self._started.append(program)
        return program

    def run(
        self, argv: Sequence[str | Path], **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a program here to its end, as `subprocess.run` does."""
        return subprocess.run(self._inside(argv), **options)

    def remove(self) -> None:
        """Kill all processes in the namespace, and remove it."""
        for pid in _ip("netns", "pids", self.name, check=False).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for program in self._started:
            program.wait()
        _ip("netns", "del", self.name, check=False)

    def _inside(self, argv: Sequence[str | Path]) -> list[str | Path]:
        return ["ip", "netns", "exec", self.name, *argv]


@contextmanager
def linked_namespaces(
    *, rate_mbit: float | None = None
) -> Iterator[tuple[Namespace, Namespace]]:
    """Create two namespaces and the cable between them; remove them at the end.

    Args:
        rate_mbit: megabits per second each way; None for no limit.

    Raises:
        UsageError: this machine has no namespaces. See `namespaces_unavailable`.
    """
    if rate_mbit is not None and not rate_mbit > 0:
        raise UsageError(f"rate_mbit={rate_mbit} must be positive.")
    _remove_orphans()
    stem = f"atoll-{os.getpid()}-{next(_NUMBERS)}"
    # Addresses reserved for documentation, which no network of the machine has.
    left = Namespace(f"{stem}-left", "192.0.2.1")
    right = Namespace(f"{stem}-right", "192.0.2.2")
    try:
        _connect(left, right)
        for end in (left, right):
            _configure(end, rate_mbit)
        yield left, right
    finally:
        left.remove()
        right.remove()


@functools.cache
def namespaces_unavailable() -> str | None:
    """Return the reason why `linked_namespaces` fails here; None if it works."""
    if os.geteuid() != 0:
        return "Network namespaces need root."
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"Network namespaces need the program {program} (iproute2)."
    try:
        with linked_namespaces(rate_mbit=100):
            return None
    except UsageError as exc:
        return str(exc)


def _connect(left: Namespace, right: Namespace) -> None:
    _ip("netns", "add", left.name)
    _ip("netns", "add", right.name)
    ends = ("type", "veth", "peer", "name", CABLE, "netns", right.name)
    _ip("link", "add", CABLE, "netns", left.name, *ends)


def _configure(end: Namespace, rate_mbit: float | None) -> None:
    inside = ("-n", end.name)
    _ip(*inside, "addr", "add", f"{end.address}/24", "dev", CABLE)
    _ip(*inside, "link", "set", "lo", "up")
    _ip(*inside, "link", "set", CABLE, "up")
    if rate_mbit is not None:
        tbf = ("rate", f"{rate_mbit}mbit", "burst", "64kb", "latency", "50ms")
        _run("tc", *inside, "qdisc", "add", "dev", CABLE, "root", "tbf", *tbf)


def _remove_orphans() -> None:
    """Remove namespaces of processes that were killed."""
    for line in _ip("netns", "list").splitlines():
        name = _NAME.match(line)
        if name and not Path(f"/proc/{name[1]}").exists():
            Namespace(name[0], "").remove()


def _ip(*arguments: str, check: bool = True) -> str:
    return _run("ip", *arguments, check=check)


def _run(*argv: str, check: bool = True) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except FileNotFoundError as exc:
        raise UsageError(f"There is no program {argv[0]}. Install iproute2.") from exc
    if check and done.returncode != 0:
        raise UsageError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")
    return done.stdout
