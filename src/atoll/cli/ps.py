"""`atoll ps [RUN]`: what this user has launched, and what became of it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from atoll.cli.launches import launches_of, tell_table
from atoll.cli.names import complete
from atoll.errors import AtollError
from atoll.launch.api import Launched, rows
from atoll.launch.base import Report
from atoll.launch.launches import Book, Record
from atoll.launch.run_status import try_look


def ps(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A URL, a directory or a name; every run without.",
            autocompletion=complete,
            show_default=False,
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Launches that are over, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List launched islands: their states, restarts and last metrics.

    Without RUN, launches of which nothing runs are left out unless --all.
    """
    records = Book().records() if run is None else launches_of(run)
    found = [(record, *_polled(record)) for record in records]
    if run is None and not everything:
        found = [each for each in found if not _is_over(each[1])]
    if as_json:
        typer.echo(json.dumps([_form(*each) for each in found]))
        return
    for record, reports, trouble in found:
        handle = record.handle
        typer.echo(f"{handle.id} on {handle.engine}, run {handle.run}")
        if trouble:
            typer.echo(f"  {trouble}")
        else:
            look = None if record.is_coordinator else try_look(handle.run)
            tell_table(rows(reports, look.islands if look else {}), left=2)
        typer.echo("")


def _polled(record: Record) -> tuple[tuple[Report, ...], str]:
    """Return the reports of a launch, or why its engine cannot be asked."""
    try:
        return Launched(record.handle).poll(), ""
    except AtollError as exc:
        return (), str(exc)


def _is_over(reports: tuple[Report, ...]) -> bool:
    return bool(reports) and all(each.state.is_over for each in reports)


def _form(record: Record, reports: tuple[Report, ...], trouble: str) -> dict[str, Any]:
    islands = [report.to_dict() for report in reports]
    return {
        "launch": json.loads(record.handle.to_json()),
        "islands": islands,
        "trouble": trouble,
    }
