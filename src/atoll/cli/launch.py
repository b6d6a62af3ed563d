"""`atoll launch --on ENGINE -n N RUN -- COMMAND...`: start islands on an engine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli import launch_coordinator
from atoll.cli.launches import LaunchFollower
from atoll.cli.run_file import Assignments
from atoll.cli.run_names import complete_run_name, locate_run
from atoll.errors import UsageError
from atoll.launch import api
from atoll.launch.base import ADDRESS_PLACEHOLDER, LaunchPlan
from atoll.launch.registry import engine_names, open_launcher
from atoll.launch.spec import IslandSpec, Resources, Restarts

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


class CoordinatorLocation(StrEnum):
    """Where the coordinator of a run file runs."""

    LOCAL = "here"
    ISLAND0 = "island0"


Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run file to serve; or the URL, directory or name of a run.",
        autocompletion=complete_run_name,
        show_default=False,
    ),
]
Command = Annotated[
    list[str],
    typer.Argument(
        metavar="-- COMMAND",
        help="Training program: a script, -m MODULE, module:function or a program.",
        show_default=False,
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="ENGINE",
        help=f"Engine that starts the islands: {', '.join(engine_names())}.",
    ),
]
Number = Annotated[int, typer.Option("-n", min=1, help="Number of islands.")]
Name = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Names islands NAME-0, ... Default: ENGINE."),
]
Coordinator = Annotated[
    CoordinatorLocation, typer.Option(help="Where to serve a run file.")
]
Directory = Annotated[
    Path | None,
    typer.Option("--dir", help="Directory of the served run. Default: ./NAME.atoll."),
]
Host = Annotated[
    str,
    typer.Option(
        "--listen", metavar="HOST", help="Address on which to serve a run file."
    ),
]
Processes = Annotated[
    int, typer.Option(min=1, help="Processes of each island, started by torchrun.")
]
Environment = Annotated[
    list[str] | None,
    typer.Option(
        "--env", metavar="KEY=VALUE", help="Environment variable of every island."
    ),
]
Secrets = Annotated[
    list[str] | None,
    typer.Option(
        "--secret",
        metavar="KEY=WHERE",
        help="Secret variable; WHERE is env:NAME, file:PATH or engine:NAME.",
    ),
]
Cpus = Annotated[float | None, typer.Option(help="CPUs of each island.")]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory of each island: 16GB.")
]
Accelerators = Annotated[
    int, typer.Option(min=0, help="GPUs or other accelerators of each island.")
]
Accelerator = Annotated[
    str | None,
    typer.Option(metavar="KIND", help="Kind of accelerator, by the engine's name."),
]
TimeLimit = Annotated[
    float | None,
    typer.Option("--time-limit-s", help="Time limit of each island, per restart."),
]
MaxRestarts = Annotated[
    int | None, typer.Option("--restarts", min=0, help="Maximum restarts of an island.")
]
Image = Annotated[
    str | None, typer.Option(help="Container image, if the engine uses containers.")
]
Requirements = Annotated[
    list[str] | None,
    typer.Option("--requirement", help="Package to install by pip, without an image."),
]
Ship = Annotated[
    bool | None,
    typer.Option(
        "--ship/--no-ship",
        help="Send this directory's code. Default: where islands lack it.",
        show_default=False,
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="Option of the engine."),
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Return once everything is launched.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the submissions, and submit nothing.")
]


def parse_pairs(option: str, arguments: Sequence[str] | None) -> dict[str, str]:
    """Return the values of KEY=VALUE arguments by key.

    Raises:
        UsageError: an argument has another form, or a key is given twice. The message
            does not show the value, which may be a secret.
    """
    values: dict[str, str] = {}
    for argument in arguments or ():
        key, equals, value = argument.partition("=")
        if not equals or not key or key in values:
            raise UsageError(
                f"{option} takes KEY=VALUE, each key once, and {key[:40]!r} is not so."
            )
        values[key] = value
    return values


def size_bytes(text: str) -> int:
    """Return the number of bytes of a size.

    >>> size_bytes("16GB"), size_bytes("512MiB"), size_bytes("1000")
    (16000000000, 536870912, 1000)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--memory {text[:40]!r} is no size. Write 16GB or 512MiB.")
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


INTERRUPTED, UNFINISHED = 130, 1

NO_PORT_YET = 1
"""Stands in a plan for the port of a coordinator that is not started yet."""


