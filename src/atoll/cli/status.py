"""`atoll status RUN`: print a run's progress, its islands, and why it waits."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Annotated

import typer

from atoll.cli.run_names import RUN, open_named
from atoll.cli.terminal import can_redraw, has_colour, live_view, width
from atoll.run_client import RunStatus
from atoll.telemetry import render_rows, render_status


def status(
    run: Annotated[str, RUN],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    data: Annotated[
        bool, typer.Option("--data", help="Print the rows of the run's data.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat until the run ends.")
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
    which islands are live.
    """
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
