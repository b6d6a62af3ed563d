"""`atoll launch --on ENGINE -n N RUN -- COMMAND...`: islands on the engine one has."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import typer

from atoll.cli import launch_options as given
from atoll.cli.launch_options import Coordinating, pairs, size_bytes
from atoll.cli.launch_run import Serve, is_run_file, run_at, serve_words
from atoll.cli.launch_view import Following
from atoll.cli.names import place_of
from atoll.cli.run_file import Assignments
from atoll.errors import UsageError
from atoll.launch.launching import Launched, launch_spec, plan_spec
from atoll.launch.registry import open_launcher
from atoll.launch.spec import IslandSpec, Resources, Restarts

INTERRUPTED, UNFINISHED = 130, 1

NO_PORT_YET = 1
"""Stands in a plan for the port of a coordinator that nobody has started."""


def launch(
    run: given.Run,
    command: given.Command,
    engine: given.Engine = "local",
    n: given.Number = 1,
    name: given.Name = None,
    coordinator: given.Coordinator = Coordinating.HERE,
    directory: given.Directory = None,
    host: given.Host = "127.0.0.1",
    assignments: Assignments = None,
    processes: given.Processes = 1,
    environment: given.Environment = None,
    secrets: given.Secrets = None,
    cpus: given.Cpus = None,
    memory: given.Memory = None,
    accelerators: given.Accelerators = 0,
    accelerator: given.Accelerator = None,
    time_limit_s: given.TimeLimit = None,
    restarts: given.Most = None,
    image: given.Image = None,
    requirements: given.Requirements = None,
    ship: given.Ship = None,
    options: given.Options = None,
    detach: given.Detach = False,
    dry_run: given.DryRun = False,
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
            restarts=Restarts() if restarts is None else Restarts(most=restarts),
        )

    words = pairs("--option", options)
    serve = Serve(
        directory=directory,
        host=host,
        assignments=assignments or (),
        engine=_serving_engine(coordinator, engine, words),
        options=words if coordinator is Coordinating.ISLAND0 else {},
    )
    # What is wrong with islands is told before a coordinator is started for them.
    spec = spec_for(_planned(run, n, serve))
    code = _code(engine, spec, ship, words)
    plan = plan_spec(engine, n, spec, options=words, ship=code)
    if dry_run:
        typer.echo(plan.text, nl=not plan.text.endswith("\n"))
        return
    launched, served = _launched(run, n, serve, engine, spec_for, words, code)
    if detach:
        _tell_where(launched.handle.run)
        return
    _follow(launched, served)


def _serving_engine(
    coordinator: Coordinating, engine: str, options: dict[str, str]
) -> str:
    """Return the engine that a run file is served by.

    Raises:
        UsageError: it is to be this one, whose places have no file of this user's.
    """
    if coordinator is Coordinating.HERE:
        return "local"
    if open_launcher(engine, options).traits.is_elsewhere:
        raise UsageError(
            f"--coordinator island0 keeps the run where islands are, and those of "
            f"{engine} see no file of yours, so that nobody here would find it. Serve "
            "it here, at an address that the islands reach: --listen; or use a run in "
            "a store."
        )
    return engine


def _code(
    engine: str, spec: IslandSpec, ship: bool | None, options: dict[str, str]
) -> Path | None:
    """Return the directory to be shipped: this one, where nothing else brings it."""
    if ship is None:
        is_elsewhere = open_launcher(engine, options).traits.is_elsewhere
        ship = is_elsewhere and spec.image is None
    return Path.cwd() if ship else None


def _planned(run: str, n: int, serve: Serve) -> str:
    """Return the run's URL for a plan, for which nothing is started."""
    if not is_run_file(run):
        return str(place_of(run))
    serve_words(Path(run), n, serve)
    return f"https://{serve.host}:{NO_PORT_YET}"


def _launched(
    run: str,
    n: int,
    serve: Serve,
    engine: str,
    spec_for: Callable[[str], IslandSpec],
    options: dict[str, str],
    ship: Path | None,
) -> tuple[Launched, Launched | None]:
    """Launch a coordinator if one is needed, and islands; or leave nothing."""
    at = run_at(run, n, serve)
    try:
        spec = spec_for(at.url)
        launched = launch_spec(engine, n, spec, options=options, ship=ship)
        return launched, at.coordinator
    except BaseException:
        if at.coordinator is not None:
            at.coordinator.cancel()
        raise


def _follow(launched: Launched, served: Launched | None) -> None:
    following = Following(launched, served)
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
