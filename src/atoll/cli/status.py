"""`atoll status RUN`: where a run is, who takes part, and whom it waits for."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator
from contextlib import closing
from typing import Annotated, Any

import typer

from atoll.cli.coordinator_client import Asking
from atoll.cli.run_names import RUN, StoreUrl, place_of
from atoll.cli.store_run import WATCH_S, Observing, StatusView
from atoll.cli.terminal import can_redraw, has_colour, width
from atoll.security import RunUrl
from atoll.telemetry import render_status

EVERY_S = 2.0
STORE_EVERY_S = 6.0
"""A look at a store costs requests, and islands beat no more often."""

OVER = ("ended", "moved")
CLEAR = "\x1b[H\x1b[2J\x1b[3J"


def status(
    run: Annotated[str, RUN],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Again and again, until the run ends.")
    ] = False,
) -> None:
    """Print where a run is, who takes part, and why it waits.

    With --json the document of GET /status, in one line each time with --watch. In a
    store there is nobody to ask: who is live is found out by watching, for some
    seconds at most.
    """
    place = place_of(run)
    looks = _in_store(place) if isinstance(place, StoreUrl) else _by_asking(place)
    with closing(looks):
        for said in looks:
            _show(said, as_json=as_json, is_again=watch)
            if not watch or said["state"] in OVER:
                return


def _by_asking(url: RunUrl) -> Generator[dict[str, Any]]:
    with Asking.of(url) as asking:
        yield asking.get("/status")
        while True:
            time.sleep(EVERY_S)
            yield asking.get("/status")


def _in_store(place: StoreUrl) -> Generator[dict[str, Any]]:
    with Observing(place.url) as observing:
        view = StatusView(observing)
        observing.watch(WATCH_S)
        while True:
            yield view.document()
            observing.pause(STORE_EVERY_S)
            observing.look()


def _show(said: dict[str, Any], *, as_json: bool, is_again: bool) -> None:
    if as_json:
        typer.echo(json.dumps(said, indent=None if is_again else 2))
        return
    page = render_status(said, width=width(), is_colour=has_colour())
    if "watched_s" in said:
        page += f"\nWatched for {said['watched_s']:.0f} s; times count from then on.\n"
    is_over = is_again and can_redraw(sys.stdout)
    typer.echo((CLEAR if is_over else "") + page, nl=False)
