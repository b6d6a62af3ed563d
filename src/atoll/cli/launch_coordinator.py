"""The run that islands are launched for: there already, or served from now on.

A coordinator that `atoll launch` starts is a launch of its own, on this machine or by
the engine of the islands: it is started again if it dies, which loses nothing, and
`atoll ps` and `cancel` find it.

A run file that is served where its islands are, and no file of this user's is.

The coordinator is given a charter, which is made here: so its islands' pass is known
although nobody here may reach it.

The coordinator that was launched with islands, by the word of its engine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from atoll.cli.run_file import settings_of
from atoll.cli.run_names import Names, place_of, served
from atoll.errors import RemoteError, SettingsError, Unreachable, UsageError
from atoll.island.environment import surroundings_from_environment
from atoll.launch.api import (
    LAST_LINES,
    Inside,
    Launched,
    Patience,
    end_after,
    failures,
    is_in_sight,
    launch_spec,
)
from atoll.launch.base import Plan, Report, State
from atoll.launch.credentials import Charter, make_charter
from atoll.launch.launches import COORDINATOR, Book, Record
from atoll.launch.run_status import look_at, try_look
from atoll.launch.spec import IslandSpec
from atoll.security import Credentials
from atoll.settings import RunSettings
from atoll.settings.run_file import read_toml

LINGER_S = 60
"""How much longer a coordinator serves, so that whoever watches sees the end, and an
island that is just being started again is told of it and finishes. Whoever watches
lets it go before, once no island is left."""

UNSEEN_LINGER_S = 5
"""The same where its own end is all that anybody here hears of the run's."""


@dataclass(frozen=True)
class RunAt:
    """Where the run is, and who serves it if that was launched too."""

    url: str
    coordinator: Launched | None = None
    is_in_sight: bool = True
    """Whether it can be asked from here."""


@dataclass(frozen=True, kw_only=True)
class Serve:
    """How a run file is served."""

    directory: Path | None
    host: str
    assignments: Sequence[str]
    engine: str = "local"
    options: Mapping[str, str] = field(default_factory=dict)
    """Of that engine."""

    inside: Inside | None = None
    """How that engine runs a coordinator where no file of this user's is."""

    image: str | None = None
    requirements: Sequence[str] = ()


def until_end(linger_s: int) -> list[str]:
    """Return the words by which a coordinator goes when its run has ended."""
    return ["--until-end", "--linger", str(linger_s), "--json"]


def is_run_file(run: str) -> bool:
    """Return whether what a user called a run is a file that describes one."""
    return run.endswith(".toml") and "://" not in run


def run_at(run: str, n: int, serve: Serve) -> RunAt:
    """Return where the run is; a run file is served from now on.

    Raises:
        UsageError: nothing is known by that name, the file is wrong, or the run has
            ended.
        RemoteError: its coordinator did not start.
    """
    if not is_run_file(run):
        if serve.directory or serve.assignments:
            raise UsageError(
                f"--dir and --set are for a run file, and {run} is a run that is there "
                "already. Leave them out; `atoll control` changes what can change."
            )
        found = RunAt(str(place_of(run)))
        _require_in_sight(found.url)
        require_going(found.url)
        return found
    words, directory = serve_words(Path(run), n, serve)
    last = served(directory)
    if last is not None and last.is_open and try_look(last.url) is not None:
        typer.echo(f"atoll: {directory} is served already, at {last.url}.", err=True)
        require_going(last.url)
        return RunAt(last.url)
    return _served(words, directory, serve)


def serve_words(run_file: Path, n: int, serve: Serve) -> tuple[list[str], Path]:
    """Return the words of `atoll serve` for a run file, and the run's directory.

    Raises:
        SettingsError: the file is wrong, or is for a store.
    """
    settings = served_settings(run_file, serve.assignments)
    directory = (serve.directory or Path(f"{settings.run.name}.atoll")).absolute()
    words = ["serve", "--dir", str(directory), "--listen", serve.host]
    words += until_end(LINGER_S)
    if (directory / "journal").exists():
        return words, directory  # the run that it holds has its settings
    words.insert(1, str(run_file.absolute()))
    return words + set_words(run_file, n, serve.assignments), directory


def served_settings(run_file: Path, assignments: Sequence[str]) -> RunSettings:
    """Return the settings of a run that a coordinator is to serve.

    Raises:
        SettingsError: the file is wrong, or is for a store.
    """
    settings = settings_of(run_file, assignments)
    if settings.store.decider is not None:
        raise SettingsError(
            f"store.decider={settings.store.decider!r} is for a run in a store. Make "
            "it there, and launch for it: `atoll init URL RUN.toml`."
        )
    return settings


def set_words(run_file: Path, n: int, assignments: Sequence[str]) -> list[str]:
    """Return how a coordinator is told of settings that the run file does not have."""
    words: list[str] = []
    if not _says_start(run_file, assignments):
        words += ["--set", f"run.start_islands={n}"]
    for each in assignments:
        words += ["--set", each]
    return words


