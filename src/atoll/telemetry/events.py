"""What can happen in a run, as data.

Rule 1: names and fields are promises: a field may be added, none is renamed or removed.
Rule 2: a name, a field or a type that is not in `EVENTS` is a mistake of the code that
emits, and is refused. A value that is merely too long or not finite is somebody's
misfortune, and is cut or becomes None: telling of trouble must not make more of it.
Rule 3: no field is meant for a secret, and text that looks like one is blotted out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from atoll.errors import UsageError
from atoll.telemetry.kinds import Kind, Value

RESERVED = ("number", "at", "event")
"""What a line of JSON says besides the fields."""


@dataclass(frozen=True)
class Field:
    """One thing that an event says."""

    kind: Kind
    about: str
    is_optional: bool = False
    """Whether it may be absent, or None."""


@dataclass(frozen=True)
class EventKind:
    """What one name means."""

    about: str
    fields: Mapping[str, Field]


@dataclass(frozen=True)
class Event:
    """Something that happened."""

    number: int
    """Counts up from 1 in the life of a coordinator."""

    at_unix_s: float
    name: str
    fields: Mapping[str, Value]

    def as_dict(self) -> dict[str, Value]:
        """Return plain values, as a line of JSON holds them."""
        head = {"number": self.number, "at": self.at_unix_s}
        return {**head, "event": self.name, **self.fields}


def checked(name: str, fields: Mapping[str, object]) -> Mapping[str, Value]:
    """Return the fields of an event within their bounds, in the order of the table.

    Raises:
        UsageError: name, fields or types are not in `EVENTS`, or a field is absent.
    """
    known = EVENTS.get(name)
    if known is None:
        raise UsageError(f"No event is called {name!r}. Add it to telemetry.EVENTS.")
    if unknown := sorted(set(fields) - set(known.fields)):
        raise UsageError(
            f"Event {name!r} has no field {unknown[0]!r}. It has: "
            f"{', '.join(known.fields) or 'none'}."
        )
    return MappingProxyType(
        {
            key: _value(name, key, field, fields.get(key))
            for key, field in known.fields.items()
            if key in fields or not field.is_optional
        }
    )


def _value(name: str, key: str, field: Field, value: object) -> Value:
    if value is None and field.is_optional:
        return None
    try:
        return field.kind.bounded(value)
    except TypeError as exc:
        raise UsageError(
            f"Event {name!r} wants {field.kind.value} as {key!r}, and got "
            f"{type(value).__name__}."
        ) from exc


ISLAND = Field(Kind.TEXT, "the island's name")
INCARNATION = Field(Kind.WHOLE, "which life of the island")
FRAGMENT = Field(Kind.WHOLE, "the fragment")
ROUND = Field(Kind.WHOLE, "the round")
UPDATE = {"island": ISLAND, "fragment": FRAGMENT, "round": ROUND}
PLACE = {"fragment": FRAGMENT, "round": ROUND}
TARGET = {"target": Field(Kind.TEXT, "its name there")}

EVENTS: Mapping[str, EventKind] = MappingProxyType(
    {
        "run_created": EventKind("The run's directory was made.", {}),
        "run_founded": EventKind(
            "The run got its first weights.",
            {"island": Field(Kind.TEXT, "who brought them; nobody: `serve --init`")},
        ),
        "island_joined": EventKind(
            "An island became a member.",
            {
                "island": ISLAND,
                "incarnation": INCARNATION,
                "version": Field(Kind.TEXT, "of Atoll, at the island"),
            },
        ),
        "island_taken_over": EventKind(
            "An island joined under the name of another, without its key.",
            {"island": ISLAND, "incarnation": INCARNATION},
        ),
        "island_left": EventKind(
            "An island is a member no more.",
            {
                "island": ISLAND,
                "incarnation": INCARNATION,
                "reason": Field(Kind.TEXT, "why it went"),
            },
        ),
        "island_forgotten": EventKind(
            "An island that had gone, and never counted, made room for a new name.",
            {"island": ISLAND},
        ),
        "island_silent": EventKind(
            "An island's lease has run out unrenewed.", {"island": ISLAND}
        ),
        "island_returned": EventKind(
            "A silent island was heard of again.", {"island": ISLAND}
        ),
        "round_opened": EventKind(
            "A round can be published to.",
            PLACE | {"islands": Field(Kind.WHOLE, "how many it waits for")},
        ),
        "round_closing": EventKind(
            "A round takes no more updates.",
            PLACE
            | {
                "staged": Field(Kind.WHOLE, "how many updates it holds"),
                "missing": Field(Kind.NAMES, "the islands it waits for no longer"),
            },
        ),
        "round_committed": EventKind(
            "A round's outcome is durable.",
            PLACE
            | {
                "counted": Field(Kind.WHOLE, "how many updates counted"),
                "late": Field(Kind.WHOLE, "how many islands were late"),
                "refused": Field(Kind.WHOLE, "how many updates were refused"),
                "seconds": Field(Kind.NUMBER, "from its opening to its commit"),
                "bytes": Field(Kind.WHOLE, "of the agreed mean"),
                "digest": Field(Kind.TEXT, "of the new anchor and velocity, in hex"),
                "tokens": Field(Kind.WHOLE, "the run has trained on"),
                "stall_share": Field(
                    Kind.NUMBER, "share of the islands' time spent waiting", True
                ),
            },
        ),
        "update_staged": EventKind(
            "An update came, whole and verified.",
            UPDATE
            | {
                "bytes": Field(Kind.WHOLE, "of its body"),
                "seconds": Field(Kind.NUMBER, "from the round's opening to it"),
            },
        ),
        "update_refused": EventKind(
            "An update does not count, for its content.",
            UPDATE | {"reason": Field(Kind.TEXT, "what is wrong with it")},
        ),
        "update_late": EventKind("An update missed its round.", UPDATE),
        "epoch_set": EventKind(
            "Settings that may change at run time were changed.",
            {
                "epoch": Field(Kind.WHOLE, "the new epoch"),
                "values": Field(Kind.VALUES, "the settings that were set"),
            },
        ),
        "run_paused": EventKind("An operator keeps rounds from closing.", {}),
        "run_resumed": EventKind("An operator lets rounds close again.", {}),
        "run_moving": EventKind("An operator takes the run elsewhere.", TARGET),
        "run_moved": EventKind("The run goes on elsewhere.", TARGET),
        "run_stays": EventKind("The run goes on here after all.", {}),
        "run_stopped": EventKind(
            "An operator ends the run.",
            {"last_round": Field(Kind.WHOLE, "the round it will end with", True)},
        ),
        "run_ended": EventKind("The run is over.", {"round": ROUND}),
        "state_recovered": EventKind(
            "A state that the journal had lost came from an island.", UPDATE
        ),
        "journal_cut": EventKind(
            "The end of the log did not verify when it was opened, and was left out.",
            {
                "file": Field(Kind.TEXT, "the segment"),
                "first_byte": Field(Kind.WHOLE, "where it was cut"),
                "bytes": Field(Kind.WHOLE, "how many were left out"),
            },
        ),
        "journal_damaged": EventKind(
            "Something in the journal did not verify, and the run continues "
            "without it.",
            {"message": Field(Kind.TEXT, "what, where, and what to do")},
        ),
        "holding_refused": EventKind(
            "An island reported a round that it cannot prove the run has committed.",
            UPDATE,
        ),
        "disk_failed": EventKind(
            "Something could not be written, or would have taken the reserve of the "
            "journal's disk.",
            {"message": Field(Kind.TEXT, "what, and what to do")},
        ),
        "fault": EventKind(
            "Something happened that never should: a bug, told in full in the log.",
            {"message": Field(Kind.TEXT, "where, and what")},
        ),
        "audit": EventKind(
            "Somebody was let in or denied.",
            {
                "what": Field(Kind.TEXT, "what was asked for"),
                "answer": Field(Kind.TEXT, "what the caller was told"),
                "address": Field(Kind.TEXT, "the IP address it came from"),
                "at_unix_s": Field(Kind.NUMBER, "when it was asked"),
                "role": Field(Kind.TEXT, "what the caller proved to be"),
                "route": Field(Kind.TEXT, "method and path"),
                "action": Field(Kind.TEXT, "which control it was", True),
                "island": Field(
                    Kind.TEXT, "the member that the caller spoke for", True
                ),
                "untold": Field(
                    Kind.WHOLE, "how many like it were not told before it", True
                ),
            },
        ),
        "loss_reported": EventKind(
            "An island said how its training goes.",
            {
                "island": ISLAND,
                "round": ROUND,
                "inner_steps": Field(Kind.WHOLE, "that the island has made"),
                "tokens": Field(Kind.WHOLE, "that the island has trained on"),
                "loss": Field(Kind.NUMBER, "as the island's loop reported it", True),
                "metrics": Field(Kind.NUMBERS, "what else the loop reported", True),
            },
        ),
        "work_dropped": EventKind(
            "An island missed too many rounds in a row, and dropped its work.",
            {
                "island": ISLAND,
                "steps": Field(Kind.WHOLE, "inner steps that it dropped now"),
                "total_steps": Field(Kind.WHOLE, "inner steps that it dropped so far"),
            },
        ),
        "events_dropped": EventKind(
            "A sink did not get every event.",
            {
                "sink": Field(Kind.TEXT, "which one"),
                "dropped": Field(Kind.WHOLE, "how many it missed so far"),
                "reason": Field(Kind.TEXT, "slow, or what it raised last"),
            },
        ),
    }
)
