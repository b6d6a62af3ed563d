"""`atoll events RUN`: print events, oldest first."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from typing import Annotated, Any

import typer

from atoll.cli.run_names import RUN, open_named
from atoll.cli.terminal import echo
from atoll.telemetry import Event
from atoll.telemetry.text import printable


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
    with closing(open_named(run)) as client:
        new_events = client.events()
        while True:
            for event in new_events:
                last = event.number
                _show(event, as_json=as_json)
            if not follow:
                return
            sys.stdout.flush()
            new_events = client.events(after=last, is_waiting=True)


def _show(event: Event, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(event.as_dict()))
        return
    time_of_day = time.strftime("%H:%M:%S", time.localtime(event.at_unix_s))
    fields = (f"{key}={printable(_brief(v))}" for key, v in event.fields.items())
    name, text = event.name, " ".join(fields)
    gap = " " * (18 - len(name)) if text else ""
    echo((f"{time_of_day}  ", ""), (name, "bold"), (f"{gap}{text}", ""))


def _brief(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)