def _says_start(run_file: Path, assignments: Sequence[str]) -> bool:
    said = read_toml(run_file).get("run", {})
    is_set = any(each.startswith("run.start_islands=") for each in assignments)
    return is_set or "start_islands" in said


def serve_spec(words: Sequence[str], directory: Path) -> IslandSpec:
    """Return what is launched to serve a directory."""
    return IslandSpec(
        command=("-m", "atoll.cli", *words), run=str(directory), name=COORDINATOR
    )


def _served(words: Sequence[str], directory: Path, serve: Serve) -> RunAt:
    spec, book = serve_spec(words, directory), Book()
    launched = launch_spec(serve.engine, 1, spec, options=serve.options, book=book)
    try:
        url = str(facts_of(launched)["url"])
        handle = replace(launched.handle, run=url)
        book.keep(Record(handle, spec))
        found = RunAt(url, Launched(handle, launched.launcher))
        require_going(url)
        return found
    except BaseException as exc:
        end_after(exc, launched)
        raise


def _require_in_sight(url: str) -> None:
    if not is_in_sight(url):
        raise UsageError(
            f"The coordinator of {url} was launched where only its islands reach it, "
            "so that nobody here can follow the run. For more islands: atoll scale "
            f"{url} N"
        )


def require_going(url: str) -> None:
    """Return if a run goes on.

    Raises:
        UsageError: it has ended.
        Unreachable: nobody answers there.
    """
    look = look_at(url)
    if look.has_ended:
        raise UsageError(
            f"The run {look.run} has ended with round {look.round}. Begin another with "
            f"--dir, or let it go on: atoll control {look.run} set run.end_rounds=N"
        )


LISTEN_HERE = "127.0.0.1"
"""What `--listen` is without."""

INSIDE_STARTS_S = 900.0
"""How long one may take that an engine calls running: images are fetched, and pip may
have much to install."""

INSIDE_LOOK_S = 1.0


def plan_inside(run_file: Path, n: int, serve: Serve) -> Plan:
    """Return what would be submitted for the coordinator.

    Raises:
        SettingsError: the file is wrong, or is for a store.
        UsageError: the engine cannot serve it so.
    """
    assert serve.inside is not None
    return serve.inside.plan(_inside_spec(run_file, n, serve))


def run_inside(run: str, n: int, serve: Serve) -> RunAt:
    """Return where the run of a file is, which is served from now on.

    Raises:
        RemoteError: its coordinator did not start.
        Unreachable: it runs where this machine should reach it, and does not.
    """
    assert serve.inside is not None
    run_file, book = Path(run), Book()
    spec = _inside_spec(run_file, n, serve)
    charter = make_charter(spec.run, run_file.read_text())
    launched = serve.inside.launch(spec, charter, book)
    try:
        facts = facts_of(launched, starts_s=INSIDE_STARTS_S, look_s=INSIDE_LOOK_S)
        is_in_sight = serve.inside.serving.is_in_sight
        url = str(facts["url"]) if is_in_sight else launched.handle.run
        handle = replace(launched.handle, run=url)
        book.keep(Record(handle, spec))
        _remember_inside(url, charter, (str(facts["run"]), str(facts["name"])))
        if is_in_sight:
            require_going(url)
        return RunAt(url, Launched(handle, launched.launcher), is_in_sight)
    except BaseException as exc:
        end_after(exc, launched)
        raise


def _inside_spec(run_file: Path, n: int, serve: Serve) -> IslandSpec:
    assert serve.inside is not None
    if serve.host != LISTEN_HERE:
        raise UsageError(
            f"--listen {serve.host} is for a run that is served here, and on "
            f"{serve.engine} a coordinator has its place's own address. Leave it out."
        )
    if serve.directory is not None and not serve.directory.is_absolute():
        raise UsageError(
            f"--dir {serve.directory} is where the coordinator of {serve.engine} runs, "
            "where nothing is beside it. Give its path from '/' on."
        )
    settings = served_settings(run_file, serve.assignments)
    linger_s = LINGER_S if serve.inside.serving.is_in_sight else UNSEEN_LINGER_S
    return serve.inside.spec(
        settings.run.name,
        [*until_end(linger_s), *set_words(run_file, n, serve.assignments)],
        directory=None if serve.directory is None else str(serve.directory),
        image=serve.image,
        requirements=serve.requirements,
    )


def _remember_inside(url: str, charter: Charter, names: tuple[str, ...]) -> None:
    """Let this user's commands find the run, and reach it from where that can be."""
    around = surroundings_from_environment()
    known = Credentials(around.credentials)
    known.remember(url, pin=charter.pin, tokens=charter.tokens)
    for name in names:
        Names(around).remember(name, url)


