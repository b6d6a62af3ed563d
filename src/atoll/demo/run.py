"""The paths in the directory of a demo, and the run file of the package.

Runs the demo on one machine: a coordinator here, and a process for each island.

All islands of the demo, each a process of its own.

    python -m atoll.demo.run --directory demo.atoll

loads what every island needs, reads the run's address from its standard input, and
forks an island for each era of the directory. When one ends, a line on standard output
says so: its shard, and its exit status.

Loading torch and the kernels takes longer than the first rounds: four processes that
did it on two cores would keep a reader waiting for half a minute. A fork is safe as
long as there is no thread that the copy would lack: OMP_NUM_THREADS must be 1.
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
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from atoll.demo.dataset import read_eras, read_messages, split_by_era, write_eras
from atoll.errors import RemoteError
from atoll.security import Credentials, Role, token_file
from atoll.settings import RunSettings

if TYPE_CHECKING:
    from atoll.coordinator.app import Coordinator


def text_directory(directory: Path) -> Path:
    """The eras."""
    return directory / "text"


def config_home(directory: Path) -> Path:
    """Credentials of this run, so that the user's own stay as they are."""
    return directory / "home"


def results_file(directory: Path, shard: int) -> Path:
    """What an island found out, when the run has ended."""
    return directory / f"island-{shard}.json"


def log_file(directory: Path, shard: int | None = None) -> Path:
    """What an island said; without a shard, what was said before there were any."""
    return directory / ("islands.log" if shard is None else f"island-{shard}.log")


def report_file(directory: Path) -> Path:
    """The page with the curves."""
    return directory / "report.html"


QUICK_ROUNDS = 24
"""Enough to see the loss fall, in less than a minute."""


def run_file_text() -> str:
    """Return the run file as it is read, comments included."""
    return files("atoll.demo").joinpath("run.toml").read_text()


def run_settings(*, quick: bool = False) -> RunSettings:
    """Return the demo's settings; a quick one has fewer rounds."""
    read = RunSettings.from_dict(tomllib.loads(run_file_text()))
    return read.with_values({"run.end_rounds": QUICK_ROUNDS}) if quick else read


LOOK_S = 0.5
"""How often the islands are looked at."""

OnLook = Callable[[Mapping[str, Any]], None]


def run_islands(
    directory: Path, settings: RunSettings, *, on_look: OnLook
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train until the run ends; return what each island found out, and the status.

    Raises:
        RemoteError: an island failed; its log says why.
        UsageError: the text is not installed.
    """
    count = settings.run.start_islands
    with ExitStack() as ending:
        # They load the longest, so all else is done meanwhile.
        islands = ending.enter_context(
            IslandProcesses(directory, _environment(directory))
        )
        from atoll.coordinator.app import Coordinator, ListenOptions

        write_eras(text_directory(directory), split_by_era(read_messages(), count))
        coordinator = Coordinator(directory, settings, listening=ListenOptions())
        ending.callback(coordinator.close)
        ending.callback(islands.end)  # while there is a coordinator to leave
        coordinator.start()
        _remember(coordinator, directory)
        islands.begin(coordinator.url)
        _watch(islands, count, coordinator, on_look)
        status = coordinator.status()
    read = [
        json.loads(results_file(directory, shard).read_text()) for shard in range(count)
    ]
    return read, status


def _environment(directory: Path) -> dict[str, str]:
    return {
        **os.environ,
        "XDG_CONFIG_HOME": str(config_home(directory).resolve()),
        "OMP_NUM_THREADS": "1",  # each has a core at most, and a fork knows no pool
    }


def _remember(coordinator: Coordinator, directory: Path) -> None:
    """Put what an island needs where it looks; the user's own stays as it is."""
    Credentials(config_home(directory) / "atoll" / "runs").remember(
        coordinator.url,
        pin=coordinator.pin,
        tokens={Role.ISLAND: token_file(directory.resolve(), Role.ISLAND)},
    )


def _watch(
    islands: IslandProcesses, count: int, coordinator: Coordinator, on_look: OnLook
) -> None:
    """Wait for the islands, and show what they do meanwhile."""
    while count:
        on_look(coordinator.status())
        count -= islands.next_end(LOOK_S) is not None
    on_look(coordinator.status())


COMMAND = (sys.executable, "-m", "atoll.demo.run")
"""Is given the directory, and told the run on its standard input."""

GRACE_S = 20.0
"""For islands to go when the demo is interrupted."""


class IslandProcesses:
    """Processes that load at once, train when they are told a run, and end with this.

    They are a group of their own, so that an interruption at the keyboard reaches
    them by `end` alone, while there still is a coordinator to leave.
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
        self._to, self._from = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def begin(self, run: str) -> None:
        """Let them join a run as soon as they have loaded."""
        try:
            self._to.write(f"{run}\n".encode())
        except BrokenPipeError:
            raise self._failure(None, self._process.wait()) from None

    def next_end(self, timeout_s: float) -> int | None:
        """Return the shard of an island that is done, or None if none is for so long.

        Raises:
            RemoteError: one has failed; its log says why.
        """
        if not select.select([self._from], [], [], timeout_s)[0]:
            return None
        told = self._from.readline()
        if not told:
            raise self._failure(None, self._process.wait())
        shard, status = map(int, told.split())
        if status:
            raise self._failure(shard, status)
        return shard

    def end(self) -> None:
        """Let those go that are still there, and wait for them. Safe to repeat."""
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._to.close()
        self._from.close()

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _failure(self, shard: int | None, status: int) -> RemoteError:
        log = log_file(self._directory, shard)
        said = log.read_text(errors="replace").strip()
        who = "The process of the islands" if shard is None else f"Island {shard}"
        return RemoteError(
            f"{who} ended with status {status}: "
            f"{said.splitlines()[-1] if said else 'it said nothing'}. "
            f"Its log is {log}."
        )


def load() -> Callable[..., None]:
    """Load what every island would load, and return how to be one."""
    gc.disable()  # what is loaded stays: there is no garbage in it to look for
    from atoll.demo.train import GPT, live, make_optimizer
    from atoll.island.memory import load_kernels

    make_optimizer(GPT())  # torch loads half of itself with the first optimizer
    load_kernels(run_settings())
    gc.freeze()
    gc.enable()
    return live


def fork_each(count: int) -> int | None:
    """Return the shard in each of `count` forked islands.

    Here None is returned, once all of them have ended.
    """
    islands: dict[int, int] = {}
    for shard in range(count):
        process = os.fork()
        if process == 0:
            return shard
        islands[process] = shard
    # Whoever ends the demo tells the islands as well, and then waits for this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while islands:
        process, status = os.wait()
        told = f"{islands.pop(process)} {os.waitstatus_to_exitcode(status)}\n"
        os.write(sys.stdout.fileno(), told.encode())
    return None


def write_to(log: Path) -> None:
    """Let what this process says go to a file, and let it hear nothing."""
    with log.open("wb") as said, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
        for stream in (sys.stdout, sys.stderr):
            os.dup2(said.fileno(), stream.fileno())


def main(arguments: Sequence[str] | None = None) -> None:
    """Load, wait for the run, and be its islands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="of the demo")
    directory = parser.parse_args(arguments).directory
    live = load()
    run = sys.stdin.readline().strip()
    if not run:
        return  # who started this has gone
    eras = read_eras(text_directory(directory))
    shard = fork_each(len(eras))
    if shard is not None:
        write_to(log_file(directory, shard))
        live(eras, shard, results_file(directory, shard), run=run)


if __name__ == "__main__":
    main()
