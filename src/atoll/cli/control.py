"""`atoll control RUN ACTION`: change a run at its coordinator or in its store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated

import typer

from atoll.cli.run_names import RUN, open_named
from atoll.errors import UsageError
from atoll.run_client import Action, Command
from atoll.settings import parse_assignment

NEEDS = {
    Action.EVICT: "the name of one island: atoll control RUN evict ISLAND",
    Action.SET: "settings: atoll control RUN set run.end_rounds=300",
}


def control(
    run: Annotated[str, RUN],
    action: Annotated[
        Action, typer.Argument(help="Action to perform.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ISLAND|KEY=VALUE", help="Island to evict, or settings to set."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the resulting status as JSON.")
    ] = False,
) -> None:
    """Control a run: pause, resume, save, stop, drain, evict, set.

    evict removes one island from the run.
    save makes every island save its own checkpoint at its next heartbeat, and call the
    functions that its program gave to on_save.
    set starts a new epoch: quorum, patience, limits and the end apply immediately,
    outer.lr and outer.momentum from the next round of each fragment on. In a store
    islands read it at their next heartbeat, and users with write access are operators.
    """
    command = _command(action, arguments or [])
    with closing(open_named(run)) as client:
        reply = client.control(command)
    if as_json:
        typer.echo(json.dumps(reply.status.document, indent=2))
    else:
        typer.echo(f"{reply.status.run}: {reply.message}")


def _command(action: Action, arguments: Sequence[str]) -> Command:
    if action is Action.SET and arguments:
        return Command(action, values=dict(map(parse_assignment, arguments)))
    if action is Action.EVICT and len(arguments) == 1:
        return Command(action, island=arguments[0])
    if action in NEEDS:
        raise UsageError(f"{action.value} needs {NEEDS[action]}")
    if arguments:
        raise UsageError(
            f"{action.value} takes no arguments, and {arguments[0]!r} was given."
        )
    return Command(action)