def launch(
    run: Run,
    command: Command,
    engine: Engine = "local",
    n: Number = 1,
    name: Name = None,
    coordinator: Coordinator = CoordinatorLocation.LOCAL,
    directory: Directory = None,
    host: Host = launch_coordinator.LISTEN_HERE,
    assignments: Assignments = None,
    processes: Processes = 1,
    environment: Environment = None,
    secrets: Secrets = None,
    cpus: Cpus = None,
    memory: Memory = None,
    accelerators: Accelerators = 0,
    accelerator: Accelerator = None,
    time_limit_s: TimeLimit = None,
    restarts: MaxRestarts = None,
    image: Image = None,
    requirements: Requirements = None,
    ship: Ship = None,
    options: Options = None,
    detach: Detach = False,
    dry_run: DryRun = False,
) -> None:
    """Start islands of a run on an engine, and follow the run to its end.

    A run file is served by a coordinator that is launched as well; run.start_islands
    is then N, unless the file sets it. Ctrl-C lets the islands leave cleanly. Exits
    with 0 if the run has finished, and with 1 if its islands ended before that.
    """
    policy = Restarts() if restarts is None else Restarts(max_restarts=restarts)

    def spec_for(url: str) -> IslandSpec:
        return IslandSpec(
            command=tuple(command),
            run=url,
            name=name or engine.replace("_", "-"),
            processes=processes,
            environment=parse_pairs("--env", environment),
            secrets=parse_pairs("--secret", secrets),
            image=image,
            requirements=tuple(requirements or ()),
            resources=Resources(
                cpus=cpus,
                memory_bytes=None if memory is None else size_bytes(memory),
                accelerators=accelerators,
                accelerator=accelerator,
                time_limit_s=time_limit_s,
            ),
            restarts=policy,
        )

    engine_options = parse_pairs("--option", options)
    serve = launch_coordinator.ServeOptions(
        directory=directory,
        host=host,
        assignments=assignments or (),
        image=image,
        requirements=requirements or (),
    )
    if coordinator is CoordinatorLocation.ISLAND0:
        serve = _serve_by_engine(run, serve, engine, engine_options)
    # Plan first: errors of the islands' options are reported before a coordinator is
    # started for them.
    url, before = _planned(run, n, serve)
    spec = spec_for(url)
    code = _code(engine, spec, ship, serve, engine_options)
    plan = api.plan_spec(engine, n, spec, options=engine_options, ship=code)
    if dry_run:
        for planned in (*before, plan):
            typer.echo(planned.text, nl=not planned.text.endswith("\n"))
        return
    launched, target = _launched(run, n, serve, engine, spec_for, engine_options, code)
    if detach:
        _print_commands(launched.handle.run)
        return
    _follow(launched, target)


def _serve_by_engine(
    run: str,
    serve: launch_coordinator.ServeOptions,
    engine: str,
    options: dict[str, str],
) -> launch_coordinator.ServeOptions:
    """Return the options for serving a run file by the engine of the islands.

    Raises:
        UsageError: the engine cannot serve a run file.
    """
    if not launch_coordinator.is_run_file(run):
        return serve
    serve = replace(serve, engine=engine, options=options)
    if engine == "local":
        return serve
    if not open_launcher(engine, options).traits.is_elsewhere:
        # The scheduler has not chosen the machine yet, so its address is unknown.
        is_host_given = serve.host != launch_coordinator.LISTEN_HERE
        return serve if is_host_given else replace(serve, host=ADDRESS_PLACEHOLDER)
    return replace(serve, inside=api.engine_coordinator(engine, options))


def _code(
    engine: str,
    spec: IslandSpec,
    ship: bool | None,
    serve: launch_coordinator.ServeOptions,
    options: dict[str, str],
) -> Path | None:
    """Return the directory to ship: this one, if no image provides the code.

    Raises:
        UsageError: code is to be shipped to a coordinator that this machine cannot
            reach.
    """
    if ship is None:
        is_elsewhere = open_launcher(engine, options).traits.is_elsewhere
        ship = is_elsewhere and spec.image is None
    if ship and serve.inside is not None and not serve.inside.serving.is_reachable:
        raise UsageError(
            f"Code is kept with its run, whose coordinator on {engine} is not reached "
            "from here. Put it into the --image or a --requirement, and give "
            "--no-ship; or serve the run here."
        )
    return Path.cwd() if ship else None


def _planned(
    run: str, n: int, serve: launch_coordinator.ServeOptions
) -> tuple[str, list[LaunchPlan]]:
    """Return the run's URL for a plan, and the plans to submit before it.

    Starts nothing.
    """
    if not launch_coordinator.is_run_file(run):
        return str(locate_run(run)), []
    host = (
        launch_coordinator.LISTEN_HERE
        if serve.host == ADDRESS_PLACEHOLDER
        else serve.host
    )
    unknown = f"https://{host}:{NO_PORT_YET}"
    if serve.inside is not None:
        plan = launch_coordinator.plan_inside(Path(run), n, serve)
        return plan.url or unknown, [plan]
    argv, directory = launch_coordinator.serve_argv(Path(run), n, serve)
    if serve.engine == "local":
        return unknown, []
    spec = launch_coordinator.serve_spec(argv, directory)
    return unknown, [api.plan_spec(serve.engine, 1, spec, options=serve.options)]


def _launched(
    run: str,
    n: int,
    serve: launch_coordinator.ServeOptions,
    engine: str,
    spec_for: Callable[[str], IslandSpec],
    options: dict[str, str],
    ship: Path | None,
) -> tuple[api.Launched, launch_coordinator.RunTarget]:
    """Launch a coordinator if one is needed, and islands. On an error end both."""
    serves = (
        launch_coordinator.find_or_serve
        if serve.inside is None
        else launch_coordinator.serve_inside
    )
    target = serves(run, n, serve)
    try:
        spec = spec_for(target.url)
        launched = api.launch_spec(engine, n, spec, options=options, ship=ship)
        return launched, target
    except BaseException as exc:
        if target.coordinator is not None:
            api.end_after(exc, target.coordinator)
        raise


def _follow(launched: api.Launched, target: launch_coordinator.RunTarget) -> None:
    follower = LaunchFollower(
        launched, target.coordinator, is_reachable=target.is_reachable
    )
    try:
        has_finished = follower.follow()
    except KeyboardInterrupt:
        typer.echo("", err=True)
        # Cancel by run: this also ends the coordinator that was launched with them.
        run = shlex.quote(launched.handle.run)
        typer.echo(f"atoll: end them: atoll cancel {run}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if not has_finished:
        raise typer.Exit(INTERRUPTED if follower.was_interrupted else UNFINISHED)


def _print_commands(run: str) -> None:
    name = shlex.quote(run)
    typer.echo(f"look     atoll ps {name}")
    typer.echo(f"read     atoll logs {name} --follow")
    typer.echo(f"end      atoll cancel {name}")
