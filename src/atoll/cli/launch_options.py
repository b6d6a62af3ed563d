"""What `atoll launch` takes, and how it is read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.names import complete
from atoll.errors import UsageError
from atoll.launch.registry import engine_names

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


class Coordinating(StrEnum):
    """Where the coordinator of a run file runs."""

    HERE = "here"
    ISLAND0 = "island0"


Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run file, which is served then; or a URL, a directory or a name.",
        autocompletion=complete,
        show_default=False,
    ),
]
Command = Annotated[
    list[str],
    typer.Argument(
        metavar="-- COMMAND",
        help="A script, -m MODULE, module:function or a program.",
        show_default=False,
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="ENGINE",
        help=f"What starts the islands: {', '.join(engine_names())}.",
    ),
]
Number = Annotated[int, typer.Option("-n", min=1, help="How many islands.")]
Name = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Islands are NAME-0, ...; ENGINE without."),
]
Coordinator = Annotated[Coordinating, typer.Option(help="Where a run file is served.")]
Directory = Annotated[
    Path | None,
    typer.Option("--dir", help="Of a run file's run; ./NAME.atoll without."),
]
Host = Annotated[
    str,
    typer.Option("--listen", metavar="HOST", help="Who reaches a run file's run."),
]
Processes = Annotated[int, typer.Option(min=1, help="Of one island, by torchrun.")]
Environment = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="KEY=VALUE", help="For every island."),
]
Secrets = Annotated[
    list[str] | None,
    typer.Option(
        "--secret",
        metavar="KEY=WHERE",
        help="WHERE is env:NAME, file:PATH or engine:NAME.",
    ),
]
Cpus = Annotated[float | None, typer.Option(help="Of one island.")]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Of one island: 16GB.")
]
Accelerators = Annotated[
    int, typer.Option(min=0, help="GPUs or the like of one island.")
]
Accelerator = Annotated[
    str | None, typer.Option(metavar="KIND", help="As the engine calls it.")
]
TimeLimit = Annotated[
    float | None, typer.Option("--time-limit-s", help="Of one life of an island.")
]
Most = Annotated[
    int | None, typer.Option("--restarts", min=0, help="Of an island, at most.")
]
Image = Annotated[str | None, typer.Option(help="A container's, if the engine can.")]
Requirements = Annotated[
    list[str] | None,
    typer.Option("--requirement", help="For pip, where there is no image."),
]
Ship = Annotated[
    bool | None,
    typer.Option(
        "--ship/--no-ship",
        help="Send this directory's code; without, where islands lack it.",
        show_default=False,
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="The engine's own words."),
]
Detach = Annotated[bool, typer.Option("--detach", help="Return when all is launched.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be submitted.")
]


def pairs(option: str, given: Sequence[str] | None) -> dict[str, str]:
    """Return KEY=VALUE words by key.

    Raises:
        UsageError: one is none, or a key is given twice. The value is not shown.
    """
    found: dict[str, str] = {}
    for each in given or ():
        key, equals, value = each.partition("=")
        if not equals or not key or key in found:
            raise UsageError(
                f"{option} takes KEY=VALUE, each key once, and {key[:40]!r} is not so."
            )
        found[key] = value
    return found


def size_bytes(text: str) -> int:
    """Return how many bytes a size says.

    >>> size_bytes("16GB"), size_bytes("512MiB"), size_bytes("1000")
    (16000000000, 536870912, 1000)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"--memory {text[:40]!r} is no size. Write 16GB or 512MiB.")
    power = " KMGT".index(found[2].upper() or " ")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)
