"""What `atoll launch` takes, and how it is read.

`atoll launch --on ENGINE -n N RUN -- COMMAND...`: islands on the engine one has.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.launch_coordinator import (
    LISTEN_HERE,
    RunAt,
    Serve,
    is_run_file,
    plan_inside,
    run_at,
    run_inside,
    serve_spec,
    serve_words,
)
from atoll.cli.launch_follower import Following
from atoll.cli.run_file import Assignments
from atoll.cli.run_names import complete, place_of
from atoll.errors import UsageError
from atoll.launch.api import Launched, end_after, inside_of, launch_spec, plan_spec
from atoll.launch.base import LISTEN_THERE, Plan
from atoll.launch.registry import engine_names, open_launcher
from atoll.launch.spec import IslandSpec, Resources, Restarts

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


INTERRUPTED, UNFINISHED = 130, 1

NO_PORT_YET = 1
"""Stands in a plan for the port of a coordinator that nobody has started."""


def launch(
    run: Run,
    command: Command,
    engine: Engine = "local",
    n: Number = 1,
    name: Name = None,
    coordinator: Coordinator = Coordinating.HERE,
    directory: Directory = None,
    host: Host = LISTEN_HERE,
    assignments: Assignments = None,
    processes: Processes = 1,
    environment: Environment = None,
    secrets: Secrets = None,
    cpus: Cpus = None,
    memory: Memory = None,
    accelerators: Accelerators = 0,
    accelerator: Accelerator = None,
    time_limit_s: TimeLimit = None,
    restarts: Most = None,
    image: Image = None,
    requirements: Requirements = None,
    ship: Ship = None,
    options: Options = None,
    detach: Detach = False,
    dry_run: DryRun = False,
) -> None:
    """Start islands of a run on an engine, and follow them to its end.

    A run file is served by a coordinator that is launched too; run.start_islands is N
    then, unless the file says otherwise. Ctrl-C lets the islands leave cleanly. Exits
    with 0 if the run has finished, and with 1 if its islands are gone before that.
    """

    def spec_for(url: str) -> IslandSpec:
        return IslandSpec(
            command=tuple(command),
            run=url,
            name=name or engine.replace("_", "-"),
            processes=processes,
            environment=pairs("--env", environment),
            secrets=pairs("--secret", secrets),
            image=image,
            requirements=tuple(requirements or ()),
            resources=Resources(
                cpus=cpus,
                memory_bytes=None if memory is None else size_bytes(memory),
                accelerators=accelerators,
                accelerator=accelerator,
                time_limit_s=time_limit_s,
            ),
            restarts=Restarts()
            if restarts is None
            else Restarts(max_restarts=restarts),
        )

    words = pairs("--option", options)
    serve = Serve(
        directory=directory,
        host=host,
        assignments=assignments or (),
        image=image,
        requirements=requirements or (),
    )
    if coordinator is Coordinating.ISLAND0 and is_run_file(run):
        serve = _beside(serve, engine, words)
    # What is wrong with islands is told before a coordinator is started for them.
    url, before = _planned(run, n, serve)
    spec = spec_for(url)
    code = _code(engine, spec, ship, serve, words)
    plan = plan_spec(engine, n, spec, options=words, ship=code)
    if dry_run:
        for each in (*before, plan):
            typer.echo(each.text, nl=not each.text.endswith("\n"))
        return
    launched, at = _launched(run, n, serve, engine, spec_for, words, code)
    if detach:
        _tell_where(launched.handle.run)
        return
    _follow(launched, at)


def _beside(serve: Serve, engine: str, options: dict[str, str]) -> Serve:
    """Return how the engine of the islands serves a run file.

    Raises:
        UsageError: it does not.
    """
    serve = replace(serve, engine=engine, options=options)
    if engine == "local":
        return serve
    if not open_launcher(engine, options).traits.is_elsewhere:
        # At which of the machines it will be, nobody knows yet.
        is_said = serve.host != LISTEN_HERE
        return serve if is_said else replace(serve, host=LISTEN_THERE)
    return replace(serve, inside=inside_of(engine, options))


def _code(
    engine: str,
    spec: IslandSpec,
    ship: bool | None,
    serve: Serve,
    options: dict[str, str],
) -> Path | None:
    """Return the directory to be shipped: this one, where nothing else brings it.

    Raises:
        UsageError: it is, and who would keep it is not reached from here.
    """
    if ship is None:
        is_elsewhere = open_launcher(engine, options).traits.is_elsewhere
        ship = is_elsewhere and spec.image is None
    if ship and serve.inside is not None and not serve.inside.serving.is_in_sight:
        raise UsageError(
            f"Code is kept with its run, whose coordinator on {engine} is not reached "
            "from here. Put it into what --image or --requirement brings, and give "
            "--no-ship; or serve the run here."
        )
    return Path.cwd() if ship else None


def _planned(run: str, n: int, serve: Serve) -> tuple[str, list[Plan]]:
    """Return the run's URL for a plan, and what would be submitted before it.

    Nothing is started for it.
    """
    if not is_run_file(run):
        return str(place_of(run)), []
    host = LISTEN_HERE if serve.host == LISTEN_THERE else serve.host
    nowhere = f"https://{host}:{NO_PORT_YET}"
    if serve.inside is not None:
        plan = plan_inside(Path(run), n, serve)
        return plan.url or nowhere, [plan]
    words, directory = serve_words(Path(run), n, serve)
    if serve.engine == "local":
        return nowhere, []
    spec = serve_spec(words, directory)
    return nowhere, [plan_spec(serve.engine, 1, spec, options=serve.options)]


def _launched(
    run: str,
    n: int,
    serve: Serve,
    engine: str,
    spec_for: Callable[[str], IslandSpec],
    options: dict[str, str],
    ship: Path | None,
) -> tuple[Launched, RunAt]:
    """Launch a coordinator if one is needed, and islands; or leave nothing."""
    serves = run_at if serve.inside is None else run_inside
    at = serves(run, n, serve)
    try:
        spec = spec_for(at.url)
        launched = launch_spec(engine, n, spec, options=options, ship=ship)
        return launched, at
    except BaseException as exc:
        if at.coordinator is not None:
            end_after(exc, at.coordinator)
        raise


def _follow(launched: Launched, at: RunAt) -> None:
    following = Following(launched, at.coordinator, is_in_sight=at.is_in_sight)
    try:
        has_finished = following.follow()
    except KeyboardInterrupt:
        typer.echo("", err=True)
        # By the run: the coordinator that was launched with them goes too.
        run = shlex.quote(launched.handle.run)
        typer.echo(f"atoll: end them: atoll cancel {run}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if not has_finished:
        raise typer.Exit(INTERRUPTED if following.was_told else UNFINISHED)


def _tell_where(run: str) -> None:
    name = shlex.quote(run)
    typer.echo(f"look     atoll ps {name}")
    typer.echo(f"read     atoll logs {name} --follow")
    typer.echo(f"end      atoll cancel {name}")
