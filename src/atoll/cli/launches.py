"""What this user has launched, by what they call a run; and tables of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from atoll.cli.names import place_of, served
from atoll.cli.terminal import width
from atoll.errors import UsageError
from atoll.launch.launches import Book, Record
from atoll.settings.rules import nearest
from atoll.telemetry.text import Cell, printable, table

LEAST_NAME = 8


def url_of_run(run: str) -> str:
    """Return the URL that launches are kept by, although nobody may serve it now."""
    path = Path(run)
    if path.is_dir() and (last := served(path)) is not None:
        return last.url
    return str(place_of(run))


def launches_of(run: str, book: Book | None = None) -> list[Record]:
    """Return the launches of a run, or the one launch of that id.

    Raises:
        UsageError: there are none.
    """
    records = (book or Book()).records()
    if found := [each for each in records if each.handle.id == run]:
        return found
    url = url_of_run(run)
    if found := [each for each in records if each.handle.run == url]:
        return found
    known = ", ".join(sorted({each.handle.run for each in records})) or "of none"
    raise UsageError(
        f"Nothing was launched by this user for {url}. Launches are known for: {known}."
    )


def with_island(records: Sequence[Record], island: str) -> tuple[Record, int]:
    """Return the newest launch that has an island of a name, and its index there.

    Raises:
        UsageError: none has.
    """
    names: dict[str, tuple[Record, int]] = {}
    for record in records:
        for index in record.handle.indexes:
            names[record.handle.island(index)] = record, index
    if island not in names:
        raise UsageError(
            f"There is no island {island[:80]!r} among those that were launched. Did "
            f"you mean {nearest(island, names)!r}?"
        )
    return names[island]


def tell_table(rows: Sequence[Sequence[str]], *, left: int) -> None:
    """Print rows, the first of which is the head."""
    for line in table_lines(rows, left=left):
        typer.echo(line)


def table_lines(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Return rows as lines, within the terminal."""
    grid = [[Cell(printable(text)) for text in row] for row in rows]
    filled = table(grid, left_columns=left, min_width=LEAST_NAME, width=width())
    return ["  ".join(cell.text for cell in row).rstrip() for row in filled]
