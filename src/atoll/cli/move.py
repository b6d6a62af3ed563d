"""`atoll move RUN TARGET`: a run goes elsewhere, and its islands follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.cli.names import RUN, URL_STARTS, Names, StoreUrl, place_of
from atoll.errors import UsageError
from atoll.island.environment import surroundings_from_environment
from atoll.security import RunUrl


def move(
    run: Annotated[str, RUN],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="s3://, gs://, az://, file:// or any of fsspec; or a path.",
            show_default=False,
        ),
    ],
    back: Annotated[
        bool, typer.Option("--back", help="Give up a move that is under way.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the status afterwards.")
    ] = False,
) -> None:
    """Take a run from its coordinator into a store; islands follow by themselves.

    Nothing closes meanwhile, and nothing is lost. Interrupted at any moment, the run is
    at one of the two: say the same again to go on. The coordinator sends islands on as
    long as it is served.
    """
    source, url = _places(run, target)
    from atoll.cli.bucket.moving import Departure

    with Departure(source, url) as departure:
        said = departure.stay() if back else departure.go()
    if not back:
        _remember(said, url)
    if as_json:
        typer.echo(json.dumps(said, indent=2))
    else:
        typer.echo(f"{said['run']}: {said['state']}. {said['why']}".rstrip())


def _places(run: str, target: str) -> tuple[RunUrl, str]:
    """Return the coordinator that a run leaves, and the store that it goes to."""
    source = place_of(run)
    if isinstance(source, StoreUrl):
        raise UsageError(
            f"The run at {source} is in a store, and a run cannot leave one yet. It "
            "goes on there; `atoll export` takes its weights, and `atoll serve "
            "RUN.toml --init FILE` begins another run with them."
        )
    if target.startswith(URL_STARTS):
        raise UsageError(
            f"{target} is a coordinator's URL, and a run moves from a coordinator to "
            "a store. To serve it elsewhere move its directory; or give a store: "
            "s3://BUCKET/PATH, or a path."
        )
    is_plain = "://" not in target
    return source, str(Path(target).expanduser().absolute()) if is_plain else target


def _remember(said: dict[str, Any], url: str) -> None:
    """Let the names that are known here mean the run where it is."""
    names = Names(surroundings_from_environment())
    for name in (said["run"], said["name"]):
        names.remember(name, url)
