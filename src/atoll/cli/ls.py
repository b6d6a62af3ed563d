"""`atoll ls`: list the runs that this user serves, has joined or has launched.

A run is known by the names that commands remember, and by the records of launches. The
command requests the status of all runs simultaneously, with one timeout; a run that
does not answer in that time is listed without its progress.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.cli.run_names import HTTP_PREFIXES, served_directory
from atoll.cli.terminal import console, table, width
from atoll.errors import AtollError
from atoll.island.environment import credentials_from_environment
from atoll.launch.launches import LaunchRecords, Record
from atoll.run_client import open_run
from atoll.run_client.location import RunNames, read_address
from atoll.security import Credentials, Role
from atoll.telemetry import load_past
from atoll.telemetry.text import (
    NO_VALUE,
    format_count,
    format_share,
    format_span,
    printable,
)

LOOK_S = 3.0
"""Timeout of all statuses together."""

REMOVED, NOT_SERVED, NO_ANSWER = "removed", "not served", "no answer"
"""A run whose directory is removed, one without a coordinator, and a silent one."""


@dataclass
class KnownRun:
    """A run that this user can name, and its answer."""

    url: str
    names: list[str] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    """serve, operate or join at a coordinator; store."""

    directory: Path | None = None
    """Of a run that this user serves on this machine."""

    launches: list[Record] = field(default_factory=list)
    state: str = NO_ANSWER
    problem: str = ""
    document: Mapping[str, Any] = field(default_factory=dict)
    """The status; of a run that is not served the keys that its events have."""

    @property
    def name(self) -> str:
        """The name that people gave it: the shortest, since the id begins with it."""
        return min(self.names, key=len, default=NO_VALUE)

    def look(self) -> None:
        """Request the status of the run."""
        try:
            self.state, self.document = self._answer()
        except AtollError as exc:
            self.problem = str(exc)

    def _answer(self) -> tuple[str, Mapping[str, Any]]:
        if self.directory is not None:
            address = read_address(self.directory)
            # Another run in the directory has another address: this run is removed.
            if address is None or address.url != self.url:
                return REMOVED, {}
            if not address.is_open:
                return _recorded(self.directory)
        with closing(open_run(self.url)) as client:
            status = client.status()
        return status.state, status.document

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of the run."""
        keys = ("round", "last_round", "tokens", "tokens_per_s", "ends_unix_s")
        islands = self.document.get("islands")
        return {
            "url": self.url,
            "names": self.names,
            "roles": self.roles,
            "directory": str(self.directory) if self.directory else None,
            "launches": [record.handle.id for record in self.launches],
            "state": self.state,
            "problem": self.problem or None,
            **{key: self.document.get(key) for key in keys},
            "islands": None if islands is None else len(islands),
            "live": None if islands is None else _live(islands),
        }


def ls(
    is_all: Annotated[
        bool, typer.Option("--all", help="Also list runs whose directory is removed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the runs that this user serves, has joined or has launched.

    The command waits three seconds at most for their statuses. The progress of a run
    that is not served is read from its events.
    """
    runs = looked_at(known_runs(), timeout_s=LOOK_S)
    if not is_all:
        runs = [run for run in runs if run.state != REMOVED]
    if as_json:
        typer.echo(json.dumps([run.as_dict() for run in runs], indent=2))
        return
    if not runs:
        typer.echo("No runs are known here. Start one: atoll serve run.toml")
        return
    rows = [HEAD, *(_row(run) for run in sorted(runs, key=_rank))]
    if width(AT_MIN_WIDTH) < AT_MIN_WIDTH:
        rows = [row[:-1] for row in rows]
    console(sys.stdout).print(table(rows, numbers=NUMBERS))


def known_runs() -> list[KnownRun]:
    """Return the runs that this user has named or launched, without a request."""
    paths = credentials_from_environment()
    runs: dict[str, KnownRun] = {}
    names = RunNames(paths)
    for name in names.all():
        if url := names.find(name):
            runs.setdefault(url, KnownRun(url)).names.append(name)
    for record in LaunchRecords().records():
        url = record.handle.run
        runs.setdefault(url, KnownRun(url)).launches.append(record)
    credentials = Credentials(paths.credentials)
    for run in runs.values():
        _note_role(run, credentials)
    return list(runs.values())


def looked_at(runs: Sequence[KnownRun], *, timeout_s: float) -> list[KnownRun]:
    """Request all statuses simultaneously; silent runs stay unchanged."""
    threads = [threading.Thread(target=run.look, daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    return [*runs]


def _note_role(run: KnownRun, credentials: Credentials) -> None:
    """Add the role that this user's credentials give, and the directory of a server."""
    if not run.url.startswith(HTTP_PREFIXES):
        run.roles.append("store")
        return
    try:
        credential = credentials.find(run.url)
    except AtollError:
        return  # the look at the run has the error
    tokens = credential.tokens if credential else {}
    run.directory = served_directory(credential)
    if run.directory is not None:
        run.roles.append("serve")
    elif tokens:
        run.roles.append("operate" if Role.OPERATOR in tokens else "join")


def _recorded(directory: Path) -> tuple[str, dict[str, Any]]:
    """Return state and progress of a run without a coordinator, by its events."""
    past = load_past(directory)
    last = [note["event"] for note in past.notes if note["event"] in _ENDS]
    state = "ended" if last[-1:] == ["run_ended"] else NOT_SERVED
    return state, {"round": past.round, "tokens": past.tokens}


_ENDS = ("run_ended", "epoch_set")
"""Events that end a run, and that let it continue."""

HEAD = ("run", "state", "round", "islands", "tokens/s", "ends in", "as", "at")
NUMBERS = ("round", "islands", "tokens/s")
AT_MIN_WIDTH = 120
"""On a narrower terminal the last column, with directories and URLs, is left out."""


def _row(run: KnownRun) -> tuple[str, ...]:
    document, islands = run.document, run.document.get("islands")
    return (
        printable(run.name),
        printable(run.state),
        _round(document),
        NO_VALUE if islands is None else f"{_live(islands)} of {len(islands)}",
        format_count(document.get("tokens_per_s")),
        _end(document),
        ", ".join([*run.roles, *_engines(run)]) or NO_VALUE,
        printable(run.directory or run.url),
    )


def _round(document: Mapping[str, Any]) -> str:
    number, last = document.get("round"), document.get("last_round")
    if number is None:
        return NO_VALUE
    return (
        f"{number} of {last} ({format_share(number / last)})" if last else f"{number}"
    )


def _end(document: Mapping[str, Any]) -> str:
    ends_unix_s = document.get("ends_unix_s")
    if ends_unix_s is None:
        return NO_VALUE
    return format_span(max(0.0, ends_unix_s - document["now_unix_s"]))


def _engines(run: KnownRun) -> list[str]:
    return sorted({f"on {record.handle.engine}" for record in run.launches})


def _live(islands: Sequence[Mapping[str, Any]]) -> int:
    return sum(island["state"] == "live" for island in islands)


def _rank(run: KnownRun) -> tuple[int, str]:
    """Sort the runs that answer first, then by name."""
    order = {"ended": 1, NOT_SERVED: 2, NO_ANSWER: 3, REMOVED: 4}
    return order.get(run.state, 0), run.name