STARTS_S = 90.0
LOOK_S = 0.1
ENDS_S = 120.0
"""How long one that cannot be asked may take to end after its islands: it lingers, some
that went without a word live for a lease, and its engine has to notice."""


class CoordinatorLaunch:
    """Watches a launch that serves the run until its end."""

    def __init__(self, launched: Launched) -> None:
        self.launched = launched
        self._is_elsewhere = launched.launcher.traits.is_elsewhere
        self.reports: tuple[Report, ...] = ()
        self._told_at_s: float | None = None

    @property
    def has_finished(self) -> bool:
        """Whether the run has ended: `serve --until-end` finishes for no other cause.

        Elsewhere only its leader could tell it to go, and would say so; on machines
        that this user works on anybody could, for which it ends with 0 as well.
        """
        return self._is_elsewhere and self._is(State.FINISHED)

    @property
    def is_gone(self) -> bool:
        """Whether it has not finished, and nobody can serve its run again.

        Where its directory is this user's somebody can: `atoll serve --dir`.
        """
        is_over = self._is(State.FAILED, State.LOST, State.CANCELLED)
        return self._is_elsewhere and is_over

    @property
    def is_over(self) -> bool:
        """Whether nothing becomes of it any more."""
        return any(each.state.is_over for each in self.reports)

    def _is(self, *states: State) -> bool:
        return any(each.state in states for each in self.reports)

    def look(self) -> list[str]:
        """Ask its engine, and return what there is to tell.

        What is over stays as it was: an engine may forget it before its islands.
        """
        before = self.reports[0] if self.reports else None
        if before is None or not before.state.is_over:
            self.reports = self.launched.poll()
        return change(before, self.reports[0])

    def end(self) -> list[str]:
        """Let it go, and return what there is to tell if it stays all the same.

        It is told once: an engine may take it for another order if that is said again.
        """
        if self._told_at_s is None:
            self.launched.cancel()
            self._told_at_s = time.monotonic()
        self.look()
        if self.is_over or time.monotonic() < self._told_at_s + ENDS_S:
            return []
        handle = self.launched.handle
        return [
            f"atoll: {handle.engine} was told to end {handle.id}, which runs still. "
            "Look again: atoll ps"
        ]


def facts_of(
    launched: Launched, *, starts_s: float = STARTS_S, look_s: float = LOOK_S
) -> dict[str, Any]:
    """Return what a coordinator says of itself, once it listens.

    Raises:
        RemoteError: it did not start, within `starts_s` from when it runs on.
        Unreachable: its engine has not answered for too long.
    """
    until_s, patience = time.monotonic() + starts_s, Patience()
    before, said = None, list[str]()
    while time.monotonic() < until_s:
        report, said = _seen(launched, patience) or (None, said)
        if report is None or report.state is State.PENDING:
            # An engine may be full, or away, for as long as it is.
            until_s = time.monotonic() + starts_s
        _tell_waiting(before, report)
        for line in said:
            if (facts := _facts(line)) is not None:
                _tell_notes(said)
                return facts
        if report is not None and (report.restarts or report.state.is_over):
            break
        before = report or before
        time.sleep(look_s)
    tail = " ".join(line for line in said[-5:] if not line.startswith("atoll: coord"))
    raise RemoteError(f"The coordinator did not start: {tail or 'it said nothing'}")


def _seen(launched: Launched, patience: Patience) -> tuple[Report, list[str]] | None:
    """Return what became of a coordinator and what it has said; None if none tells."""
    try:
        (report,) = launched.poll()
        said = launched.logs()[report.name]
        patience.answered()
        return report, said
    except Unreachable as exc:
        for line in patience.bear(exc):
            typer.echo(line, err=True)
        return None


def _tell_waiting(before: Report | None, now: Report | None) -> None:
    if now is None or now.state is not State.PENDING:
        return
    if now.reason not in ("", before.reason if before else ""):
        typer.echo(f"atoll: {now.name} waits: {now.reason}", err=True)


def _facts(line: str) -> dict[str, Any] | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) and "url" in said else None


def _tell_notes(said: Sequence[str]) -> None:
    for line in said:
        if line.startswith("atoll: "):
            typer.echo(line, err=True)


def failures_of(launched: Launched, reports: Sequence[Report]) -> Iterator[str]:
    """Yield why those of a launch failed that did, with their last words."""

    def last_lines(report: Report) -> list[str]:
        try:
            return launched.launcher.logs(launched.handle, report.index)[-LAST_LINES:]
        except Unreachable as exc:
            return [f"(its log cannot be read: {exc})"]

    yield from failures(reports, last_lines)


def change(before: Report | None, now: Report) -> list[str]:
    """Return the line that tells of a new state, if it is one."""
    if before is not None and (before.state, before.restarts) == (
        now.state,
        now.restarts,
    ):
        return []
    why = f": {now.reason}" if now.reason else ""
    life = f" (restart {now.restarts})" if now.restarts else ""
    return [f"{now.name} is {now.state.value}{life}{why}"]
