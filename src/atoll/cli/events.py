"""`atoll events RUN`: print events, oldest first."""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import closing
from typing import Annotated, Any

import typer

from atoll.cli.run_names import RUN, open_named
from atoll.cli.terminal import echo
from atoll.errors import UsageError
from atoll.run_client import RunClient
from atoll.telemetry import Event
from atoll.telemetry.event_files import MAX_PAGE
from atoll.telemetry.text import printable


def events(
    run: Annotated[str, RUN],
    follow: Annotated[
        bool, typer.Option("--follow", help="Continue with new events as they happen.")
    ] = False,
    since: Annotated[
        str | None,
        typer.Option(metavar="SPAN", help="Print all since then, such as 2h or 3d."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
) -> None:
    """Print the last 1,000 events of a run, or all since a time.

    Oldest first. They are read from the files of its coordinator, also after a restart
    and after the end of the run.
    """
    with closing(open_named(run)) as client:
        shown = _last(client, since_s=None if since is None else _seconds(since))
        for event in shown:
            _show(event, as_json=as_json)
        last = shown[-1] if shown else None
        while follow:
            sys.stdout.flush()
            for event in client.events(after=last, is_waiting=True):
                last = event
                _show(event, as_json=as_json)


_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d{1,9}) ?(s|min|h|d)", text)
    if match is None:
        raise UsageError(
            f"--since {text!r} is no span of time. Write a number and s, min, h or d, "
            "such as 2h."
        )
    return int(match[1]) * _UNITS[match[2]]


def _last(client: RunClient, *, since_s: float | None) -> list[Event]:
    """Return the last events, oldest first; all since a time, if it is given."""
    if since_s is None:
        return client.events()
    from_unix_s = time.time() - since_s
    page = client.older_events(limit=MAX_PAGE)
    pages = [page.events]
    while page.before and (not page.events or page.events[0].at_unix_s >= from_unix_s):
        page = client.older_events(page.before, limit=MAX_PAGE)
        pages.append(page.events)
    return [
        event
        for events in reversed(pages)
        for event in events
        if event.at_unix_s >= from_unix_s
    ]


def _show(event: Event, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(event.as_dict()))
        return
    time_of_day = time.strftime("%H:%M:%S", time.localtime(event.at_unix_s))
    fields = (
        f"{printable(key)}={printable(_brief(v))}" for key, v in event.fields.items()
    )
    name, text = printable(event.name), " ".join(fields)
    gap = " " * (18 - len(name)) if text else ""
    echo((f"{time_of_day}  ", ""), (name, "bold"), (f"{gap}{text}", ""))


def _brief(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)
