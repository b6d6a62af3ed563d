"""`atoll status RUN`: where a run is, who takes part, and whom it waits for."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer

from atoll.cli.asking import Asking
from atoll.cli.names import RUN
from atoll.cli.terminal import can_redraw, has_colour, width
from atoll.telemetry import render_status

EVERY_S = 2.0
CLEAR = "\x1b[H\x1b[2J\x1b[3J"


def status(
    run: Annotated[str, RUN],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Again and again, until the run ends.")
    ] = False,
) -> None:
    """Print where a run is, who takes part, and why it waits.

    With --json the document of GET /status, in one line each time with --watch.
    """
    with Asking.of(run) as asking:
        said = asking.get("/status")
        _show(said, as_json=as_json, is_again=watch)
        while watch and said["state"] != "ended":
            time.sleep(EVERY_S)
            said = asking.get("/status")
            _show(said, as_json=as_json, is_again=True)


def _show(said: dict[str, Any], *, as_json: bool, is_again: bool) -> None:
    if as_json:
        typer.echo(json.dumps(said, indent=None if is_again else 2))
        return
    page = render_status(said, width=width(), is_colour=has_colour())
    is_over = is_again and can_redraw(sys.stdout)
    typer.echo((CLEAR if is_over else "") + page, nl=False)
