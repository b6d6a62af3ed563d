"""`atoll status RUN`: print a run's progress, its islands, and why it waits."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator
from contextlib import closing
from typing import Annotated, Any

import typer

from atoll.cli.coordinator_client import CoordinatorClient
from atoll.cli.run_names import RUN, StoreUrl, locate_run
from atoll.cli.store_run import WATCH_S, StatusView, StoreObserver
from atoll.cli.terminal import can_redraw, has_colour, width
from atoll.security import RunUrl
from atoll.telemetry import render_status

EVERY_S = 2.0
STORE_EVERY_S = 6.0
"""Each status of a store costs requests, and heartbeats are no more frequent."""

OVER = ("ended", "moved")
CLEAR = "\x1b[H\x1b[2J\x1b[3J"


def status(
    run: Annotated[str, RUN],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat until the run ends.")
    ] = False,
) -> None:
    """Print a run's progress, its islands, and why it waits.

    With --json prints the document of GET /status; with --watch on one line each time.
    A store is read directly: the command watches for some seconds at most to find out
    which islands are live.
    """
    location = locate_run(run)
    statuses = (
        _poll_store(location)
        if isinstance(location, StoreUrl)
        else _poll_coordinator(location)
    )
    with closing(statuses):
        for document in statuses:
            _show(document, as_json=as_json, is_watching=watch)
            if not watch or document["state"] in OVER:
                return


def _poll_coordinator(url: RunUrl) -> Generator[dict[str, Any]]:
    with CoordinatorClient.of(url) as client:
        yield client.get("/status")
        while True:
            time.sleep(EVERY_S)
            yield client.get("/status")


def _poll_store(location: StoreUrl) -> Generator[dict[str, Any]]:
    with StoreObserver(location.url) as observer:
        view = StatusView(observer)
        observer.watch(WATCH_S)
        while True:
            yield view.document()
            observer.pause(STORE_EVERY_S)
            observer.look()


def _show(document: dict[str, Any], *, as_json: bool, is_watching: bool) -> None:
    if as_json:
        typer.echo(json.dumps(document, indent=None if is_watching else 2))
        return
    page = render_status(document, width=width(), is_colour=has_colour())
    if "watched_s" in document:
        watched_s = document["watched_s"]
        page += f"\nWatched for {watched_s:.0f} s; times count from then on.\n"
    has_page_before = is_watching and can_redraw(sys.stdout)
    typer.echo((CLEAR if has_page_before else "") + page, nl=False)
