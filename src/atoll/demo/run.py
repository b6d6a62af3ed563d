"""Runs the demo on one machine: a coordinator in this process, and forked islands.

    python -m atoll.demo.run --directory demo.atoll

is the process of the islands. It imports the modules of an island, reads the run's
address from its standard input, and forks an island for each era of the directory. When
an island ends, it writes a line to standard output: the shard and the exit status.

Importing torch and the kernels takes longer than the first rounds: four processes that
did it on two cores would delay the demo by half a minute. A fork is safe as long as
there is no thread that the copy would lack: OMP_NUM_THREADS must be 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from atoll.demo.dataset import read_eras, read_messages, split_by_era, write_eras
from atoll.errors import RemoteError
from atoll.security import Credentials, Role, token_file
from atoll.settings import RunSettings

if TYPE_CHECKING:
    from atoll.coordinator.app import Coordinator


def text_directory(directory: Path) -> Path:
    """Return the directory of the eras' texts."""
    return directory / "text"


def config_home(directory: Path) -> Path:
    """Return the directory of this run's credentials, apart from the user's own."""
    return directory / "home"


def results_file(directory: Path, shard: int) -> Path:
    """Return the file of an island's results."""
    return directory / f"island-{shard}.json"


def log_file(directory: Path, shard: int | None = None) -> Path:
    """Return the log of an island; without a shard, that of the forking process."""
    return directory / ("islands.log" if shard is None else f"island-{shard}.log")


def report_file(directory: Path) -> Path:
    """Return the page with the curves."""
    return directory / "report.html"


QUICK_ROUNDS = 24
"""Enough to see the loss fall, in less than a minute."""


def run_file_text() -> str:
    """Return the text of the run file, with its comments."""
    return files("atoll.demo").joinpath("run.toml").read_text()


def run_settings(*, quick: bool = False) -> RunSettings:
    """Return the demo's settings; a quick one has fewer rounds."""
    settings = RunSettings.from_dict(tomllib.loads(run_file_text()))
    return settings.with_values({"run.end_rounds": QUICK_ROUNDS}) if quick else settings


POLL_S = 0.5
"""Between two status documents."""

OnStatus = Callable[[Mapping[str, Any]], None]


