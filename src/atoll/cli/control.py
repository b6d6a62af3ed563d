"""`atoll control RUN ACTION`: what an operator may ask of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from atoll.cli.asking import Asking
from atoll.cli.names import RUN, StoreUrl, place_of
from atoll.errors import UsageError
from atoll.security import Role, RunUrl
from atoll.settings import parse_assignment


class Action(StrEnum):
    """What may be asked for."""

    PAUSE = "pause"
    RESUME = "resume"
    SAVE = "save"
    STOP = "stop"
    DRAIN = "drain"
    EVICT = "evict"
    SET = "set"


TAKEN = "Islands take it with their next heartbeat."

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
    """Control a run: pause, resume, save, stop, drain, evict, set.

    evict removes one island from the run.
    save has every island save a checkpoint of its own with its next heartbeat, and run
    what its program has given to on_save.
    set makes a new epoch: quorum, patience, limits and the end are in force at once,
    outer.lr and outer.momentum from each fragment's next round on. In a store islands
    read it with their next heartbeat, and who may write there is an operator.
    """
    command = _command(action, words or [])
    place = place_of(run)
    if isinstance(place, StoreUrl):
        said = _in_store(place, action, command)
    else:
        said = _by_asking(place, action, command)
    if as_json:
        typer.echo(json.dumps(said, indent=2))
    elif isinstance(place, StoreUrl):
        typer.echo(f"{said['run']}: {said['said']}")
    else:
        typer.echo(f"{said['run']}: {said['state']}. {said['why']}".rstrip())


def _by_asking(url: RunUrl, action: Action, command: dict[str, Any]) -> Any:
    with Asking.of(url, role=Role.OPERATOR) as asking:
        return asking.post(f"/control/{action.value}", command)


def _in_store(
    place: StoreUrl, action: Action, command: dict[str, Any]
) -> dict[str, Any]:
    from atoll.cli.bucket.control import say
    from atoll.cli.bucket.observing import Observing
    from atoll.cli.bucket.status import StatusView

    with Observing(place.url) as observing:
        number, document = say(observing, action.value, command)
        text = f"{document.action} is control/{number}. {TAKEN}"
        if document.last_round is not None:
            text = f"{text} Round {document.last_round} is the last."
        return StatusView(observing).document() | {"said": text}


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
