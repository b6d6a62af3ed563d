"""`atoll events RUN`: print events, oldest first."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer

from atoll.cli.coordinator_client import CoordinatorClient
from atoll.cli.run_names import RUN
from atoll.cli.terminal import painted
from atoll.telemetry.text import printable

WAIT_S = 40.0
"""Timeout of a long poll, which the coordinator answers within 20 s."""

HEAD = ("number", "at", "event")


def events(
    run: Annotated[str, RUN],
    follow: Annotated[
        bool, typer.Option("--follow", help="Continue with new events as they happen.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
) -> None:
    """Print the last events of a run that its coordinator keeps."""
    last = 0
    with CoordinatorClient.of(run) as client:
        new_events = client.get("/events")
        while True:
            for event in new_events:
                last = event["number"]
                _show(event, as_json=as_json)
            if not follow:
                return
            sys.stdout.flush()
            new_events = client.get(f"/events?after={last}&wait=1", timeout_s=WAIT_S)


def _show(event: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(event))
        return
    time_of_day = time.strftime("%H:%M:%S", time.localtime(event["at"]))
    fields = (
        f"{key}={printable(_brief(value))}"
        for key, value in event.items()
        if key not in HEAD
    )
    name, text = str(event["event"]), " ".join(fields)
    gap = " " * (18 - len(name)) if text else ""
    typer.echo(f"{time_of_day}  {painted(name, bold=True)}{gap}{text}")


def _brief(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)
