"""`atoll events RUN`: what happened, oldest first."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer

from atoll.cli.coordinator_client import Asking
from atoll.cli.run_names import RUN
from atoll.cli.terminal import painted
from atoll.telemetry.text import printable

WAIT_S = 40.0
"""For an answer that comes within 20 s, if only to say that nothing happened."""

HEAD = ("number", "at", "event")


def events(
    run: Annotated[str, RUN],
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what happens from now on.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
) -> None:
    """Print the last events of a run that its coordinator keeps."""
    last = 0
    with Asking.of(run) as asking:
        found = asking.get("/events")
        while True:
            for event in found:
                last = event["number"]
                _show(event, as_json=as_json)
            if not follow:
                return
            sys.stdout.flush()
            found = asking.get(f"/events?after={last}&wait=1", timeout_s=WAIT_S)


def _show(event: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(event))
        return
    at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
    fields = (
        f"{key}={printable(_brief(value))}"
        for key, value in event.items()
        if key not in HEAD
    )
    name, said = str(event["event"]), " ".join(fields)
    gap = " " * (18 - len(name)) if said else ""
    typer.echo(f"{at}  {painted(name, bold=True)}{gap}{said}")


def _brief(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)
