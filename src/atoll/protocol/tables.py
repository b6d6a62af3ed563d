"""The decisions of the machines as tables: the first row that fits is the answer.

Rule 1: a table answers every combination of its columns' values.
Rule 2: no row is idle: each one is the first that fits something.
Rule 3: the machines follow the tables. Tests put every combination to the real
        machine, and docs/protocol.md is rendered from here.

The machines' states are frozen; `changed` makes the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, TypeVar

ANY = "any"


@dataclass(frozen=True)
class DecisionRow:
    """One line of a table."""

    when: tuple[str, ...]
    """For each column a value, several joined by " or ", or `ANY`."""

    then: str
    reason: str

    def fits(self, values: tuple[str, ...]) -> bool:
        return all(
            cell == ANY or value in cell.split(" or ")
            for cell, value in zip(self.when, values, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class DecisionTable:
    """A decision: columns with all their values, and rows read from the top."""

    title: str
    columns: Mapping[str, tuple[str, ...]]
    answer: str
    rows: tuple[DecisionRow, ...]

    def combinations(self) -> Iterator[tuple[str, ...]]:
        """Yield every combination of the columns' values."""
        return product(*self.columns.values())

    def row(self, values: tuple[str, ...]) -> DecisionRow:
        """Return the row that decides.

        Raises:
            LookupError: no row fits.
        """
        for row in self.rows:
            if row.fits(values):
                return row
        raise LookupError(f"No row of {self.title!r} fits {values}.")

    def __getitem__(self, values: tuple[str, ...]) -> str:
        return self._answers[values]

    @cached_property
    def _answers(self) -> Mapping[tuple[str, ...], str]:
        return {values: self.row(values).then for values in self.combinations()}


YES_NO = ("yes", "no")

TRANSITIONS = DecisionTable(
    title="Phase transitions",
    columns={
        "phase": ("waiting", "open", "closing", "ended"),
        "event": ("Committed", "Recovered", "another"),
        "started": YES_NO,
        "paused": YES_NO,
        "quorum": YES_NO,
        "missing": ("none", "late", "in time"),
        "known": ("all", "some not heard", "rounds lost"),
        "last": YES_NO,
    },
    answer="next phase",
    rows=(
        DecisionRow(
            (ANY, "Recovered", ANY, ANY, ANY, ANY, ANY, "yes"),
            "ended",
            "An island has uploaded the state after the last round.",
        ),
        DecisionRow(
            (ANY, "Recovered", ANY, ANY, ANY, ANY, ANY, "no"),
            "open",
            "The round after the state that an island has uploaded.",
        ),
        DecisionRow(
            ("waiting or open or ended", "Committed", ANY, ANY, ANY, ANY, ANY, ANY),
            "impossible",
            "The host reports this only for a round that it had to close.",
        ),
        DecisionRow(
            ("waiting", ANY, "no", ANY, ANY, ANY, ANY, ANY),
            "waiting",
            "The first round waits for `start_islands`.",
        ),
        DecisionRow(
            ("waiting", ANY, "yes", "no", "yes", "none", "all", ANY),
            "closing",
            "The early islands have published: the round opens and closes immediately.",
        ),
        DecisionRow(
            ("waiting", ANY, "yes", "no", "no", "none", "all", "yes"),
            "closing",
            "The last round: no island is left that could make up the quorum.",
        ),
        DecisionRow(
            ("waiting", ANY, "yes", ANY, ANY, ANY, ANY, ANY),
            "open",
            "Deadlines count from this moment, for the islands that are live now.",
        ),
        DecisionRow(
            ("open", ANY, ANY, "no", "yes", "none or late", "all", ANY),
            "closing",
            "There is no island worth waiting for. The staged set is frozen.",
        ),
        DecisionRow(
            ("open", ANY, ANY, "no", "no", "none", "all", "yes"),
            "closing",
            "The last round: no island is left that could make up the quorum.",
        ),
        DecisionRow(
            ("open", ANY, ANY, ANY, ANY, ANY, "some not heard or rounds lost", ANY),
            "open",
            "After a restart: islands may have an outcome that the journal lost.",
        ),
        DecisionRow(
            ("open", ANY, ANY, ANY, ANY, ANY, ANY, ANY),
            "open",
            "Below the quorum, or paused, or an update may still arrive in time.",
        ),
        DecisionRow(
            ("closing", "Committed", ANY, ANY, ANY, ANY, ANY, "yes"),
            "ended",
            "No fragment opens a round beyond the last.",
        ),
        DecisionRow(
            ("closing", "Committed", ANY, ANY, ANY, ANY, ANY, "no"),
            "open",
            "The next round, whose number is one higher, for the live islands.",
        ),
        DecisionRow(
            ("closing", ANY, ANY, ANY, ANY, ANY, ANY, ANY),
            "closing",
            "Only a durable record ends it, however long the disk takes.",
        ),
        DecisionRow(
            ("ended", ANY, ANY, ANY, ANY, ANY, ANY, ANY),
            "ended",
            "An ended fragment never reopens.",
        ),
    ),
)

