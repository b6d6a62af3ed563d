"""The process that an engine starts on an island's host, and that becomes the island.

    python -m atoll.launch.bootstrap --run URL --name slurm \
        --index-from SLURM_ARRAY_TASK_ID -- train.py --lr 3e-4

It names the island by the engine's stable index, stores the credentials of its pass,
fetches shipped code, and then executes the command in the same process, so that signals
and exit codes are the command's own. The command's environment has ATOLL_RUN,
ATOLL_ISLAND and ATOLL_ISLAND_INDEX, and not the pass. A coordinator has a charter
instead of a pass, and starts in the directory to which that was written.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from atoll.errors import AtollError, UsageError
from atoll.launch.base import ADDRESS_PLACEHOLDER
from atoll.launch.spec import CHARTER, PASS, PASS_FILE, IslandSpec, full_argv

MODULE = "atoll.launch.bootstrap"
_PR_SET_PDEATHSIG = 1


def bootstrap_argv(
    spec: IslandSpec,
    *,
    index: int | None = None,
    index_from: str | None = None,
    first: int = 0,
    python: str = "python",
    with_parent: bool = False,
    prefix_from: str | None = None,
) -> list[str]:
    """Return the argv with which an engine starts an island.

    The index is `index`, or `first` plus the value of the variable `index_from` on the
    island's host. With `with_parent`, the island receives SIGTERM when its parent ends.
    The value of the variable `prefix_from` there is prepended to the run's host name.
    """
    assert (index is None) != (index_from is None), "an island has one index"
    argv = [python, "-m", MODULE, "--run", spec.run, "--name", spec.name]
    argv += ["--index", str(index)] if index_from is None else []
    argv += ["--index-from", index_from] if index_from is not None else []
    argv += ["--first", str(first)] if first else []
    argv += ["--with-parent"] if with_parent else []
    argv += ["--prefix-from", prefix_from] if prefix_from is not None else []
    argv += ["--code", spec.code] if spec.code else []
    argv += ["--directory", spec.directory] if spec.directory else []
    argv += ["--processes", str(spec.processes)] if spec.processes > 1 else []
    return [*argv, "--", *spec.command]


def island_variables(run: str, island: str, index: int) -> dict[str, str]:
    """Return the variables that every island has in its environment, on any engine."""
    return {
        "ATOLL_RUN": run,
        "ATOLL_ISLAND": island,
        "ATOLL_ISLAND_INDEX": str(index),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Set up an island, and execute its command in this process."""
    options = _parser().parse_args(arguments)
    if options.with_parent:
        _die_with_parent()
    try:
        environment = dict(os.environ)
        index = _index(options, environment)
        island, run = f"{options.name}-{index}", _run(options, environment)
        if environment.keys() & {PASS, PASS_FILE, CHARTER}:
            _adopt_credentials(options, environment, run, island)
        if options.code:
            from atoll.launch.code import fetch_code

            os.chdir(fetch_code(run, options.code, island=island))
        if options.directory:
            os.chdir(options.directory)
        environment |= island_variables(run, island, index)
        argv = full_argv(
            [
                _own_address() if argument == ADDRESS_PLACEHOLDER else argument
                for argument in options.command
            ],
            processes=options.processes,
            python=sys.executable,
        )
        become(argv, environment)
    except (AtollError, OSError) as exc:
        sys.exit(f"atoll: {exc}")


def become(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Replace this process by a command.

    Raises:
        UsageError: it cannot be run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(argv[0], list(argv), dict(environment))
    except OSError as exc:
        raise UsageError(
            f"{argv[0]!r} cannot be run: {exc.strerror}. Write the command after --, "
            "for example: -- python train.py"
        ) from exc


def _own_address() -> str:
    """Return the address by which other machines reach this one; loopback if none do.

    It is the source address of the route to a documentation address; nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _die_with_parent() -> None:
    """Receive SIGTERM when the parent process ends; only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--run", required=True)
    parser.add_argument("--name", required=True)
    index = parser.add_mutually_exclusive_group(required=True)
    index.add_argument("--index", type=int)
    index.add_argument("--index-from", metavar="VARIABLE")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--with-parent", action="store_true")
    parser.add_argument("--prefix-from", metavar="VARIABLE")
    parser.add_argument("--code", metavar="DIGEST")
    parser.add_argument("--directory")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("command", nargs="+")
    return parser


def _index(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    if options.index is not None:
        return int(options.index)
    value = environment.get(options.index_from, "")
    if not value.isdecimal():
        raise UsageError(
            f"{options.index_from}={value[:80]!r} is no index of an island. Was this "
            "started by the engine that sets it?"
        )
    return int(value) + int(options.first)


def _run(options: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """Return the run's URL as it is valid on this host."""
    run = str(options.run)
    if options.prefix_from is None:
        return run
    scheme, mark, rest = run.partition("://")
    prefix = environment.get(options.prefix_from, "")
    if not prefix:
        raise UsageError(
            f"{options.prefix_from} is not set, and the host name of {run} begins "
            "with it. Was this started by the engine that sets it?"
        )
    return f"{scheme}{mark}{prefix}{rest}"


def _adopt_credentials(
    options: argparse.Namespace, environment: dict[str, str], run: str, island: str
) -> None:
    """Write a pass and a charter to files, and remove them from the environment."""
    # Loads the exchanges, which islands on this user's machines do not need yet.
    from atoll.launch.credentials import CoordinatorFiles, IslandCredentials

    text, file = environment.pop(PASS, None), environment.pop(PASS_FILE, None)
    if text is not None or file is not None:
        island_pass = (
            IslandCredentials.from_file(Path(file or ""))
            if text is None
            else IslandCredentials.from_json(text)
        )
        replace(island_pass, url=island_pass.url and run).adopt(island)
    if (charter := environment.pop(CHARTER, None)) is not None:
        directory = Path(options.directory) if options.directory else None
        os.chdir(CoordinatorFiles.from_json(charter).lay_down(directory))


if __name__ == "__main__":
    main()
