"""`atoll control RUN ACTION`: change a run at its coordinator or in its store.

In a store a command is a control document at the next free number. If two operators
write at the same time, one of them gets the number; the other reads that document,
checks its command again, and tries the next number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from atoll.cli.coordinator_client import CoordinatorClient
from atoll.cli.run_names import RUN, StoreUrl, locate_run
from atoll.cli.store_run import StatusView, StoreObserver
from atoll.errors import Refused, UsageError
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import ControlDocument, packed
from atoll.protocol.events import SettingsChanged
from atoll.protocol.operators import set_values
from atoll.security import Role, RunUrl
from atoll.settings import parse_assignment


class Action(StrEnum):
    """An action of an operator."""

    PAUSE = "pause"
    RESUME = "resume"
    SAVE = "save"
    STOP = "stop"
    DRAIN = "drain"
    EVICT = "evict"
    SET = "set"


APPLIED = "Islands read it with their next heartbeat."

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
    parameters = _parameters(action, arguments or [])
    location = locate_run(run)
    if isinstance(location, StoreUrl):
        reply = _write_to_store(location, action, parameters)
    else:
        reply = _call_coordinator(location, action, parameters)
    if as_json:
        typer.echo(json.dumps(reply, indent=2))
    elif isinstance(location, StoreUrl):
        typer.echo(f"{reply['run']}: {reply['said']}")
    else:
        typer.echo(f"{reply['run']}: {reply['state']}. {reply['why']}".rstrip())


def _call_coordinator(url: RunUrl, action: Action, parameters: dict[str, Any]) -> Any:
    with CoordinatorClient.of(url, role=Role.OPERATOR) as client:
        return client.post(f"/control/{action.value}", parameters)


def _write_to_store(
    location: StoreUrl, action: Action, parameters: dict[str, Any]
) -> dict[str, Any]:
    with StoreObserver(location.url) as observer:
        number, document = write_control(observer, action.value, parameters)
        text = f"{document.action} is control/{number}. {APPLIED}"
        if document.last_round is not None:
            text = f"{text} Round {document.last_round} is the last."
        return StatusView(observer).document() | {"said": text}


def _parameters(action: Action, arguments: Sequence[str]) -> dict[str, Any]:
    if action is Action.SET and arguments:
        return {"values": dict(map(parse_assignment, arguments))}
    if action is Action.EVICT and len(arguments) == 1:
        return {"island": arguments[0]}
    if action in NEEDS:
        raise UsageError(f"{action.value} needs {NEEDS[action]}")
    if arguments:
        raise UsageError(
            f"{action.value} takes no arguments, and {arguments[0]!r} was given."
        )
    return {}


TRIES = 64
"""Attempts to get a number that no other operator takes."""


def write_control(
    observer: StoreObserver, action: str, parameters: Mapping[str, Any]
) -> tuple[int, ControlDocument]:
    """Write an operator's command as a control document; return it with its number.

    Raises:
        UsageError: no island has that name, or a value cannot be set.
        Refused: the run has moved, or other operators took every number tried.
        StoreDenied: writing is not allowed.
    """
    for _ in range(TRIES):
        observer.look()
        _require_here(observer)
        document = _document(observer, action, parameters)
        number = len(observer.reader.view.controls) + 1
        key = keys.control(number)
        if observer.store.put_new(key, packed(documents.CONTROL, document, key)):
            observer.look()
            _require_in_force(observer, document)
            return number, document
    raise Refused(f"{TRIES} other commands were written meanwhile. Try again.")


def _require_here(observer: StoreObserver) -> None:
    move = observer.reader.view.state.move
    if move is not None:
        raise Refused(
            f"The run {'has moved' if move.is_over else 'is moving'} to "
            f"{move.target}. Control it there."
        )


def _require_in_force(observer: StoreObserver, document: ControlDocument) -> None:
    """Raise if a document has no effect because a move began right before it."""
    if document not in observer.reader.view.in_force:
        _require_here(observer)


def _document(
    observer: StoreObserver, action: str, parameters: Mapping[str, Any]
) -> ControlDocument:
    run = observer.reader.run
    match action:
        case "set":
            values = parameters["values"]
            set_values(
                observer.reader.view.state, SettingsChanged(values), 0.0
            )  # raises if a value cannot be set
            return ControlDocument(run=run, action="set", values=values)
        case "stop" | "drain":
            # Live islands can close rounds up to this one, so no update is left over.
            last = observer.reader.furthest_round()
            return ControlDocument(run=run, action="stop", values={}, last_round=last)
        case "evict":
            return _eviction(observer, parameters["island"])
    return ControlDocument(run=run, action=action, values={})


def _eviction(observer: StoreObserver, island: str) -> ControlDocument:
    members = observer.reader.view.state.members.known
    member = members.get(island)
    if member is None:
        names = ", ".join(sorted(members)) or "none"
        raise UsageError(f"No island is called {island!r}. Known are: {names}.")
    return ControlDocument(
        run=observer.reader.run,
        action="evict",
        values={},
        island=island,
        incarnation=member.incarnation,
    )
