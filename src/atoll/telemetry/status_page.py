"""A run's status as a page of text: values in, text out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.telemetry.island_past import LAST_MARKS
from atoll.telemetry.text import (
    NO_VALUE,
    Cell,
    cut,
    format_bar,
    format_brief,
    format_count,
    format_loss,
    format_share,
    format_size,
    format_span,
    format_trend,
    painted,
    printable,
    table,
    width_of,
    wrapped,
)

MIN_WIDTH = 40
MAX_ISLANDS = 100
"""So many islands are listed with `is_all`; those that need a look come first."""

MAX_CALM = 12
"""Of more islands, those that are well are one line."""

DAY_S = 86_400.0
YOUNG_S = 3600.0
"""Below this age of a coordinator its start is shown."""

SOON_S = 60.0
"""Below this time the end is shown without its time of day."""

BAR_CELLS = 24

MARKS_LEGEND = "Marks of the last rounds: # counted, ~ late, ! refused, . absent."

MAX_SAME = 8
MAX_WAITS = 5
MAX_ROUNDS = 8
MAX_WORD = 12
"""Cells of a state or a version."""

MAX_NAME = 24
LEAST_NAME = 16
"""Cells of a name, at most and at least."""

STATE_COLOURS = {
    "training": "green",
    "live": "green",
    "ended": "dim",
    "left": "dim",
    "silent": "red",
}

ON_THE_PAGE = frozenset({"damage", "same_data", "waiting_dear", "dropped", "refused"})
"""Kinds of findings that other parts of the page show."""

MARKS = {"bad": "!!", "warn": "!"}

Status = Mapping[str, Any]
Losses = Mapping[str, Sequence[float | None]]
Island = Mapping[str, Any]


def render_status(
    status: Status,
    *,
    width: int,
    is_colour: bool,
    is_all: bool = False,
    is_ascii: bool = False,
    max_lines: int | None = None,
    losses: Losses | None = None,
) -> str:
    """Return the page of a status document, no line wider than `width`.

    Of many islands those that are well are summed up, unless `is_all`. Below 40
    columns it is as wide as 40. It ends with a line feed, and holds no character that
    a terminal obeys unless `is_colour`, and then only our colours.

    Args:
        status: The document.
        width: Cells of a line.
        is_colour: Whether there are colours.
        is_all: Whether all islands are listed, 100 at most.
        is_ascii: Whether the bar is drawn in ASCII, and trends are left out.
        max_lines: Beyond it fewer recent rounds are listed.
        losses: The losses of each island over the run, for a column of trends.
    """
    drawn = {} if is_ascii or losses is None else losses
    page = _Page(status, max(MIN_WIDTH, width), is_colour, is_all, is_ascii, drawn)
    text = page.text(MAX_ROUNDS)
    surplus = text.count("\n") - (max_lines or math.inf)
    return text if surplus <= 0 else page.text(max(0, MAX_ROUNDS - int(surplus)))


def render_head(
    status: Status, *, width: int, is_colour: bool, is_ascii: bool = False
) -> str:
    """Return the first lines of the page: progress, rate, end, islands, agreement."""
    page = _Page(status, max(MIN_WIDTH, width), is_colour, False, is_ascii)
    return "\n".join(page.head()) + "\n"


@dataclass(frozen=True)
class _Page:
    status: Status
    width: int
    is_colour: bool
    is_all: bool
    is_ascii: bool
    losses: Losses = field(default_factory=dict)

    def text(self, max_rounds: int) -> str:
        blocks = [
            [*self.head(), *self.address()],
            self.waits(),
            self.findings(),
            self.islands(),
            self.rounds(max_rounds),
            self.notes(),
        ]
        texts = ["\n".join(lines) for lines in map(list, blocks) if lines]
        return "\n\n".join(texts) + "\n"

    def head(self) -> Iterator[str]:
        status = self.status
        state = cut(printable(status["state"]), MAX_WORD)
        name = cut(printable(status["name"]), self.width - width_of(state) - 2)
        share = _progress(status)
        bar = (
            ""
            if share is None
            else format_bar(share, BAR_CELLS, is_ascii=self.is_ascii)
        )
        colour = STATE_COLOURS.get(state, "yellow")
        for line in self._framed(
            f"{self._paint(name, 'bold')}  {self._paint(state, colour)}  ",
            width_of(f"{name}  {state}  "),
            _advance(status, bar, share),
        ):
            # The bar is one word, so it is whole in its line.
            yield line.replace(bar, self._paint(bar, colour)) if bar else line
        yield from _flowed(_health(status), self.width)
        if (status.get("agreement") or {}).get("apart"):
            yield from self._paragraph("Islands hold different anchors.", "red")

    def address(self) -> Iterator[str]:
        status = self.status
        text = f"{printable(status['run'])} at {printable(status['listening'])}"
        if bundle := status.get("bundle"):
            text += f", bundle {printable(bundle)[:12]}"
        yield from self._paragraph(
            f"{text}, Atoll {printable(status['version'])}", "dim"
        )

    def waits(self) -> Iterator[str]:
        if self.status["why"]:
            yield from self._paragraph(printable(_why(self.status)), "yellow")
        waits = self.status["waits_for"]
        for wait in waits[:MAX_WAITS]:
            yield from self._paragraph(_wait(wait), "", indent="  ")
        if len(waits) > MAX_WAITS:
            yield f"  and {len(waits) - MAX_WAITS} more"
        if self.status["cure"]:
            yield from self._paragraph(
                f"Cure: {printable(self.status['cure'])}", "cyan"
            )

    def findings(self) -> Iterator[str]:
        """Show the findings that are no notes, and are not on the page already."""
        rows = self.status.get("findings", ())
        for row in rows:
            if row["severity"] == "note" or row["kind"] in ON_THE_PAGE:
                continue
            colour = "red" if row["severity"] == "bad" else "yellow"
            text = printable(f"{row['message']} {row['remedy']}".rstrip())
            command = f" `{printable(row['command'])}`" if row["command"] else ""
            yield from self._paragraph(
                f"{MARKS[row['severity']]} {text}{command}", colour
            )

    def islands(self) -> Iterator[str]:
        listed = sorted(self.status["islands"], key=_rank)
        few, rest = self._shown(listed)
        has_marks = False
        if few:
            columns = _island_columns(self.status, has_trends=bool(self.losses))
            few = _with_trends(few, self.losses)
            head, *lines = self._table(columns, few, left_columns=2)
            yield from (head, *lines)
            has_marks = MARKS_COLUMN in head
        if rest and not self.is_all and all(map(_is_calm, rest)):
            yield f"and {len(rest)} more, all well; --all lists them"
        elif rest:
            yield f"and {len(rest)} more islands; --json lists them all"
        if has_marks:
            yield self._paint(MARKS_LEGEND, "dim")
        yield from self._old(few)
        for island in few:
            if reason := island["refused_because"]:
                message = f"{_name(island)} was refused: {printable(reason)}"
                yield from self._paragraph(message, "red")
            if steps := island["dropped_steps"]:
                text = f"{_name(island)} missed rounds and dropped {steps} inner steps"
                yield from self._paragraph(text, "red")

    def _shown(self, listed: list[Island]) -> tuple[list[Island], list[Island]]:
        """Return the islands to list and the others, in the order of `listed`."""
        number = MAX_ISLANDS
        if not self.is_all and len(listed) > MAX_CALM:
            troubled = sum(not _is_calm(island) for island in listed)
            number = min(MAX_ISLANDS, max(troubled, MAX_CALM))
        return listed[:number], listed[number:]

    def _old(self, islands: Sequence[Island]) -> Iterator[str]:
        """Say how old the values of islands are, if a coordinator has started since."""
        started_unix_s = self.status["started_unix_s"]
        reports = [row.get("as_of_unix_s") for row in islands]
        old = [x for x in reports if x is not None and x < (started_unix_s or 0.0)]
        if old:
            ago_s = self.status["now_unix_s"] - max(old)
            count = "1 island" if len(old) == 1 else f"{len(old)} islands"
            yield from self._paragraph(
                f"{count} reported nothing since the coordinator started: these values "
                f"are as of {format_span(ago_s)} ago.",
                "dim",
            )

    def rounds(self, number: int) -> Iterator[str]:
        recent = self.status["recent"][-number:] if number else ()
        now_s = self.status["now_unix_s"]
        if recent:
            rows = [row | {"ago_s": now_s - row["committed_unix_s"]} for row in recent]
            yield from self._table(ROUND_COLUMNS, rows, left_columns=0)

    def notes(self) -> Iterator[str]:
        for names in self.status["same_data"]:
            few = ", ".join(cut(printable(name), MAX_NAME) for name in names[:MAX_SAME])
            others = f" and {len(names) - MAX_SAME} more" if names[MAX_SAME:] else ""
            yield from self._paragraph(
                f"{few}{others} have begun with the same batch: give each its own "
                "rows, as atoll.torch.shard does.",
                "red",
            )
        if self.status["state"] == "training" and (
            share := self.status.get("unowned_share")  # older coordinators have none
        ):
            yield from self._paragraph(
                f"{format_share(share)} of the rows belong to no island, if "
                "atoll.torch.shard deals them out: it cuts the data into "
                "run.max_islands parts, or run.start_islands. With data.order='run' "
                "in the next run, all rows are trained by any number of islands.",
                "yellow",
            )
        for damage in self.status["damage"]:
            yield from self._paragraph(f"Damage: {printable(damage)}", "red")

    def _table(
        self,
        columns: Sequence[_Column],
        rows: Sequence[Mapping[str, Any]],
        left_columns: int,
    ) -> Iterator[str]:
        """Drop the least important columns until the others fit."""
        shown = list(columns)
        while True:
            grid = [[Cell(column.head, "dim") for column in shown]]
            grid += [[column.read(row) for column in shown] for row in rows]
            lines = table(
                grid, left_columns=left_columns, min_width=LEAST_NAME, width=self.width
            )
            used = sum(width_of(cell.text) + 2 for cell in lines[0]) - 2
            if used <= self.width or len(shown) == 1:
                break
            shown.remove(max(shown, key=lambda column: column.rank))
        for line in lines:
            yield "  ".join(self._paint(cell.text, cell.colour) for cell in line)

    def _paragraph(self, text: str, colour: str, *, indent: str = "") -> Iterator[str]:
        for line in wrapped(text, self.width - len(indent)):
            yield indent + self._paint(line, colour)

    def _framed(
        self, left_columns: str, left_cells: int, parts: Sequence[str]
    ) -> Iterator[str]:
        """Put parts of text beside the left one, or below it if that is too wide."""
        if left_cells > self.width // 2:
            yield left_columns.rstrip()
            left_columns, left_cells = "  ", 2
        first, *others = _flowed(parts, self.width - left_cells)
        yield left_columns + first
        yield from (" " * left_cells + line for line in others)

    def _paint(self, text: str, colour: str) -> str:
        return painted(text, colour, is_colour=self.is_colour)


@dataclass(frozen=True)
class _Column:
    head: str
    rank: int
    """The column with the highest rank is dropped first."""

    read: Callable[[Mapping[str, Any]], Cell]


def _flowed(parts: Sequence[str], width: int) -> list[str]:
    """Return parts of text in lines; a part is broken only if it must be."""
    lines = [""]
    for index, part in enumerate(parts):
        text = part + ("," if index + 1 < len(parts) else "")
        if lines[-1] and width_of(lines[-1]) + 1 + width_of(text) <= width:
            lines[-1] += f" {text}"
        else:
            lines += wrapped(text, width)
    return [line for line in lines if line] or [""]


def _name(island: Island) -> str:
    return cut(printable(island["island"]), MAX_NAME)


def _rank(island: Island) -> tuple[bool, bool]:
    """Sort silent and refused islands first, those that left last."""
    return _is_calm(island), island["state"] == "left"


def _is_calm(island: Island) -> bool:
    is_finite = island.get("loss_is_finite") is not False
    is_live = island["state"] == "live"
    return is_live and is_finite and not island["refused_because"]


def _state(island: Island) -> Cell:
    state = cut(printable(island["state"]), MAX_WORD)
    if state == "silent":
        return Cell(f"silent {format_brief(island['seen_s'])}", "red")
    return Cell(state, STATE_COLOURS.get(state, "yellow"))


def _some(key: str) -> Callable[[Mapping[str, Any]], Cell]:
    return lambda row: (
        Cell(NO_VALUE)
        if row[key] is None
        else Cell(f"{row[key]:.0f}", "yellow" if row[key] else "")
    )


def _rounds(status: Status) -> str:
    last = status["last_round"]
    return f"{status['round']}" + (f" of {last}" if last is not None else "")


def _progress(status: Status) -> float | None:
    """Return the share of the run that is done; by the bound that is nearer."""
    shares = []
    if status["last_round"]:
        shares.append(status["round"] / status["last_round"])
    if status.get("end_tokens"):
        shares.append((status["tokens"] or 0) / status["end_tokens"])
    return min(1.0, max(shares)) if shares else None


def _advance(status: Status, bar: str, share: float | None) -> list[str]:
    """Return how far the run is, how fast it goes, and when it ends."""
    progress = f" {bar} {format_share(share)}" if bar else ""
    parts = [f"round {_rounds(status)}{progress}", _tokens(status)]
    if (rows := (status.get("data") or {}).get("trained_share")) is not None:
        parts.append(f"{format_share(rows)} of the rows")
    return [*parts, *_rates(status)]


def _health(status: Status) -> list[str]:
    """Return who takes part, how busy they are, and whether they agree."""
    parts = [_membership(status), *_asynchronous(status)]
    if status.get("utilisation") is not None:
        parts.append(f"utilisation {format_share(status['utilisation'])}")
    elif status["stall_share"] is not None:
        parts.append(f"{format_share(status['stall_share'])} waiting")
    return [*parts, *_agreement(status), *_ages(status)]


def _agreement(status: Status) -> list[str]:
    """Return how many islands hold the same newest anchor; others are behind it."""
    agreement = status.get("agreement")
    if not agreement or agreement["apart"]:
        return []
    holding, number = agreement["holding"], agreement["of"]
    digest = printable(agreement["digest"])[:8]
    behind = (
        f", {number - holding} one round or more behind" if holding < number else ""
    )
    return [f"same anchor on {holding} of {number} ({digest}){behind}"]


def _tokens(status: Status) -> str:
    """Return how many tokens have counted, of how many the run ends with."""
    tokens, end_tokens = status["tokens"], status.get("end_tokens")
    if not end_tokens:
        return f"{format_count(tokens)} tokens"
    share = format_share(tokens / end_tokens)
    return f"{format_count(tokens)} of {format_count(end_tokens)} tokens ({share})"


def _asynchronous(status: Status) -> list[str]:
    """Return the mean age of the islands' updates, in an asynchronous run."""
    if status.get("mode") != "async":
        return []
    ages = [row["age"] for row in status["islands"] if row.get("age") is not None]
    return ["asynchronous", *([f"age {sum(ages) / len(ages):.1f}"] if ages else [])]


