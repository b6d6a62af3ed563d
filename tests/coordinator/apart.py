"""A coordinator in a process of its own, whose memory and disk are its own.

Run as a script with a directory and a run file in JSON: it prints its address, and
serves until its standard input ends. With a third argument its clock stands still.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from atoll.coordinator.app import Coordinator, ListenOptions
from atoll.exchange.over_http import HttpTransport
from atoll.http import HttpClient
from atoll.settings import RunSettings
from atoll.weights.verify import Norm
from atoll.wire import codec
from tests.coordinator.serving import address_of, asking, bearer
from tests.http.loopback import PATIENCE_S

LONG_S = 60.0
"""For what moves a gigabyte."""


class StillClock:
    """Time that does not pass: whoever waits, waits. Implements `Clock`."""

    def now_s(self) -> float:
        return 0.0


@dataclass(frozen=True)
class Apart:
    """A coordinator, seen from outside."""

    process: int
    directory: Path
    url: str

    @property
    def address(self) -> tuple[str, int]:
        return address_of(self.url)

    @cached_property
    def run(self) -> str:
        """The run's id, as /info has it."""
        return str(json.loads(asking(self, "GET /info").body)["run"])

    @property
    def num_threads(self) -> int:
        return self._said("Threads")

    @property
    def rss_bytes(self) -> int:
        return 1024 * self._said("VmRSS")

    @property
    def highest_rss_bytes(self) -> int:
        """Since `forget_highest`."""
        return 1024 * self._said("VmHWM")

    def forget_highest(self) -> None:
        """Let `highest_rss_bytes` begin anew."""
        Path(f"/proc/{self.process}/clear_refs").write_text("5")

    def limit_files(self, size_bytes: int | None) -> None:
        """Let no file of the process grow beyond a size: its disk is full."""
        _, hard = resource.prlimit(self.process, resource.RLIMIT_FSIZE)
        soft = hard if size_bytes is None else size_bytes
        resource.prlimit(self.process, resource.RLIMIT_FSIZE, (soft, hard))

    @contextmanager
    def line(self) -> Iterator[HttpTransport]:
        """Return an island's line to this coordinator."""
        caller = HttpClient(
            *self.address, timeout_s=LONG_S, connect_timeout_s=PATIENCE_S
        )
        headers = {"Authorization": bearer(self.directory)}
        line = HttpTransport(caller, headers=headers)
        try:
            yield line
        finally:
            line.close()

    def _said(self, key: str) -> int:
        lines = Path(f"/proc/{self.process}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key))


@contextmanager
def serving_apart(
    directory: Path,
    settings: dict[str, Any],
    *,
    is_still: bool = False,
    num_files: int | None = None,
) -> Iterator[Apart]:
    """Serve a run in another process until the block ends.

    It may have `num_files` descriptors open, if that is given.
    """

    def limit_descriptors() -> None:
        if num_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))

    directory.mkdir(mode=0o700, exist_ok=True)
    said = [str(directory), json.dumps(settings), *["still"] * is_still]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.coordinator.apart", *said],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        preexec_fn=limit_descriptors,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield Apart(process.pid, directory, process.stdout.readline().strip())
        process.stdin.close()
    assert process.returncode == 0


def compile_kernels() -> None:
    """Have what numba takes once, before anybody measures what a run takes."""
    up, values = codec("fp32"), np.zeros(3, np.float32)
    body = np.zeros(12, np.uint8)
    up.encode(values, body)
    up.decode(body, values)
    Norm().add(values)


def main() -> None:
    """Serve until there is nobody to serve for."""
    directory, settings, *still = sys.argv[1:]
    coordinator = Coordinator(
        Path(directory),
        RunSettings.from_dict(json.loads(settings)),
        listening=ListenOptions(has_tls=False),
        clock=StillClock() if still else None,
    )
    coordinator.start()
    compile_kernels()
    sys.stdout.write(f"{coordinator.url}\n")
    sys.stdout.flush()
    sys.stdin.read()
    coordinator.close(grace_s=0.2)


if __name__ == "__main__":
    main()
