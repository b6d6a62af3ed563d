"""`atoll track RUN --to TRACKER`: write the curves of a run into an experiment tracker.

Events are the source: those of the coordinator's files first, then new ones. After
each batch the number of its last event is stored beside the user's credentials, so
that a second call continues; after a kill the last batch is written again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import typer

from atoll.cli.run_names import RUN, open_named
from atoll.errors import UsageError
from atoll.island.environment import credentials_from_environment
from atoll.run_client import RunClient
from atoll.security.private_files import private_directory, replace_private
from atoll.settings.reference import values_of
from atoll.telemetry import Event
from atoll.telemetry.event_files import MAX_PAGE
from atoll.telemetry.tensorboard import TensorBoardWriter, scalars_of
from atoll.telemetry.text import printable
from atoll.telemetry.trackers import TRACKERS, TrackedRun, Tracker
from atoll.telemetry.webhook import Webhook

MAX_CURSOR_BYTES = 4096
SINKS = (*TRACKERS, "tensorboard", "webhook")


def track(
    run: Annotated[str, RUN],
    to: Annotated[
        list[str],
        typer.Option(
            "--to",
            metavar="SINK",
            help="wandb:[ENTITY/]PROJECT, mlflow:EXPERIMENT, trackio:PROJECT[@SPACE], "
            "tensorboard:DIR, webhook:URL or webhook:env:NAME; repeatable.",
        ),
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Write the past, and do not follow the run.")
    ] = False,
) -> None:
    """Write the curves of a run into an experiment tracker.

    One process writes the whole run, until it ends or Ctrl-C; also for a run that has
    ended, from its directory. A second call continues after the last written event. A
    webhook receives bad findings only. Credentials are the tracker's.
    """
    with ExitStack() as stack:
        client = stack.enter_context(closing(open_named(run)))
        tracked = _described(client)
        sinks = [_opened(text, tracked) for text in to]
        for sink in sinks:
            stack.callback(sink.close)
        cursors = [Cursor.of(tracked.run_id, text) for text in to]
        events = _past(client, cursors)
        _write(events, sinks, cursors)
        kinds = ", ".join(text.partition(":")[0] for text in to)
        typer.echo(f"{len(events)} events of {printable(tracked.name)} to {kinds}")
        if not once:
            _follow(client, events[-1] if events else None, sinks, cursors)


class EventSink(Protocol):
    """Takes the events of a run in order. Close it."""

    def write(self, events: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


class TrackerSink:
    """Writes the points of events to a tracker."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.close = tracker.close

    def write(self, events: Sequence[Event]) -> None:
        for event in events:
            if points := list(scalars_of(event)):
                self._tracker.write(points, at_unix_s=event.at_unix_s)


class CallbackSink:
    """Calls a function with each event; its errors are printed, and nothing stops."""

    def __init__(
        self, function: Callable[[Event], None], close: Callable[[], None]
    ) -> None:
        self._function = function
        self.close = close

    def write(self, events: Sequence[Event]) -> None:
        for event in events:
            try:
                self._function(event)
            except Exception as exc:  # one sink's trouble is not that of the others
                typer.echo(f"atoll: {printable(exc)}", err=True)


def _described(client: RunClient) -> TrackedRun:
    status, settings = client.status(), client.settings()
    return TrackedRun(
        run_id=status.run,
        name=status.name,
        settings={row.key: row.value for row in values_of(settings)},
    )


def _opened(text: str, run: TrackedRun) -> EventSink:
    """Return the sink that an argument of `--to` names.

    Raises:
        UsageError: it names none, or its library is not installed.
    """
    kind, _, target = text.partition(":")
    if kind not in SINKS or not target:
        raise UsageError(
            f"--to {text!r} names no tracker. Write one of: "
            f"{', '.join(f'{name}:...' for name in SINKS)}."
        )
    if kind == "tensorboard":
        writer = TensorBoardWriter(Path(target))
        return CallbackSink(writer, writer.close)
    if kind == "webhook":
        return CallbackSink(Webhook(_url(target), run.name), lambda: None)
    return TrackerSink(TRACKERS[kind](run, target))


def _url(target: str) -> str:
    """Return the URL of a webhook, which a variable may hold: it is a secret."""
    prefix = "env:"
    if not target.startswith(prefix):
        return target
    name = target.removeprefix(prefix)
    if name not in os.environ:
        raise UsageError(f"The variable {name} of --to webhook:{target} is not set.")
    return os.environ[name]


@dataclass
class Cursor:
    """The last event that a sink has received, in a file of this user."""

    path: Path
    process: str = ""
    number: int = -1

    @classmethod
    def of(cls, run_id: str, sink: str) -> Cursor:
        """Return the stored cursor, or one before the first event."""
        key = hashlib.sha256(f"{run_id}\n{sink}".encode()).hexdigest()[:32]
        directory = credentials_from_environment().credentials.parent / "track"
        private_directory(directory)
        path = directory / f"{key}.json"
        try:
            with path.open("rb") as opened:
                document = json.loads(opened.read(MAX_CURSOR_BYTES))
            return cls(path, str(document["process"]), int(document["number"]))
        except FileNotFoundError:
            return cls(path)
        except (ValueError, LookupError, TypeError) as exc:
            raise UsageError(
                f"{path} is damaged: {exc!r}. Remove it to write the run from its "
                "first event again."
            ) from exc

    def is_at(self, event: Event) -> bool:
        """Return whether this is the last event that the sink has received."""
        return (event.process, event.number) == (self.process, self.number)

    def advance(self, event: Event) -> None:
        """Store that the sink has received an event."""
        self.process, self.number = event.process, event.number
        document = {"process": self.process, "number": self.number}
        replace_private(self.path, json.dumps(document).encode())


def _past(client: RunClient, cursors: Sequence[Cursor]) -> list[Event]:
    """Return the events since the earliest cursor, oldest first."""
    pages: list[list[Event]] = []
    missing = list(cursors)
    for events in _pages(client):
        pages.append(events)
        missing = [c for c in missing if not any(map(c.is_at, events))]
        if not missing:
            break
    return [event for events in reversed(pages) for event in events]


def _pages(client: RunClient) -> Iterator[list[Event]]:
    page = client.older_events(limit=MAX_PAGE)
    yield page.events
    while page.before:
        page = client.older_events(page.before, limit=MAX_PAGE)
        yield page.events


def _write(
    events: Sequence[Event], sinks: Sequence[EventSink], cursors: Sequence[Cursor]
) -> None:
    """Give each sink the events after its cursor, and advance it."""
    for sink, cursor in zip(sinks, cursors, strict=True):
        reached = [index for index, event in enumerate(events) if cursor.is_at(event)]
        rest = events[reached[-1] + 1 :] if reached else events
        if rest:
            sink.write(rest)
            cursor.advance(rest[-1])


def _follow(
    client: RunClient,
    last: Event | None,
    sinks: Sequence[EventSink],
    cursors: Sequence[Cursor],
) -> None:
    """Write new events until the run is over."""
    try:
        while not client.status().is_over:
            events = client.events(after=last, is_waiting=True)
            if events:
                last = events[-1]
                _write(events, sinks, cursors)
        _write(_past(client, cursors), sinks, cursors)  # those since the last request
    except KeyboardInterrupt:
        typer.echo("stopped; the same command continues", err=True)