def _membership(status: Status) -> str:
    live = sum(island["state"] == "live" for island in status["islands"])
    number, quorum = len(status["islands"]), status["quorum"]
    if not number:
        return f"no islands, quorum {quorum}"
    return f"{live} of {number} islands live, quorum {quorum}"


def _rates(status: Status) -> list[str]:
    """Return the tokens per second and the end of the run, where they are known."""
    parts = []
    if status["state"] == "training" and status.get("tokens_per_s"):
        parts.append(f"{format_count(status['tokens_per_s'])} tokens/s")
    if status.get("ends_unix_s") is not None:
        left_s = max(0.0, status["ends_unix_s"] - status["now_unix_s"])
        clock = (
            "" if left_s < SOON_S else f" (at {_clock(status['ends_unix_s'], left_s)})"
        )
        parts.append(f"ends in about {format_span(left_s)}{clock}")
    return parts


def _clock(at_unix_s: float, left_s: float) -> str:
    """Return the local time of day; with the date if that is far."""
    form = "%H:%M" if left_s < DAY_S else "%a %d %b %H:%M"
    return time.strftime(form, time.localtime(at_unix_s))


def _ages(status: Status) -> list[str]:
    """Return the age of the run, and of a coordinator that started lately."""
    now_unix_s, parts = status["now_unix_s"], []
    created_unix_s = status.get("created_unix_s")
    started_unix_s = status["started_unix_s"]  # a run in a bucket has no process
    if created_unix_s is not None:
        parts.append(f"run {format_span(now_unix_s - created_unix_s)} old")
    if started_unix_s is not None:
        age_s, starts = now_unix_s - started_unix_s, status.get("starts")
        if created_unix_s is None or (age_s < YOUNG_S and starts != 1):
            parts.append(f"coordinator started {format_span(age_s)} ago")
    return parts


