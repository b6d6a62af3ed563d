"""Events as data: their names, their fields, and the bounds of values.

Rule 1: names and fields are promises: a field may be added, none is renamed or removed.
Rule 2: a name, a field or a type that is not in `EVENTS` is a mistake of the code that
emits, and is refused. A value that is merely too long or not finite is cut or becomes
None: a report of trouble must not make more of it.
Rule 3: no field is meant for a secret, and text that looks like one is masked.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any

from atoll.errors import UsageError

Plain = str | int | float | bool | None
Value = Plain | Sequence[str] | Mapping[str, Plain]

MAX_TEXT = 500
"""Characters; longer text is cut."""

MAX_NAME = 200
"""Characters of a name in a list or a mapping, so that a thousand events fit."""

MAX_ITEMS = 100
"""Names or numbers in one field; further ones are left out."""

MAX_INTEGER = 2**64 - 1
"""Largest integer of a frame; a larger one becomes None."""

# The shapes of a token, of the code in an invite, and of an HTTP header.
_SECRET = re.compile(r"(atoll_[io]_|\bcode=|\bbearer\s+)[\w.~+/=-]{8,}", re.I | re.A)


class ValueKind(enum.Enum):
    """The type of a field; the values are for error messages and docs."""

    TEXT = "text"
    FLAG = "true or false"
    INTEGER = "a whole number"
    NUMBER = "a number"
    NAMES = "a list of names"
    NUMBERS = "numbers by name"
    VALUES = "values by name"

    def bounded(self, value: object) -> Value:
        """Return `value` as JSON can hold it, cut to the bounds.

        Raises:
            TypeError: it is of another kind.
        """
        return _BOUNDED[self](value)

    def field(self, description: str) -> EventField:
        """Return a field of this type that every event of its name has."""
        return EventField(self, description)

    def optional(self, description: str) -> EventField:
        """Return a field of this type that may be absent, or None."""
        return EventField(self, description, is_optional=True)


def text(value: object, max_chars: int = MAX_TEXT) -> str:
    """Return text cut to its bound, with anything like a secret masked."""
    if not isinstance(value, str):
        raise TypeError
    # A lone surrogate is not UTF-8, and a sink could not write it.
    clean = value[: 4 * MAX_TEXT].encode(errors="replace").decode()
    clean = _SECRET.sub(r"\1[secret]", clean)
    return clean if len(clean) <= max_chars else clean[: max_chars - 1] + "…"


def flag(value: object) -> bool:
    """Return a truth value."""
    if not isinstance(value, bool):
        raise TypeError
    return value


def whole(value: object) -> int | None:
    """Return a whole number that is not negative; None beyond 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value if 0 <= value <= MAX_INTEGER else None


def number(value: object) -> float | int | None:
    """Return a finite number; None for one that is not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    if isinstance(value, int):
        return value if abs(value) <= MAX_INTEGER else None
    return float(value) if math.isfinite(value) else None


def names(value: object) -> tuple[str, ...]:
    """Return a few names."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError
    return tuple(text(item, MAX_NAME) for item in value[:MAX_ITEMS])


def numbers(value: object) -> dict[str, Plain]:
    """Return a few numbers by name."""
    return {key: number(item) for key, item in _items(value)}


def values(value: object) -> dict[str, Plain]:
    """Return a few plain values by name."""
    return {key: _plain(item) for key, item in _items(value)}


def _plain(value: object) -> Plain:
    if value is None or isinstance(value, bool):
        return value
    return text(value) if isinstance(value, str) else number(value)


def _items(value: object) -> list[tuple[str, object]]:
    if not isinstance(value, Mapping):
        raise TypeError
    return [
        (text(key, MAX_NAME), item) for key, item in islice(value.items(), MAX_ITEMS)
    ]


