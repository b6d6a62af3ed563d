"""`atoll control RUN ACTION`: what an operator may ask of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from atoll.cli.asking import Asking
from atoll.cli.names import RUN
from atoll.errors import UsageError
from atoll.security import Role
from atoll.settings import parse_assignment


class Action(StrEnum):
    """What may be asked for."""

    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"
    DRAIN = "drain"
    EVICT = "evict"
    SET = "set"


NEEDS = {
    Action.EVICT: "the name of one island: atoll control RUN evict ISLAND",
    Action.SET: "what to set: atoll control RUN set run.end_rounds=300",
}


def control(
    run: Annotated[str, RUN],
    action: Annotated[Action, typer.Argument(help="What to do.", show_default=False)],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="ISLAND|KEY=VALUE", help="For evict, for set."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the status afterwards.")
    ] = False,
) -> None:
    """Pause, resume, stop or drain a run, evict an island, or set values.

    set makes a new epoch: quorum, patience, limits and the end are in force at once,
    outer.lr and outer.momentum from each fragment's next round on.
    """
    command = _command(action, words or [])
    with Asking.of(run, role=Role.OPERATOR) as asking:
        said = asking.post(f"/control/{action.value}", command)
    if as_json:
        typer.echo(json.dumps(said, indent=2))
    else:
        typer.echo(f"{said['run']}: {said['state']}. {said['why']}".rstrip())


def _command(action: Action, words: Sequence[str]) -> dict[str, Any]:
    if action is Action.SET and words:
        return {"values": dict(map(parse_assignment, words))}
    if action is Action.EVICT and len(words) == 1:
        return {"island": words[0]}
    if action in NEEDS:
        raise UsageError(f"{action.value} needs {NEEDS[action]}")
    if words:
        raise UsageError(
            f"{action.value} takes nothing more, and {words[0]!r} was given."
        )
    return {}