RECEPTION = DecisionTable(
    title="Reception of an update",
    columns={
        "its round": (
            "over",
            "not listed yet",
            "the open one",
            "the next",
            "a later one",
        ),
        "phase": ("waiting", "open", "closing", "ended"),
        "kind": ("update", "departing"),
        "standing": ("nothing", "the same", "another", "an earlier incarnation's"),
        "its island": ("in step", "not heard yet", "ahead of the run"),
    },
    answer="answer",
    rows=(
        DecisionRow(
            ("over", ANY, ANY, ANY, ANY),
            "committed",
            "The outcome lists the counted updates; a repeat changes nothing.",
        ),
        DecisionRow(
            (ANY, "ended", ANY, ANY, ANY),
            "committed",
            "No round opens after the last: no update is wanted.",
        ),
        DecisionRow(
            ("the open one", "closing", ANY, ANY, ANY),
            "closing",
            "The staged set is frozen: the outcome tells whether the update is in it.",
        ),
        DecisionRow(
            ("not listed yet", "closing", "departing", "another", ANY),
            "closing",
            "One update of its island waits for the next round already.",
        ),
        DecisionRow(
            ("not listed yet", ANY, "update", "another", ANY),
            "spoken for",
            "One update per island and roster: this one counts in the next.",
        ),
        DecisionRow(
            ("the next", ANY, "update", ANY, "in step"),
            "refused",
            "Its base is not known before the open round is committed.",
        ),
        DecisionRow(
            ("a later one", ANY, ANY, ANY, "in step"),
            "refused",
            "No island can have sealed for it.",
        ),
        DecisionRow(
            ("the next", ANY, "update", ANY, ANY),
            "early",
            "The run may have lost rounds: it will request a state first.",
        ),
        DecisionRow(
            ("the next", ANY, "departing", ANY, "ahead of the run"),
            "early",
            "An island that leaves uploads the lost state first.",
        ),
        DecisionRow(
            ("a later one", ANY, ANY, ANY, ANY),
            "early",
            "As above, departing or not.",
        ),
        DecisionRow(
            (ANY, ANY, ANY, "nothing", ANY), "wanted", "The island may send the body."
        ),
        DecisionRow(
            (ANY, ANY, ANY, "the same", ANY),
            "staged",
            "A repeat is the same request.",
        ),
        DecisionRow(
            (ANY, ANY, ANY, "an earlier incarnation's", ANY),
            "spoken for",
            "The earlier update stays valid; the outcome tells the later incarnation.",
        ),
        DecisionRow(
            (ANY, ANY, ANY, "another", ANY),
            "refused",
            "One update per island and round: the first staged one stays valid.",
        ),
    ),
)

JOINING = DecisionTable(
    title="Joining by name",
    columns={
        "name": ("none", "unknown", "live", "silent", "left"),
        "key": ("the same", "another"),
        "nonce": ("the same", "another"),
        "incarnation": ("new", "new, unaware", "later than known", "not later"),
        "room": YES_NO,
    },
    answer="answer",
    rows=(
        DecisionRow(
            ("none or live or silent or left", "the same", "the same", ANY, ANY),
            "same incarnation",
            "The reply was lost, and the island retries.",
        ),
        DecisionRow(
            ("live or silent or left", ANY, ANY, "not later", ANY),
            "LeaseLost",
            "The incarnation that wants to continue has a successor.",
        ),
        DecisionRow(
            ("live", "another", ANY, ANY, ANY),
            "refused: taken",
            "The name belongs to the holder of the key, until its lease expires.",
        ),
        DecisionRow(
            (ANY, ANY, ANY, ANY, "no"),
            "refused: full",
            "`max_islands` other islands are live.",
        ),
        DecisionRow(
            (ANY, ANY, ANY, "later than known or not later", ANY),
            "continues",
            "The run has lost the record of this incarnation, and adds it again.",
        ),
        DecisionRow(
            ("none or unknown", ANY, ANY, ANY, ANY),
            "first incarnation",
            "An island without a name gets the first free one.",
        ),
        DecisionRow(
            (ANY, ANY, ANY, "new, unaware", ANY),
            "NameKnown",
            "It does not know the latest incarnation; a dead one's join ends here.",
        ),
        DecisionRow(
            (ANY, ANY, ANY, ANY, ANY),
            "next incarnation",
            "A restart with the key is immediate; a name without a lease is free.",
        ),
    ),
)

