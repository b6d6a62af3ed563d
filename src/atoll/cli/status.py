"""`atoll status RUN`: print a run's progress, its islands, and why it waits."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Annotated, Any

import typer

from atoll.cli.run_names import RUN, locate_run, open_named
from atoll.cli.terminal import (
    FullScreen,
    can_redraw,
    console,
    exit_on_signals,
    has_colour,
    is_ascii,
    table,
    width,
)
from atoll.errors import Unreachable, UsageError
from atoll.run_client import RunClient, RunStatus, open_run
from atoll.settings.reference import SettingValue, values_of
from atoll.telemetry import render_rows, render_status
from atoll.telemetry.text import format_size, format_span, painted, printable, wrapped


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
    page_of = _data_page if data else partial(_page, is_all=is_all)

    def show(status: RunStatus, losses: Losses) -> None:
        if as_json:
            _print_json(status, is_data=data, is_line=watch)
        else:
            typer.echo(page_of(status, losses, None), nl=False)

    if not watch:
        with closing(open_named(run)) as client:
            status = client.status(watch=True)
            show(status, {} if as_json else _losses(client))
    elif as_json or not can_redraw(sys.stdout):
        _print_until_over(run, show)
    else:
        show(*_watch(run, page_of))


Losses = Mapping[str, Sequence[float | None]]
Page = Callable[[RunStatus, Losses, int | None], str]
"""Returns the page of a status, and tries to fit it into a number of lines."""

TREND_ROWS = 8
TREND_MIN_WIDTH = 100
"""On a narrower terminal trends would be left out of the table."""

TREND_EVERY = 5
"""Statuses of a watch between two requests of the losses."""


def _losses(client: RunClient) -> Losses:
    """Return the losses of each island over the run, if they fit into an answer."""
    if width() < TREND_MIN_WIDTH:
        return {}
    try:
        past = client.history(parts="curves", columns="loss", rows=TREND_ROWS)
    except UsageError:
        return {}
    islands = past["curves"]["islands"].items()
    return {name: columns.get("loss", ()) for name, columns in islands}


def _print_until_over(run: str, show: Callable[[RunStatus, Losses], None]) -> None:
    """Print a page or a line of JSON for each status."""
    with closing(open_named(run)) as client:
        status = client.status(watch=True)
        show(status, {})
        while not status.is_over:
            time.sleep(client.poll_s)
            status = client.status()
            show(status, {})


def _watch(run: str, page_of: Page) -> tuple[RunStatus, Losses]:
    """Show a run on the whole terminal until it is over; return its end.

    The last page of a run that does not answer stays, with the error above it.
    """
    with exit_on_signals(), ExitStack() as cleanup:
        client = open_named(run)
        cleanup.callback(lambda: client.close())
        status = client.status(watch=True)  # an error of the first one ends the command
        losses = _losses(client)
        if status.is_over:
            return status, losses
        url = str(locate_run(run))
        screen = cleanup.enter_context(FullScreen(sys.stdout))
        silence = ""
        for number in itertools.count(1):
            if status.is_over:
                break
            lines = screen.lines() - silence.count("\n")
            screen.show(silence + page_of(status, losses, lines))
            time.sleep(client.poll_s)
            try:
                status = client.status()
                losses = losses if number % TREND_EVERY else _losses(client)
                silence = ""
            except Unreachable as exc:
                client.close()
                client = open_run(url)
                silence = _silence(status, exc)
    return status, losses


def _silence(status: RunStatus, error: Unreachable) -> str:
    """Return the lines above a page that is not of the present."""
    age_s = max(0.0, time.time() - status.document["now_unix_s"])
    text = f"No answer; this page is {format_span(age_s)} old. {error}"
    lines = wrapped(printable(text), width())
    return "".join(f"{painted(x, 'red', is_colour=has_colour())}\n" for x in lines)


def _print_json(status: RunStatus, *, is_data: bool, is_line: bool) -> None:
    document = status.document.get("data") if is_data else status.document
    typer.echo(json.dumps(document, indent=None if is_line else 2))


def _show_settings(client: RunClient, *, as_json: bool) -> None:
    """Print the values of a run, and the epochs that changed them."""
    settings = client.settings()
    values, epochs = values_of(settings), _epochs(client)
    if as_json:
        document = {
            "settings": {row.key: row.written for row in values},
            "defaults": {row.key: row.written_default for row in values},
            "not_default": [row.key for row in values if not row.is_default],
            "changes": {row.key: row.changes for row in values},
            "fingerprint": settings.fingerprint,
            "epochs": epochs,
        }
        typer.echo(json.dumps(document, indent=2))
        return
    rows = [("setting", "value", "default", "changes")]
    rows += [
        (row.key, _amount(row), "" if row.is_default else row.default, row.changes)
        for row in values
    ]
    console(sys.stdout).print(table(rows))
    for epoch in epochs or ():
        time_text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(epoch["at"]))
        changes = ", ".join(f"{key}={value}" for key, value in epoch["values"].items())
        typer.echo(printable(f"epoch {epoch['epoch']} at {time_text}: {changes}"))


def _amount(row: SettingValue) -> str:
    """Return a value; of a size also its unit."""
    if row.key.endswith("_bytes") and isinstance(row.written, int):
        return f"{row.value} ({format_size(row.written)})"
    return row.value


def _epochs(client: RunClient) -> list[dict[str, Any]] | None:
    """Return the epochs of a run with their times; None if they are unknown."""
    history = client.history(parts="notes")
    epochs = [
        {key: note[key] for key in ("epoch", "at", "values")}
        for note in history["notes"]
        if note["event"] == "epoch_set"
    ]
    # A run in a store has no times of them.
    return epochs if epochs or history["is_from_start"] else None


def _data_page(status: RunStatus, losses: Losses, lines: int | None) -> str:
    return render_rows(status.document, width=width())


def _page(status: RunStatus, losses: Losses, lines: int | None, *, is_all: bool) -> str:
    document = status.document
    page = render_status(
        document,
        width=width(),
        is_colour=has_colour(),
        is_all=is_all,
        is_ascii=is_ascii(sys.stdout),
        max_lines=lines,
        losses=losses,
    )
    if "watched_s" in document:
        watched_s = document["watched_s"]
        page += f"\nWatched for {watched_s:.0f} s; times count from then on.\n"
    return page
