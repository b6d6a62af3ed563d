"""What the machines decide, as tables: the first row that fits is the answer.

Rule 1: a table answers every combination of its columns' values.
Rule 2: no row is idle: each one is the first that fits something.
Rule 3: the machines do what the tables say. Tests put every combination to the real
        machine, and docs/protocol.md is rendered from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

ANY = "any"


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    when: tuple[str, ...]
    """For each column a value, several joined by " or ", or `ANY`."""

    then: str
    why: str

    def fits(self, values: tuple[str, ...]) -> bool:
        return all(
            cell == ANY or value in cell.split(" or ")
            for cell, value in zip(self.when, values, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class Table:
    """A decision: columns with all their values, and rows read from the top."""

    title: str
    columns: Mapping[str, tuple[str, ...]]
    answer: str
    rows: tuple[Row, ...]

    def combinations(self) -> Iterator[tuple[str, ...]]:
        """Yield every combination of the columns' values."""
        return product(*self.columns.values())

    def row(self, values: tuple[str, ...]) -> Row:
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

TRANSITIONS = Table(
    title="From phase to phase",
    columns={
        "phase": ("waiting", "open", "closing", "ended"),
        "event": ("Committed", "Recovered", "another"),
        "started": YES_NO,
        "paused": YES_NO,
        "quorum": YES_NO,
        "missing": ("nobody", "late", "in time"),
        "known": ("all", "not all heard", "rounds lost"),
        "last": YES_NO,
    },
    answer="next phase",
    rows=(
        Row(
            (ANY, "Recovered", ANY, ANY, ANY, ANY, ANY, "yes"),
            "ended",
            "An island has brought the state after the last round.",
        ),
        Row(
            (ANY, "Recovered", ANY, ANY, ANY, ANY, ANY, "no"),
            "open",
            "The round after the state that an island has brought.",
        ),
        Row(
            ("waiting or open or ended", "Committed", ANY, ANY, ANY, ANY, ANY, ANY),
            "cannot be",
            "The host says it of a round that it was told to close, and of no other.",
        ),
        Row(
            ("waiting", ANY, "no", ANY, ANY, ANY, ANY, ANY),
            "waiting",
            "The first round waits for `start_islands`.",
        ),
        Row(
            ("waiting", ANY, "yes", "no", "yes", "nobody", "all", ANY),
            "closing",
            "Who came early has published: the round opens and closes at once.",
        ),
        Row(
            ("waiting", ANY, "yes", ANY, ANY, ANY, ANY, ANY),
            "open",
            "Deadlines count from this moment, for the islands that are live now.",
        ),
        Row(
            ("open", ANY, ANY, "no", "yes", "nobody or late", "all", ANY),
            "closing",
            "Nobody is worth waiting for. The staged set is frozen.",
        ),
        Row(
            ("open", ANY, ANY, ANY, ANY, ANY, "not all heard or rounds lost", ANY),
            "open",
            "After a restart: islands may have an outcome that the journal lost.",
        ),
        Row(
            ("open", ANY, ANY, ANY, ANY, ANY, ANY, ANY),
            "open",
            "Below the quorum, or paused, or somebody may still come in time.",
        ),
        Row(
            ("closing", "Committed", ANY, ANY, ANY, ANY, ANY, "yes"),
            "ended",
            "No fragment opens a round beyond the last.",
        ),
        Row(
            ("closing", "Committed", ANY, ANY, ANY, ANY, ANY, "no"),
            "open",
            "The next round, whose number is one higher, for who is live now.",
        ),
        Row(
            ("closing", ANY, ANY, ANY, ANY, ANY, ANY, ANY),
            "closing",
            "Only a durable record ends it, however long the disk takes.",
        ),
        Row(("ended", ANY, ANY, ANY, ANY, ANY, ANY, ANY), "ended", "For good."),
    ),
)

RECEPTION = Table(
    title="An update's reception",
    columns={
        "its round": ("over", "the open one", "the next", "a later one"),
        "phase": ("waiting", "open", "closing", "ended"),
        "kind": ("update", "departing"),
        "standing": ("nothing", "the same", "another", "an earlier life's"),
        "its island": ("in step", "not heard yet", "ahead of the run"),
    },
    answer="answer",
    rows=(
        Row(
            ("over", ANY, ANY, ANY, ANY),
            "committed",
            "The outcome says what counted; a repeat changes nothing.",
        ),
        Row(
            (ANY, "ended", ANY, ANY, ANY),
            "committed",
            "No round opens after the last: nothing is wanted any more.",
        ),
        Row(
            ("the open one", "closing", ANY, ANY, ANY),
            "closing",
            "The staged set is frozen: who is not in it will be told by the outcome.",
        ),
        Row(
            ("the next", ANY, "update", ANY, "in step"),
            "refused",
            "Its base is not known before the open round is committed.",
        ),
        Row(
            ("a later one", ANY, ANY, ANY, "in step"),
            "refused",
            "Nobody can have sealed for it.",
        ),
        Row(
            ("the next", ANY, "update", ANY, ANY),
            "early",
            "The run may have lost rounds: it will ask for a state first.",
        ),
        Row(
            ("the next", ANY, "departing", ANY, "ahead of the run"),
            "early",
            "Who leaves brings first what the run has lost.",
        ),
        Row(
            ("a later one", ANY, ANY, ANY, ANY),
            "early",
            "As above, departing or not.",
        ),
        Row((ANY, ANY, ANY, "nothing", ANY), "wanted", "The body may come."),
        Row(
            (ANY, ANY, ANY, "the same", ANY),
            "staged",
            "A repeat is the same request.",
        ),
        Row(
            (ANY, ANY, ANY, "an earlier life's", ANY),
            "spoken for",
            "What it left behind stands; the later life learns so by the outcome.",
        ),
        Row(
            (ANY, ANY, ANY, "another", ANY),
            "refused",
            "One update per island and round: the first one staged stands.",
        ),
    ),
)

