"""`atoll move RUN TARGET`: a run goes elsewhere, and its islands follow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from atoll.cli.run_names import RUN, URL_STARTS, Names, StoreUrl, place_of
from atoll.errors import AtollError, UsageError
from atoll.island.environment import surroundings_from_environment
from atoll.security import RunUrl, parse_run_url

if TYPE_CHECKING:  # what goes there takes its time to load
    from atoll.cli.migration import Place


def move(
    run: Annotated[str, RUN],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A store's URL or a path; or the https://HOST:PORT of a coordinator.",
            show_default=False,
        ),
    ],
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Of the coordinator that the run goes to; ./NAME.atoll without.",
        ),
    ] = None,
    back: Annotated[
        bool, typer.Option("--back", help="Give up a move that is under way.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: where the run is afterwards.")
    ] = False,
) -> None:
    """Move a run from its coordinator into a store, or back.

    Islands follow. Nothing closes meanwhile, and nothing is lost. Interrupted at any
    moment, the run is at one of the two: say the same again to go on. The coordinator
    that a run leaves sends islands on as long as it is served; the one that it goes to
    is served after this, on this machine, as HOST:PORT.
    """
    source = place_of(run)
    if _spelt(target) == str(source) and not back:
        # A name that was said again: since the first time it means the new place.
        _tell_already(str(source), as_json=as_json)
        return
    if isinstance(source, StoreUrl):
        _to_coordinator(source, target, directory, back=back, as_json=as_json)
        return
    url = _store(source, target, directory)
    from atoll.cli.migration import Departure

    with Departure(source, url) as departure, _hinted(departure):
        said = departure.stay() if back else departure.go()
    if not back:
        _remember(said, url)
    if as_json:
        typer.echo(json.dumps(said, indent=2))
    else:
        typer.echo(f"{said['run']}: {said['state']}. {said['why']}".rstrip())


def _to_coordinator(
    source: StoreUrl, target: str, directory: Path | None, *, back: bool, as_json: bool
) -> None:
    url = _coordinator(source, target)
    from atoll.cli.migration import Removal

    with Removal(source.url, url, directory) as removal, _hinted(removal):
        place = None if back else removal.go()
        if back:
            removal.stay()
    if place is not None:
        _tell(place, as_json=as_json)
    elif as_json:
        typer.echo(json.dumps({"state": "staying", "move": None}))
    else:
        typer.echo(f"The run stays at {source}, and goes on there.")


class _Way(Protocol):
    """A run, and where it goes."""

    is_under_way: bool
    """Whether it was told to go, and has not arrived."""


@contextmanager
def _hinted(way: _Way) -> Iterator[None]:
    """Say what to do about a run that is left on its way by an error."""
    try:
        yield
    except AtollError:
        if way.is_under_way:
            typer.echo(
                "atoll: the run is on its way, and no round closes. When the cause "
                "below is removed say the same again, or give up with --back.",
                err=True,
            )
        raise


def _tell(place: Place, *, as_json: bool) -> None:
    """Say what to type next."""
    if as_json:
        typer.echo(json.dumps(place.facts(), indent=2))
        return
    typer.echo(f"{place.run}: moved to {place.target}, out of {place.directory}.")
    typer.echo(f"serve it now   {place.serve}")
    if place.target.has_tls:
        typer.echo(f"then invite    {place.invite}")
        typer.echo(
            "               and paste what it prints on every other machine that has "
            "islands,\n               with `true` as COMMAND: they go on by themselves."
        )


def _tell_already(place: str, *, as_json: bool) -> None:
    if as_json:
        said = {"state": "moved", "move": {"target": place, "is_over": True}}
        typer.echo(json.dumps(said))
    else:
        typer.echo(f"The run is at {place} already.")


def _coordinator(source: StoreUrl, target: str) -> RunUrl:
    """Return the coordinator that a run in a store goes to."""
    if not target.startswith(URL_STARTS):
        raise UsageError(
            f"The run at {source} is in a store, and {target} is one, too. A run goes "
            "there by a coordinator: `atoll move "
            f"{source} https://HOST:PORT`, serve it, and move it on."
        )
    return parse_run_url(target)


def _store(source: RunUrl, target: str, directory: Path | None) -> str:
    """Return the store that a run at a coordinator goes to."""
    if target.startswith(URL_STARTS):
        raise UsageError(
            f"{target} is a coordinator's URL, and the run is at {source}, which is "
            "one, too. To serve it elsewhere stop it and move its directory; or give "
            "a store: s3://BUCKET/PATH, or a path."
        )
    if directory is not None:
        raise UsageError(
            f"--dir is for a run that goes to a coordinator, and {target} is a store. "
            "Leave it out."
        )
    return _spelt(target)


def _spelt(target: str) -> str:
    """Return a target as a place is called, wherever a command is started."""
    if target.startswith(URL_STARTS):
        return str(parse_run_url(target))
    is_plain = "://" not in target
    return str(Path(target).expanduser().absolute()) if is_plain else target


def _remember(said: dict[str, Any], url: str) -> None:
    """Let the names that are known here mean the run where it is."""
    names = Names(surroundings_from_environment())
    for name in (said["run"], said["name"]):
        names.remember(name, url)
