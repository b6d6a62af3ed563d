"""`atoll move RUN TARGET`: move a run to a store or to a coordinator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from atoll.cli.run_names import HTTP_PREFIXES, RUN, StoreUrl, locate_run
from atoll.errors import AtollError, UsageError
from atoll.island.environment import credentials_from_environment
from atoll.run_client.location import RunNames
from atoll.security import RunUrl, parse_run_url

if TYPE_CHECKING:  # slow to import, and not needed for an error of usage
    from atoll.run_client.move import ServeInstructions


def move(
    run: Annotated[str, RUN],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="URL or path of a store, or https://HOST:PORT of a coordinator.",
            show_default=False,
        ),
    ],
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Directory of the new coordinator. Default: ./NAME.atoll.",
        ),
    ] = None,
    back: Annotated[
        bool, typer.Option("--back", help="Give up a move in progress.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the new location as JSON.")
    ] = False,
) -> None:
    """Move a run from its coordinator into a store, or back.

    Islands follow, and keep their work. Rounds stand still during the move. An
    interrupted move can be resumed by the same command. The old coordinator
    redirects islands as long as it is served. A new coordinator must be served
    after the move, on this machine, at HOST:PORT.
    """
    source = locate_run(run)
    if _absolute(target) == str(source) and not back:
        # A repeated command: after the first one the name means the new location.
        _print_already(str(source), as_json=as_json)
        return
    if isinstance(source, StoreUrl):
        _to_coordinator(source, target, directory, back=back, as_json=as_json)
        return
    url = _store_target(source, target, directory)
    from atoll.run_client.move import MoveToStore

    with MoveToStore(source, url) as move_to_store, _hint_on_error(move_to_store):
        status = move_to_store.stay() if back else move_to_store.go()
    if not back:
        _remember(status, url)
    if as_json:
        typer.echo(json.dumps(status, indent=2))
    else:
        typer.echo(f"{status['run']}: {status['state']}. {status['why']}".rstrip())


def _to_coordinator(
    source: StoreUrl, target: str, directory: Path | None, *, back: bool, as_json: bool
) -> None:
    url = _coordinator_target(source, target)
    from atoll.run_client.move import MoveToCoordinator

    with (
        MoveToCoordinator(source.url, url, directory) as move_to_coordinator,
        _hint_on_error(move_to_coordinator),
    ):
        instructions = None if back else move_to_coordinator.go()
        if back:
            move_to_coordinator.stay()
    if instructions is not None:
        _print_instructions(instructions, as_json=as_json)
    elif as_json:
        typer.echo(json.dumps({"state": "staying", "move": None}))
    else:
        typer.echo(f"The run stays at {source}.")


class _Move(Protocol):
    """A move, in either direction."""

    is_moving: bool
    """Whether the move has begun, and is not complete."""


@contextmanager
def _hint_on_error(move_object: _Move) -> Iterator[None]:
    """Print the remedy if an error interrupts a move in progress."""
    try:
        yield
    except AtollError:
        if move_object.is_moving:
            typer.echo(
                "atoll: the run is moving, and its rounds stand still. Remove the "
                "cause below and repeat the command, or give up with --back.",
                err=True,
            )
        raise


def _print_instructions(instructions: ServeInstructions, *, as_json: bool) -> None:
    """Print the commands to run next."""
    if as_json:
        typer.echo(json.dumps(instructions.facts(), indent=2))
        return
    target, directory = instructions.target, instructions.directory
    typer.echo(f"{instructions.run}: moved to {target}, out of {directory}.")
    typer.echo(f"serve it now   {instructions.serve}")
    if instructions.target.has_tls:
        typer.echo(f"then invite    {instructions.invite}")
        typer.echo(
            "               and paste the printed command on every other machine with\n"
            "               islands, with `true` as COMMAND: they follow by themselves."
        )


def _print_already(location: str, *, as_json: bool) -> None:
    if as_json:
        document = {"state": "moved", "move": {"target": location, "is_over": True}}
        typer.echo(json.dumps(document))
    else:
        typer.echo(f"The run is at {location} already.")


def _coordinator_target(source: StoreUrl, target: str) -> RunUrl:
    """Return the coordinator to which a run in a store moves."""
    if not target.startswith(HTTP_PREFIXES):
        raise UsageError(
            f"The run at {source} is in a store, and {target} is a store as well. Move "
            f"by way of a coordinator: `atoll move {source} https://HOST:PORT`, serve "
            "the run there, and move it to the other store."
        )
    return parse_run_url(target)


def _store_target(source: RunUrl, target: str, directory: Path | None) -> str:
    """Return the store to which a run at a coordinator moves."""
    if target.startswith(HTTP_PREFIXES):
        raise UsageError(
            f"{target} is a coordinator's URL, and the run is at the coordinator "
            f"{source}. To serve it elsewhere stop it and move its directory; or give "
            "a store: s3://BUCKET/PATH, or a path."
        )
    if directory is not None:
        raise UsageError(
            f"--dir is for a move to a coordinator, and {target} is a store. "
            "Leave it out."
        )
    return _absolute(target)


def _absolute(target: str) -> str:
    """Return a target as an absolute path or a normal URL."""
    if target.startswith(HTTP_PREFIXES):
        return str(parse_run_url(target))
    is_plain = "://" not in target
    return str(Path(target).expanduser().absolute()) if is_plain else target


def _remember(status: dict[str, Any], url: str) -> None:
    """Point the names that this user has for the run to its new location."""
    names = RunNames(credentials_from_environment())
    for name in (status["run"], status["name"]):
        names.remember(name, url)