JOINING = Table(
    title="Whose name is it",
    columns={
        "name": ("none", "unknown", "live", "silent", "left"),
        "key": ("the same", "another"),
        "nonce": ("the same", "another"),
        "life": ("new", "new, unaware", "later than known", "not later"),
        "room": YES_NO,
    },
    answer="answer",
    rows=(
        Row(
            ("none or live or silent or left", "the same", "the same", ANY, ANY),
            "same life",
            "The reply was lost, and the island asks again.",
        ),
        Row(
            ("live or silent or left", ANY, ANY, "not later", ANY),
            "LeaseLost",
            "A life that wants to go on has a successor.",
        ),
        Row(
            ("live", "another", ANY, ANY, ANY),
            "refused: taken",
            "The name belongs to who holds the key, while its lease runs.",
        ),
        Row(
            (ANY, ANY, ANY, ANY, "no"),
            "refused: full",
            "`max_islands` others are live.",
        ),
        Row(
            (ANY, ANY, ANY, "later than known or not later", ANY),
            "goes on",
            "The run has lost the record of this life, and is told of it.",
        ),
        Row(
            ("none or unknown", ANY, ANY, ANY, ANY),
            "first life",
            "Who gives no name gets the first free one.",
        ),
        Row(
            (ANY, ANY, ANY, "new, unaware", ANY),
            "NameKnown",
            "It does not know of the latest life; a dead one's joining ends here.",
        ),
        Row(
            (ANY, ANY, ANY, ANY, ANY),
            "next life",
            "A restart with the key is immediate; a name nobody holds is free.",
        ),
    ),
)

FOUNDING = Table(
    title="Who founds",
    columns={
        "the run's model": ("none", "the same", "another"),
        "being founded by": ("nobody", "this life", "another", "one that is silent"),
    },
    answer="answer",
    rows=(
        Row(
            ("the same", ANY),
            "joins",
            "The run has its weights: the island takes them.",
        ),
        Row(
            ("another", ANY),
            "ModelError",
            "Names, shapes, dtypes and order are compared before anything else.",
        ),
        Row(
            ("none", "another"),
            "Unreachable",
            "One island's weights, not two: this one asks again.",
        ),
        Row(
            ("none", ANY),
            "founds",
            "A founder that fell silent has given way; a repeat is the same founder.",
        ),
    ),
)

WORK = Table(
    title="What becomes of work",
    columns={
        "verdict": ("counted", "late", "refused"),
        "missed before": ("0", "1", "2"),
        "passed since": ("0", "1", "2", "3"),
    },
    answer="the island's work is",
    rows=(
        Row(
            ("refused", ANY, ANY),
            "refuse",
            "What a run refused must not come back: anchor taken, residual cleared.",
        ),
        Row(
            ("counted", ANY, "0"),
            "adopt",
            "The update is in the mean: rebase or mix, as the settings say.",
        ),
        Row(
            ("counted", ANY, "1 or 2"),
            "rebase",
            "It counted, later rounds passed: what came since the seal is kept.",
        ),
        Row(
            ("late", "0", "0 or 1"),
            "carry",
            "Contributed once, in the next round; the old residual is back.",
        ),
        Row(("late", "1", "0"), "carry", "The second round in succession, no more."),
        Row(
            (ANY, ANY, ANY),
            "drop",
            "Beyond two rounds: anchor taken, loss reported; the residual stays.",
        ),
    ),
)

REJOINING = Table(
    title="What is left of saved work",
    columns={
        "counted since the saved base": ("nothing", "the saved update", "another"),
        "the saved update was": ("refused", "not refused"),
        "the saved base is": ("known", "unknown"),
    },
    answer="left",
    rows=(
        Row(
            (ANY, ANY, "unknown"),
            "lost",
            "The run has another past: nobody can say what of it has counted.",
        ),
        Row(
            ("another", ANY, ANY),
            "nothing",
            "That update was made later and held all of it: it is in the anchor.",
        ),
        Row(
            ("the saved update", ANY, ANY),
            "what came since its seal",
            "As if the outcome had come before the island died.",
        ),
        Row(
            ("nothing", "refused", ANY),
            "nothing",
            "What a run refused must not come back.",
        ),
        Row(
            ("nothing", ANY, ANY),
            "all of it",
            "Put on the present anchor, to be contributed once.",
        ),
    ),
)

TABLES = (TRANSITIONS, RECEPTION, JOINING, FOUNDING, WORK, REJOINING)
