"""`atoll status RUN`: print a run's progress, its islands, and why it waits."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Annotated, Any

import typer

from atoll.cli.run_names import RUN, open_named
from atoll.cli.terminal import (
    can_redraw,
    console,
    has_colour,
    live_view,
    table,
    width,
)
from atoll.errors import UsageError
from atoll.run_client import RunClient, RunStatus
from atoll.settings.reference import values_of
from atoll.telemetry import render_rows, render_status
from atoll.telemetry.text import printable


def status(
    run: Annotated[str, RUN],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    data: Annotated[
        bool, typer.Option("--data", help="Print the rows of the run's data.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat until the run ends.")
    ] = False,
    has_settings: Annotated[
        bool, typer.Option("--settings", help="Print the settings of the run.")
    ] = False,
    is_all: Annotated[
        bool, typer.Option("--all", help="List every island, also those that are well.")
    ] = False,
) -> None:
    """Print a run's progress, its islands, and why it waits.

    With --json prints the document of GET /status; with --watch on one line each time.
    With --data prints how many rows are trained, in hand and free, if the run deals
    them out.
    A store is read directly: the command watches for some seconds at most to find out
    which islands are live. --settings prints every value with its default, those
    that differ first, and the changes during the run; also as --json.
    """
    if has_settings:
        with closing(open_named(run)) as client:
            _show_settings(client, as_json=as_json)
        return
    with (
        closing(open_named(run)) as client,
        _printer(
            as_json=as_json, is_watching=watch, is_all=is_all, is_data=data
        ) as show,
    ):
        status = client.status(watch=True)
        show(status)
        while watch and not status.is_over:
            time.sleep(client.poll_s)
            status = client.status()
            show(status)


def _show_settings(client: RunClient, *, as_json: bool) -> None:
    """Print the values of a run, and the epochs that changed them."""
    settings = client.settings()
    values, epochs = values_of(settings), _epochs(client)
    if as_json:
        document = {
            "settings": {row.key: row.value for row in values},
            "defaults": {row.key: row.default for row in values},
            "not_default": [row.key for row in values if not row.is_default],
            "changes": {row.key: row.changes for row in values},
            "fingerprint": settings.fingerprint,
            "epochs": epochs,
        }
        typer.echo(json.dumps(document, indent=2))
        return
    rows = [("setting", "value", "default", "changes")]
    rows += [
        (row.key, row.value, "" if row.is_default else row.default, row.changes)
        for row in values
    ]
    console(sys.stdout).print(table(rows))
    for epoch in epochs or ():
        time_text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(epoch["at"]))
        changes = ", ".join(f"{key}={value}" for key, value in epoch["values"].items())
        typer.echo(printable(f"epoch {epoch['epoch']} at {time_text}: {changes}"))


def _epochs(client: RunClient) -> list[dict[str, Any]] | None:
    """Return the epochs of a run with their times; None if it keeps no events."""
    try:
        notes = client.history(parts="notes")["notes"]
    except UsageError:  # a run in a store
        return None
    return [
        {key: note[key] for key in ("epoch", "at", "values")}
        for note in notes
        if note["event"] == "epoch_set"
    ]


@contextmanager
def _printer(
    *, as_json: bool, is_watching: bool, is_all: bool, is_data: bool
) -> Iterator[Callable[[RunStatus], None]]:
    """Give a function that prints statuses; a terminal shows the newest in place."""
    page_of = _data_page if is_data else partial(_page, is_all=is_all)
    if as_json:
        indent = None if is_watching else 2
        yield lambda status: typer.echo(
            json.dumps(_document(status, is_data=is_data), indent=indent)
        )
    elif not (is_watching and can_redraw(sys.stdout)):
        yield lambda status: typer.echo(page_of(status), nl=False)
    else:
        from rich.text import Text

        with live_view(sys.stdout) as live:
            yield lambda status: live.update(
                Text.from_ansi(page_of(status)), refresh=True
            )


def _document(status: RunStatus, *, is_data: bool) -> object:
    return status.document.get("data") if is_data else status.document


def _data_page(status: RunStatus) -> str:
    return render_rows(status.document, width=width())


def _page(status: RunStatus, *, is_all: bool) -> str:
    document = status.document
    page = render_status(document, width=width(), is_colour=has_colour(), is_all=is_all)
    if "watched_s" in document:
        watched_s = document["watched_s"]
        page += f"\nWatched for {watched_s:.0f} s; times count from then on.\n"
    return page
