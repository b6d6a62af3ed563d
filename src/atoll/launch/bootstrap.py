"""What an engine starts at an island's place: it makes a process an island.

    python -m atoll.launch.bootstrap --run URL --name slurm \
        --index-from SLURM_ARRAY_TASK_ID -- train.py --lr 3e-4

It names the island by the engine's stable index, keeps what its pass gives, fetches the
code if that is to be fetched, and then the command takes its place, so that signals and
exit codes are the command's own. ATOLL_RUN, ATOLL_ISLAND and ATOLL_ISLAND_INDEX are set
then, and the pass is not in the environment any more. A coordinator has a charter in
place of a pass, and starts in the directory where that was laid down.
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
from atoll.launch.base import LISTEN_THERE
from atoll.launch.credentials import CHARTER, PASS, PASS_FILE, Charter, Pass
from atoll.launch.spec import IslandSpec, spelt_out

MODULE = "atoll.launch.bootstrap"
_PR_SET_PDEATHSIG = 1


def bootstrap_words(
    spec: IslandSpec,
    *,
    index: int | None = None,
    index_from: str | None = None,
    first: int = 0,
    python: str = "python",
    with_parent: bool = False,
    prefix_from: str | None = None,
) -> list[str]:
    """Return the words by which an engine starts an island.

    The index is given, or is `first` plus what the variable `index_from` says there.
    An island that lives `with_parent` is told to go when that ends without a word.
    What the variable `prefix_from` says there begins the name of the run's host.
    """
    assert (index is None) != (index_from is None), "an island has one index"
    words = [python, "-m", MODULE, "--run", spec.run, "--name", spec.name]
    words += ["--index", str(index)] if index_from is None else []
    words += ["--index-from", index_from] if index_from is not None else []
    words += ["--first", str(first)] if first else []
    words += ["--with-parent"] if with_parent else []
    words += ["--prefix-from", prefix_from] if prefix_from is not None else []
    words += ["--code", spec.code] if spec.code else []
    words += ["--directory", spec.directory] if spec.directory else []
    words += ["--processes", str(spec.processes)] if spec.processes > 1 else []
    return [*words, "--", *spec.command]


def told_to(run: str, island: str, index: int) -> dict[str, str]:
    """Return what every island finds in its environment, whatever started it."""
    return {
        "ATOLL_RUN": run,
        "ATOLL_ISLAND": island,
        "ATOLL_ISLAND_INDEX": str(index),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Become an island's command."""
    given = _parser().parse_args(arguments)
    if given.with_parent:
        _die_with_parent()
    try:
        environment = dict(os.environ)
        index = _index(given, environment)
        island, run = f"{given.name}-{index}", _run(given, environment)
        if (kept := _pass(environment)) is not None:
            replace(kept, url=kept.url and run).adopt(island)
        if (charter := environment.pop(CHARTER, None)) is not None:
            directory = Path(given.directory) if given.directory else None
            os.chdir(Charter.from_json(charter).lay_down(directory))
        if given.code:
            from atoll.launch.code import fetch_code

            os.chdir(fetch_code(run, given.code, island=island))
        if given.directory:
            os.chdir(given.directory)
        environment |= told_to(run, island, index)
        words = spelt_out(
            [_place() if word == LISTEN_THERE else word for word in given.command],
            processes=given.processes,
            python=sys.executable,
        )
        become(words, environment)
    except (AtollError, OSError) as exc:
        sys.exit(f"atoll: {exc}")


def become(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Let a command take the place of this process.

    Raises:
        UsageError: it cannot be run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(words[0], list(words), dict(environment))
    except OSError as exc:
        raise UsageError(
            f"{words[0]!r} cannot be run: {exc.strerror}. Write the command after --, "
            "for example: -- python train.py"
        ) from exc


def _place() -> str:
    """Return the address by which other machines reach this one; loopback if none do.

    Nothing is sent: it is what the way to an address that nobody has begins with.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _die_with_parent() -> None:
    """Have SIGTERM sent here when whoever started this is gone, where Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--run", required=True)
    parser.add_argument("--name", required=True)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--index", type=int)
    which.add_argument("--index-from", metavar="VARIABLE")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--with-parent", action="store_true")
    parser.add_argument("--prefix-from", metavar="VARIABLE")
    parser.add_argument("--code", metavar="DIGEST")
    parser.add_argument("--directory")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("command", nargs="+")
    return parser


def _index(given: argparse.Namespace, environment: Mapping[str, str]) -> int:
    if given.index is not None:
        return int(given.index)
    said = environment.get(given.index_from, "")
    if not said.isdecimal():
        raise UsageError(
            f"{given.index_from}={said[:80]!r} is no index of an island. Was this "
            "started by the engine that sets it?"
        )
    return int(said) + int(given.first)


def _run(given: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """Return the run's URL as it is seen from here."""
    run = str(given.run)
    if given.prefix_from is None:
        return run
    scheme, mark, rest = run.partition("://")
    prefix = environment.get(given.prefix_from, "")
    if not prefix:
        raise UsageError(
            f"{given.prefix_from} is not set, and begins the name that {run} has here. "
            "Was this started by the engine that sets it?"
        )
    return f"{scheme}{mark}{prefix}{rest}"


def _pass(environment: dict[str, str]) -> Pass | None:
    """Take the pass out of the environment, which the command inherits."""
    text, file = environment.pop(PASS, None), environment.pop(PASS_FILE, None)
    if text is not None:
        return Pass.from_json(text)
    return None if file is None else Pass.from_file(Path(file))


if __name__ == "__main__":
    main()