FOUNDING = DecisionTable(
    title="Choosing the founder",
    columns={
        "the run's model": ("none", "the same", "another"),
        "being founded by": ("no island", "this island", "another", "a silent island"),
    },
    answer="answer",
    rows=(
        DecisionRow(
            ("the same", ANY),
            "joins",
            "The run has its weights: the island takes them.",
        ),
        DecisionRow(
            ("another", ANY),
            "ModelError",
            "Names, shapes, dtypes and order are compared before anything else.",
        ),
        DecisionRow(
            ("none", "another"),
            "Unreachable",
            "Only one island's weights are used: this island retries.",
        ),
        DecisionRow(
            ("none", ANY),
            "founds",
            "A silent founder is replaced; a repeat is the same founder.",
        ),
    ),
)

WORK = DecisionTable(
    title="Effect of an outcome on work",
    columns={
        "verdict": ("counted", "late", "refused"),
        "missed before": ("0", "1", "2"),
        "passed since": ("0", "1", "2", "3"),
        "updates": ("in step", "stand"),
    },
    answer="the island's work is",
    rows=(
        DecisionRow(
            ("refused", ANY, ANY, ANY),
            "refuse",
            "Refused work must not come back: anchor taken, residual cleared.",
        ),
        DecisionRow(
            ("counted", ANY, "0", ANY),
            "adopt",
            "The update is in the mean: rebase or mix, by the settings.",
        ),
        DecisionRow(
            ("counted", ANY, ANY, "stand"),
            "rebase",
            "Any number of rounds may pass: the work since the seal is kept.",
        ),
        DecisionRow(
            ("late", ANY, ANY, "stand"),
            "carry",
            "Only an earlier incarnation's update was awaited: nothing was sent.",
        ),
        DecisionRow(
            ("counted", ANY, "1 or 2", ANY),
            "rebase",
            "It counted, and later rounds passed: the work since the seal is kept.",
        ),
        DecisionRow(
            ("late", "0", "0 or 1", ANY),
            "carry",
            "Contributed once, in the next round; the old residual is restored.",
        ),
        DecisionRow(
            ("late", "1", "0", ANY), "carry", "At most two rounds in succession."
        ),
        DecisionRow(
            (ANY, ANY, ANY, ANY),
            "drop",
            "Beyond two rounds: anchor taken, loss reported; the residual stays.",
        ),
    ),
)

REJOINING = DecisionTable(
    title="Uncounted part of saved work",
    columns={
        "counted since the saved base": ("nothing", "the saved update", "another"),
        "the saved update was": ("refused", "not refused"),
        "the saved base is": ("known", "unknown"),
    },
    answer="left",
    rows=(
        DecisionRow(
            (ANY, ANY, "unknown"),
            "lost",
            "The run has another history: the counted part is unknown.",
        ),
        DecisionRow(
            ("another", ANY, ANY),
            "nothing",
            "That update was later and contained all of it: it is in the anchor.",
        ),
        DecisionRow(
            ("the saved update", ANY, ANY),
            "what came since its seal",
            "As if the outcome had come before the island died.",
        ),
        DecisionRow(
            ("nothing", "refused", ANY),
            "nothing",
            "Refused work must not come back.",
        ),
        DecisionRow(
            ("nothing", ANY, ANY),
            "all of it",
            "Added to the current anchor, to be contributed once.",
        ),
    ),
)

TABLES = (TRANSITIONS, RECEPTION, JOINING, FOUNDING, WORK, REJOINING)


T = TypeVar("T")


def changed(value: T, **changes: Any) -> T:
    """Return a copy of a frozen value with other values in some of its fields.

    Like `dataclasses.replace` and an order of magnitude faster, because nothing is
    checked or computed again: only for classes without checks and caches.

    Raises:
        TypeError: the class has no such field.
    """
    kind, before = type(value), value.__dict__
    fields = before | changes
    if len(fields) != len(before):
        unknown = sorted(changes.keys() - before.keys())
        raise TypeError(f"{kind.__name__} has no field {unknown[0]!r}.")
    copy = object.__new__(kind)
    object.__setattr__(copy, "__dict__", fields)
    return copy