def _why(status: Status) -> str:
    since_unix_s = status.get("since_unix_s")  # older coordinators do not send it
    if since_unix_s is None or status["state"] == "ended":
        return str(status["why"])
    waited_s = max(0.0, status["now_unix_s"] - since_unix_s)
    return f"{status['why']} For {format_span(waited_s)} now."


def _wait(wait: Mapping[str, Any]) -> str:
    late_in_s = wait["late_in_s"]
    name = f"{_name(wait)}, fragment {wait['fragment']}, round {wait['round']}"
    since = f"for {format_span(wait['since_s'])}"
    if late_in_s is None:
        return f"{name}: {since}"
    return f"{name}: {since}, late in {format_span(max(0.0, late_in_s))}"


def _with_trends(islands: Sequence[Island], losses: Losses) -> list[Island]:
    """Return rows with the trends of their losses, all in the same scale."""
    finite = [
        value for values in losses.values() for value in values if value is not None
    ]
    if not finite:
        return list(islands)
    bounds = {"low": min(finite), "high": max(finite)}
    trends = {name: format_trend(values, **bounds) for name, values in losses.items()}
    return [{**row, "trend": trends.get(row["island"], "")} for row in islands]


def _island_columns(status: Status, *, has_trends: bool) -> list[_Column]:
    """Return the columns that tell something: not all windows or shares need one."""
    islands, sync_every = status["islands"], status.get("sync_every")
    windows = {row.get("window", sync_every) for row in islands}
    has_shares = any(row.get("share") is not None for row in islands)
    versions = {row["version"] for row in islands} - {None, status["version"]}
    has_rates = any(row.get("tokens_per_s") is not None for row in islands)
    has_marks = any(row.get("marks") for row in islands)
    left_out = {
        *(() if windows - {sync_every} else ("window",)),
        *(() if has_shares else ("share",)),
        *(() if versions else ("version",)),
        *(() if has_rates else ("tokens/s",)),
        *(() if has_marks else (MARKS_COLUMN,)),
        *(() if has_trends else ("trend",)),
        "late" if status.get("mode") == "async" else "age",
    }
    return [column for column in ISLAND_COLUMNS if column.head not in left_out]