_BOUNDED: dict[ValueKind, Callable[[object], Value]] = {
    ValueKind.TEXT: text,
    ValueKind.FLAG: flag,
    ValueKind.INTEGER: whole,
    ValueKind.NUMBER: number,
    ValueKind.NAMES: names,
    ValueKind.NUMBERS: numbers,
    ValueKind.VALUES: values,
}


RESERVED = ("number", "at", "process", "event")
"""Keys of a line of JSON besides the fields."""


@dataclass(frozen=True)
class EventField:
    """One field of an event."""

    kind: ValueKind
    description: str
    is_optional: bool = False
    """Whether it may be absent, or None."""


@dataclass(frozen=True)
class EventKind:
    """The meaning and the fields of one event name."""

    description: str
    fields: Mapping[str, EventField]


@dataclass(frozen=True)
class Event:
    """One event."""

    number: int
    """Counts up from 1 in each coordinator process."""

    at_unix_s: float
    name: str
    fields: Mapping[str, Value]
    process: str = ""
    """The process of the coordinator that emitted it; empty: unknown."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Event:
        """Return the event of a line of JSON, which may be of another version.

        Raises:
            ValueError: it is no event.
        """
        fields = dict(row)
        number, at_unix_s = fields.pop("number", None), fields.pop("at", None)
        name, process = fields.pop("event", None), fields.pop("process", "")
        if (
            type(number) is not int
            or type(at_unix_s) not in (int, float)
            or not isinstance(name, str)
            or not isinstance(process, str)
        ):
            raise ValueError("an event has a number, a time and a name")
        return cls(number, float(at_unix_s), name, fields, process)

    def as_dict(self) -> dict[str, Value]:
        """Return plain values, as a line of JSON holds them."""
        head: dict[str, Value] = {"number": self.number, "at": self.at_unix_s}
        if self.process:
            head["process"] = self.process
        return {**head, "event": self.name, **self.fields}


class EventReader:
    """Reads the values of an event; None where one is missing or of another type."""

    def __init__(self, event: Event) -> None:
        self.fields, self.at_unix_s = event.fields, event.at_unix_s

    def text(self, key: str) -> str | None:
        value = self.fields.get(key)
        return value[:MAX_TEXT] if isinstance(value, str) else None

    def whole(self, key: str) -> int | None:
        value = self.fields.get(key)
        return value if type(value) is int else None

    def number(self, key: str) -> float | None:
        return _finite(self.fields.get(key))

    def numbers(self, key: str) -> dict[str, float]:
        value = self.fields.get(key)
        pairs = value.items() if isinstance(value, Mapping) else ()
        numbers = {str(name): _finite(item) for name, item in pairs}
        return {name: item for name, item in numbers.items() if item is not None}


def _finite(value: object) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def checked(name: str, fields: Mapping[str, object]) -> Mapping[str, Value]:
    """Return the fields of an event within their bounds, in the order of the table.

    Raises:
        UsageError: name, fields or types are not in `EVENTS`, or a field is absent.
    """
    kind = EVENTS.get(name)
    if kind is None:
        raise UsageError(f"No event is called {name!r}. Add it to telemetry.EVENTS.")
    if unknown := sorted(set(fields) - set(kind.fields)):
        raise UsageError(
            f"Event {name!r} has no field {unknown[0]!r}. It has: "
            f"{', '.join(kind.fields) or 'none'}."
        )
    return MappingProxyType(
        {
            key: _value(name, key, field, fields.get(key))
            for key, field in kind.fields.items()
            if key in fields or not field.is_optional
        }
    )


def _value(name: str, key: str, field: EventField, value: object) -> Value:
    if value is None and field.is_optional:
        return None
    try:
        return field.kind.bounded(value)
    except TypeError as exc:
        raise UsageError(
            f"Event {name!r} wants {field.kind.value} as {key!r}, and got "
            f"{type(value).__name__}."
        ) from exc


ISLAND = ValueKind.TEXT.field("the island's name")
INCARNATION = ValueKind.INTEGER.field("the island's incarnation")
FRAGMENT = ValueKind.INTEGER.field("the fragment")
ROUND = ValueKind.INTEGER.field("the round")
UPDATE = {"island": ISLAND, "fragment": FRAGMENT, "round": ROUND}
FRAGMENT_ROUND = {"fragment": FRAGMENT, "round": ROUND}
TARGET = {"target": ValueKind.TEXT.field("its new address")}

EVENTS: Mapping[str, EventKind] = MappingProxyType(
    {
        "run_created": EventKind("The run's directory was created.", {}),
        "run_founded": EventKind(
            "The run got its first weights.",
            {
                "island": ValueKind.TEXT.field("the founder; empty: `serve --init`"),
                "fragments": ValueKind.INTEGER.optional("number of fragments"),
            },
        ),
        "coordinator_started": EventKind(
            "A process of the coordinator began to serve the run.",
            {
                "round": ROUND,
                "fragments": ValueKind.INTEGER.field(
                    "number of fragments; 0: it has no weights yet"
                ),
                "was_clean": ValueKind.FLAG.field(
                    "whether the process before it has ended in an orderly way"
                ),
                "version": ValueKind.TEXT.field("its version of Atoll"),
            },
        ),
        "coordinator_stopped": EventKind(
            "The process of the coordinator ended in an orderly way.", {"round": ROUND}
        ),
        "island_joined": EventKind(
            "An island became a member.",
            {
                "island": ISLAND,
                "incarnation": INCARNATION,
                "version": ValueKind.TEXT.field("the island's version of Atoll"),
                "slot": ValueKind.INTEGER.optional(
                    "its slot: the place of its mark in `round_committed`"
                ),
            },
        ),
        "island_taken_over": EventKind(
            "An island joined under the name of another, without its key.",
            {"island": ISLAND, "incarnation": INCARNATION},
        ),
        "island_left": EventKind(
            "An island is no longer a member.",
            {
                "island": ISLAND,
                "incarnation": INCARNATION,
                "reason": ValueKind.TEXT.field("the reason"),
            },
        ),
        "island_forgotten": EventKind(
            "An island that left and never counted was removed for a new name.",
            {"island": ISLAND},
        ),
        "island_silent": EventKind(
            "An island's lease has expired.", {"island": ISLAND}
        ),
        "island_returned": EventKind(
            "A silent island sent a heartbeat or a call again.", {"island": ISLAND}
        ),
        "island_paced": EventKind(
            "The inner steps per window of an island have changed.",
            {
                "island": ISLAND,
                "window": EventField(
                    ValueKind.INTEGER, "its inner steps per window from now on"
                ),
                "step_s": EventField(
                    ValueKind.NUMBER, "its pace: seconds of an inner step", True
                ),
            },
        ),
        "data_opened": EventKind(
            "An island has described the data of a run that deals out rows.",
            {
                "rows": ValueKind.INTEGER.optional("its length"),
                "fingerprint": ValueKind.TEXT.field("of its content; empty: unknown"),
            },
        ),
        "rows_claimed": EventKind(
            "An island has got rows.",
            {
                "island": ISLAND,
                "claim": ValueKind.INTEGER.field("the number of its claim"),
                "rows": ValueKind.INTEGER.field("number of rows that it got"),
            },
        ),
        "rows_released": EventKind(
            "Rows of an island that has gone are free.",
            {
                "island": ISLAND,
                "rows": ValueKind.INTEGER.field("number of rows"),
            },
        ),
        "round_opened": EventKind(
            "A round accepts updates.",
            FRAGMENT_ROUND
            | {"islands": ValueKind.INTEGER.field("number of islands it waits for")},
        ),
        "round_closing": EventKind(
            "A round accepts no further updates.",
            FRAGMENT_ROUND
            | {
                "staged": ValueKind.INTEGER.field("number of updates it has"),
                "missing": ValueKind.NAMES.field("islands it no longer waits for"),
            },
        ),
        "round_committed": EventKind(
            "A round's outcome is durable.",
            FRAGMENT_ROUND
            | {
                "counted": ValueKind.INTEGER.field("number of updates that counted"),
                "late": ValueKind.INTEGER.field("number of islands that were late"),
                "refused": ValueKind.INTEGER.field("number of refused updates"),
                "seconds": ValueKind.NUMBER.field(
                    "time from its opening to its commit"
                ),
                "bytes": ValueKind.INTEGER.field("size of the agreed mean"),
                "digest": ValueKind.TEXT.field("digest of the new state, in hex"),
                "tokens": ValueKind.INTEGER.field("tokens that the run has trained on"),
                "stall_share_mean": ValueKind.NUMBER.optional(
                    "share of all islands' time that they waited"
                ),
                "marks": ValueKind.TEXT.optional(
                    "one character per slot: `#` counted, `~` late, `!` refused, "
                    "`.` absent"
                ),
                "late_names": ValueKind.NAMES.optional("islands that were late"),
                "refused_names": ValueKind.NAMES.optional(
                    "islands whose updates were refused"
                ),
            },
        ),
        "update_staged": EventKind(
            "An update arrived complete and was verified.",
            UPDATE
            | {
                "bytes": ValueKind.INTEGER.field("size of its body"),
                "seconds": ValueKind.NUMBER.field("time since the round's opening"),
                "norm": ValueKind.NUMBER.optional("norm of its pseudo-gradient"),
            },
        ),
        "update_refused": EventKind(
            "An update does not count because of its content.",
            UPDATE | {"reason": ValueKind.TEXT.field("the reason")},
        ),
        "update_late": EventKind("An update missed its round.", UPDATE),
        "epoch_set": EventKind(
            "Settings that may change at run time were changed.",
            {
                "epoch": ValueKind.INTEGER.field("the new epoch"),
                "values": ValueKind.VALUES.field("the changed settings"),
            },
        ),
        "run_paused": EventKind("An operator paused the closing of rounds.", {}),
        "run_resumed": EventKind("An operator resumed the closing of rounds.", {}),
        "run_moving": EventKind("An operator started to move the run.", TARGET),
        "run_moved": EventKind("The run continues at another address.", TARGET),
        "run_stays": EventKind("The move was cancelled; the run continues here.", {}),
        "run_stopped": EventKind(
            "An operator stopped the run.",
            {"last_round": ValueKind.INTEGER.optional("the last round")},
        ),
        "run_ended": EventKind("The run has ended.", {"round": ROUND}),
        "state_recovered": EventKind(
            "An island restored a state that the journal had lost.", UPDATE
        ),
        "journal_cut": EventKind(
            "The end of the log did not verify when it was opened, and was cut off.",
            {
                "file": ValueKind.TEXT.field("the segment"),
                "first_byte": ValueKind.INTEGER.field("offset of the cut"),
                "bytes": ValueKind.INTEGER.field("number of bytes that were cut off"),
            },
        ),
        "journal_damaged": EventKind(
            "A part of the journal did not verify, and the run continues without it.",
            {
                "message": ValueKind.TEXT.field(
                    "the damage, its location and the remedy"
                )
            },
        ),
        "holding_refused": EventKind(
            "An island reported a round that it cannot prove the run has committed.",
            UPDATE,
        ),
        "finding_began": EventKind(
            "Something is wrong that was not before: see the findings.",
            {
                "severity": ValueKind.TEXT.field("bad, warn or note"),
                "kind": ValueKind.TEXT.field("the kind of finding"),
                "message": ValueKind.TEXT.field("one sentence with the values"),
                "remedy": ValueKind.TEXT.field("what to do"),
                "command": ValueKind.TEXT.optional("the command of the remedy"),
                "island": ValueKind.TEXT.optional("the island"),
            },
        ),
        "finding_ended": EventKind(
            "A finding is over.",
            {
                "kind": ValueKind.TEXT.field("the kind of finding"),
                "island": ValueKind.TEXT.optional("the island"),
            },
        ),
        "disk_failed": EventKind(
            "A write failed, or would have used the disk reserve of the journal.",
            {"message": ValueKind.TEXT.field("the error and the remedy")},
        ),
        "fault": EventKind(
            "An unexpected error, which is a bug; the log has the traceback.",
            {"message": ValueKind.TEXT.field("location and error")},
        ),
        "audit": EventKind(
            "A request was allowed or denied.",
            {
                "what": ValueKind.TEXT.field("the kind of request"),
                "answer": ValueKind.TEXT.field("the answer"),
                "address": ValueKind.TEXT.field("the caller's IP address"),
                "at_unix_s": ValueKind.NUMBER.field("the time of the request"),
                "role": ValueKind.TEXT.field("the caller's verified role"),
                "route": ValueKind.TEXT.field("method and path"),
                "action": ValueKind.TEXT.optional("the control action"),
                "island": ValueKind.TEXT.optional(
                    "the island that the caller claimed to be"
                ),
                "untold": ValueKind.INTEGER.optional(
                    "number of similar requests before it without an event"
                ),
            },
        ),
        "loss_reported": EventKind(
            "An island reported its training progress.",
            {
                "island": ISLAND,
                "round": ROUND,
                "inner_steps": ValueKind.INTEGER.field("inner steps of the island"),
                "tokens": ValueKind.INTEGER.field("tokens of the island"),
                "loss": ValueKind.NUMBER.optional("the reported loss"),
                "metrics": ValueKind.NUMBERS.optional("other reported metrics"),
                "loss_is_finite": ValueKind.FLAG.optional(
                    "false if the loss is not a number, or infinite"
                ),
                "seconds": ValueKind.NUMBER.optional("time since its join"),
                "wait_s": ValueKind.NUMBER.optional("time of it that training waited"),
                "version": ValueKind.TEXT.optional(
                    "its version of Atoll, the first time in a process"
                ),
                "bytes_up": ValueKind.INTEGER.optional("bytes it has sent"),
                "bytes_down": ValueKind.INTEGER.optional("bytes it has received"),
                "carried": ValueKind.INTEGER.optional(
                    "its updates that were carried into the next round; absent: none"
                ),
                "dropped": ValueKind.INTEGER.optional(
                    "its updates that were dropped; absent: none"
                ),
                "exchange_s": ValueKind.NUMBER.optional(
                    "time from seal to outcome, of the last exchange of each fragment"
                ),
                "hidden_s": ValueKind.NUMBER.optional(
                    "the part of it in which it trained"
                ),
                "up_bytes_per_s": ValueKind.NUMBER.optional(
                    "rate of its uploads; absent: as before"
                ),
                "down_bytes_per_s": ValueKind.NUMBER.optional(
                    "rate of its downloads; absent: as before"
                ),
                "rtt_s": ValueKind.NUMBER.optional(
                    "round trip to the run; absent: as before"
                ),
                "machine": ValueKind.TEXT.optional(
                    "its devices and framework; absent: as before"
                ),
            },
        ),
        "anchor_measured": EventKind(
            "An island has evaluated the anchor: what it reported in `evaluating()`.",
            {
                "island": ISLAND,
                "round": ValueKind.INTEGER.field("the round of the anchor"),
                "metrics": ValueKind.NUMBERS.field("its metrics"),
            },
        ),
        "work_dropped": EventKind(
            "An island missed too many rounds in a row, and dropped its work.",
            {
                "island": ISLAND,
                "steps": ValueKind.INTEGER.field("inner steps dropped now"),
                "total_steps": ValueKind.INTEGER.field("inner steps dropped so far"),
            },
        ),
        "events_dropped": EventKind(
            "A sink missed events.",
            {
                "sink": ValueKind.TEXT.field("the name of the sink"),
                "dropped": ValueKind.INTEGER.field("number of missed events so far"),
                "reason": ValueKind.TEXT.field("slow, or its last error"),
            },
        ),
    }
)
