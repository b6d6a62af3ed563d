"""What an operator says to a run in a store: one document, at the next free number.

Two who speak at the same time ask for the same number. Who is second reads what the
first has said, judges again, and takes the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.cli.bucket.observing import Observing
from atoll.errors import Refused, UsageError
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import ControlDocument, packed
from atoll.protocol.events import SettingsChanged
from atoll.protocol.operators import set_values

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
        number = len(observing.lookout.sight.controls) + 1
        key = keys.control(number)
        if observing.store.put_new(key, packed(documents.CONTROL, said, key)):
            observing.look()
            _require_heeded(observing, said)
            return number, said
    raise Refused(f"{TRIES} others have spoken meanwhile. Try again.")


def _require_here(observing: Observing) -> None:
    move = observing.lookout.sight.state.move
    if move is not None:
        raise Refused(
            f"The run {'has moved' if move.is_over else 'is on its way'} to "
            f"{move.target}. Control it there."
        )


def _require_heeded(observing: Observing, said: ControlDocument) -> None:
    """Return if a word is in force: a move may have begun right before it."""
    if said not in observing.lookout.sight.in_force:
        _require_here(observing)


def _document(
    observing: Observing, action: str, words: Mapping[str, Any]
) -> ControlDocument:
    run = observing.lookout.run
    match action:
        case "set":
            values = words["values"]
            set_values(
                observing.lookout.sight.state, SettingsChanged(values), 0.0
            )  # judged
            return ControlDocument(run=run, action="set", values=values)
        case "stop" | "drain":
            # Who is there can close rounds up to it; nobody's update is left over.
            last = observing.lookout.furthest()
            return ControlDocument(run=run, action="stop", values={}, last_round=last)
        case "evict":
            return _eviction(observing, words["island"])
    return ControlDocument(run=run, action=action, values={})


def _eviction(observing: Observing, island: str) -> ControlDocument:
    known = observing.lookout.sight.state.members.known
    member = known.get(island)
    if member is None:
        names = ", ".join(sorted(known)) or "none"
        raise UsageError(f"No island is called {island!r}. Known are: {names}.")
    return ControlDocument(
        run=observing.lookout.run,
        action="evict",
        values={},
        island=island,
        incarnation=member.incarnation,
    )
