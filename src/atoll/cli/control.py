"""`atoll control RUN ACTION`: what an operator may ask of a run.

What an operator says to a run in a store: one document, at the next free number.

Two who speak at the same time ask for the same number. Who is second reads what the
first has said, judges again, and takes the next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from atoll.cli.coordinator_client import Asking
from atoll.cli.run_names import RUN, StoreUrl, place_of
from atoll.cli.store_run import Observing, StatusView
from atoll.errors import Refused, UsageError
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import ControlDocument, packed
from atoll.protocol.events import SettingsChanged
from atoll.protocol.operators import set_values
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


TRIES = 64
"""So many others may speak in between."""


def say(
    observing: Observing, action: str, words: Mapping[str, Any]
) -> tuple[int, ControlDocument]:
    """Put an operator's word where every island reads it; return its number, too.

    Raises:
        UsageError: no island has that name, or a value cannot be set.
        Refused: the run has moved, or too many others speak.
        StoreDenied: writing is not allowed.
    """
    for _ in range(TRIES):
        observing.look()
        _require_here(observing)
        said = _document(observing, action, words)
        number = len(observing.reader.view.controls) + 1
        key = keys.control(number)
        if observing.store.put_new(key, packed(documents.CONTROL, said, key)):
            observing.look()
            _require_heeded(observing, said)
            return number, said
    raise Refused(f"{TRIES} others have spoken meanwhile. Try again.")


def _require_here(observing: Observing) -> None:
    move = observing.reader.view.state.move
    if move is not None:
        raise Refused(
            f"The run {'has moved' if move.is_over else 'is on its way'} to "
            f"{move.target}. Control it there."
        )


def _require_heeded(observing: Observing, said: ControlDocument) -> None:
    """Return if a word is in force: a move may have begun right before it."""
    if said not in observing.reader.view.in_force:
        _require_here(observing)


def _document(
    observing: Observing, action: str, words: Mapping[str, Any]
) -> ControlDocument:
    run = observing.reader.run
    match action:
        case "set":
            values = words["values"]
            set_values(
                observing.reader.view.state, SettingsChanged(values), 0.0
            )  # judged
            return ControlDocument(run=run, action="set", values=values)
        case "stop" | "drain":
            # Who is there can close rounds up to it; nobody's update is left over.
            last = observing.reader.furthest_round()
            return ControlDocument(run=run, action="stop", values={}, last_round=last)
        case "evict":
            return _eviction(observing, words["island"])
    return ControlDocument(run=run, action=action, values={})


def _eviction(observing: Observing, island: str) -> ControlDocument:
    known = observing.reader.view.state.members.known
    member = known.get(island)
    if member is None:
        names = ", ".join(sorted(known)) or "none"
        raise UsageError(f"No island is called {island!r}. Known are: {names}.")
    return ControlDocument(
        run=observing.reader.run,
        action="evict",
        values={},
        island=island,
        incarnation=member.incarnation,
    )