def run_islands(
    directory: Path, settings: RunSettings, *, on_status: OnStatus
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train until the run ends; return the results of each island, and the status.

    Raises:
        RemoteError: an island failed; its log has the reason.
        UsageError: the text is not installed.
    """
    count = settings.run.start_islands
    with ExitStack() as cleanup:
        # Start the islands first: their imports take the longest.
        islands = cleanup.enter_context(
            IslandProcesses(directory, _environment(directory))
        )
        from atoll.coordinator.app import Coordinator, ListenOptions

        write_eras(text_directory(directory), split_by_era(read_messages(), count))
        coordinator = Coordinator(directory, settings, listening=ListenOptions())
        cleanup.callback(coordinator.close)
        cleanup.callback(islands.end)  # islands leave while the coordinator serves
        coordinator.start()
        _remember(coordinator, directory)
        islands.send_run(coordinator.url)
        _watch(islands, count, coordinator, on_status)
        status = coordinator.status()
    results = [
        json.loads(results_file(directory, shard).read_text()) for shard in range(count)
    ]
    return results, status


def _environment(directory: Path) -> dict[str, str]:
    return {
        **os.environ,
        "XDG_CONFIG_HOME": str(config_home(directory).resolve()),
        "OMP_NUM_THREADS": "1",  # one core each, and no thread pool before the fork
    }


def _remember(coordinator: Coordinator, directory: Path) -> None:
    """Store the credentials of the islands, apart from those of the user."""
    Credentials(config_home(directory) / "atoll" / "runs").remember(
        coordinator.url,
        pin=coordinator.pin,
        tokens={Role.ISLAND: token_file(directory.resolve(), Role.ISLAND)},
    )


def _watch(
    islands: IslandProcesses, count: int, coordinator: Coordinator, on_status: OnStatus
) -> None:
    """Wait for the islands, and pass the status on meanwhile."""
    while count:
        on_status(coordinator.status())
        count -= islands.next_end(POLL_S) is not None
    on_status(coordinator.status())


COMMAND = (sys.executable, "-m", "atoll.demo.run")
"""Command of the islands; its standard input takes the run's address."""

GRACE_S = 20.0
"""For islands to leave when the demo is interrupted."""


class IslandProcesses:
    """The process of the islands, which imports first and trains once it has a run.

    It has its own process group, so that an interrupt at the keyboard reaches it by
    `end` alone, while the coordinator still serves.
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        *,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._directory = directory
        with log_file(directory).open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--directory", str(directory)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                process_group=0,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    def send_run(self, run: str) -> None:
        """Send the run's address; the islands join it after their imports."""
        try:
            self._stdin.write(f"{run}\n".encode())
        except BrokenPipeError:
            raise self._failure(None, self._process.wait()) from None

    def next_end(self, timeout_s: float) -> int | None:
        """Return the shard of an island that finished, or None after the timeout.

        Raises:
            RemoteError: an island failed; its log has the reason.
        """
        if not select.select([self._stdout], [], [], timeout_s)[0]:
            return None
        line = self._stdout.readline()
        if not line:
            raise self._failure(None, self._process.wait())
        shard, status = map(int, line.split())
        if status:
            raise self._failure(shard, status)
        return shard

    def end(self) -> None:
        """Terminate the remaining islands, and wait for them. Safe to repeat."""
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._stdin.close()
        self._stdout.close()

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _failure(self, shard: int | None, status: int) -> RemoteError:
        log = log_file(self._directory, shard)
        text = log.read_text(errors="replace").strip()
        subject = "The process of the islands" if shard is None else f"Island {shard}"
        return RemoteError(
            f"{subject} ended with status {status}: "
            f"{text.splitlines()[-1] if text else 'it printed nothing'}. "
            f"Its log is {log}."
        )


def load_island() -> Callable[..., None]:
    """Import the modules of an island, and return the function that runs one."""
    gc.disable()  # imported objects stay alive, so collecting them is wasted time
    from atoll.demo.train import GPT, make_optimizer, run_island
    from atoll.island.memory import load_kernels

    make_optimizer(GPT())  # torch loads half of itself with the first optimizer
    load_kernels(run_settings())
    gc.freeze()
    gc.enable()
    return run_island


def fork_islands(count: int) -> int | None:
    """Return the shard in each of `count` forked islands.

    The calling process returns None, once all of them have ended.
    """
    # `IslandProcesses.end` signals the whole group, and then waits for this process,
    # which must outlive its islands: a SIGTERM while it forks stays pending.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    islands: dict[int, int] = {}
    for shard in range(count):
        process = os.fork()
        if process == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return shard
        islands[process] = shard
    if signal.SIGTERM in signal.sigpending():  # islands forked after it did not get it
        for process in islands:
            os.kill(process, signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    while islands:
        process, status = os.wait()
        line = f"{islands.pop(process)} {os.waitstatus_to_exitcode(status)}\n"
        os.write(sys.stdout.fileno(), line.encode())
    return None


def redirect_output(log: Path) -> None:
    """Redirect the output of this process to a file, and its input to nothing."""
    with log.open("wb") as output, open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), sys.stdin.fileno())
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())


def main(arguments: Sequence[str] | None = None) -> None:
    """Import, wait for the run's address, and fork the islands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="of the demo")
    directory = parser.parse_args(arguments).directory
    run_island = load_island()
    run = sys.stdin.readline().strip()
    if not run:
        return  # the demo has ended
    eras = read_eras(text_directory(directory))
    shard = fork_islands(len(eras))
    if shard is not None:
        redirect_output(log_file(directory, shard))
        run_island(eras, shard, results_file(directory, shard), run=run)


if __name__ == "__main__":
    main()