def _pace(island: Island) -> Cell:
    """Show the seconds per window; before it is known those to the last updates."""
    step_s, window = island.get("step_s"), island.get("window")
    if step_s is None or window is None:
        return Cell(format_span(island["pace_s"]))
    return Cell(format_span(step_s * window))


def _number(
    key: str, message: Callable[[Any], str]
) -> Callable[[Mapping[str, Any]], Cell]:
    return lambda row: Cell(NO_VALUE if row[key] is None else message(row[key]))


def _loss(island: Island) -> Cell:
    if island.get("loss_is_finite") is False:
        return Cell("NaN", "red")
    return Cell(format_loss(island["loss"]))


def _age(island: Island) -> str:
    age = island.get("age")
    return NO_VALUE if age is None else f"{age:.1f}"


def _marks(island: Island) -> str:
    return printable(island.get("marks") or "")[-LAST_MARKS:]


def _version(island: Island) -> Cell:
    return Cell(cut(printable(island["version"] or NO_VALUE), MAX_WORD))


MARKS_COLUMN = "marks"

ISLAND_COLUMNS = (
    _Column("island", 0, lambda row: Cell(_name(row))),
    _Column("state", 0, _state),
    _Column("round", 1, _number("round", str)),
    _Column("pace", 4, _pace),
    _Column("window", 4, lambda row: Cell(str(row.get("window", NO_VALUE)))),
    _Column("share", 4, lambda row: Cell(format_share(row.get("share")))),
    _Column("loss", 2, _loss),
    _Column("trend", 11, lambda row: Cell(row.get("trend", ""))),
    _Column("wait", 3, _number("wait_share", format_share)),
    _Column("counted", 10, _number("counted", str)),
    _Column("age", 8, lambda row: Cell(_age(row))),
    _Column("late", 8, _some("late")),
    _Column("refused", 9, _some("refused")),
    _Column("up", 5, _number("bytes_up", format_size)),
    _Column("down", 6, _number("bytes_down", format_size)),
    _Column("tokens/s", 5, _number("tokens_per_s", format_count)),
    _Column("version", 7, _version),
    _Column(MARKS_COLUMN, 12, lambda row: Cell(_marks(row))),
)

ROUND_COLUMNS = (
    _Column("round", 0, _number("round", str)),
    _Column("fragment", 1, _number("fragment", str)),
    _Column("counted", 0, _number("counted", "{:.0f}".format)),
    _Column("late", 2, _some("late")),
    _Column("refused", 3, _some("refused")),
    _Column("took", 4, _number("seconds", format_span)),
    _Column("bytes", 6, _number("bytes", format_size)),
    _Column("committed", 5, lambda row: Cell(f"{format_brief(row['ago_s'])} ago")),
)
