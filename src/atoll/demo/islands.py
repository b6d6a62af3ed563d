"""All islands of the demo, each a process of its own.

    python -m atoll.demo.islands --directory demo.atoll

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
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.demo import files
from atoll.demo.dataset import read_eras
from atoll.demo.files import run_settings


def load() -> Callable[..., None]:
    """Load what every island would load, and return how to be one."""
    gc.disable()  # what is loaded stays: there is no garbage in it to look for
    from atoll.demo.island import live
    from atoll.demo.model import GPT, make_optimizer
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
    eras = read_eras(files.text(directory))
    shard = fork_each(len(eras))
    if shard is not None:
        write_to(files.log(directory, shard))
        live(eras, shard, files.results(directory, shard), run=run)


if __name__ == "__main__":
    main()
