"""The run that islands are launched for: there already, or served from now on.

A coordinator that `atoll launch` starts is a launch of its own, on this machine or by
the engine of the islands: it is started again if it dies, which loses nothing, and
`atoll ps` and `cancel` find it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import typer

from atoll.cli.launch_coordinator import facts_of
from atoll.cli.names import place_of, served
from atoll.cli.run_file import settings_of
from atoll.errors import SettingsError, UsageError
from atoll.launch.api import Inside, Launched, end_after, is_in_sight, launch_spec
from atoll.launch.launches import COORDINATOR, Book, Record
from atoll.launch.run_status import look_at, try_look
from atoll.launch.spec import IslandSpec
from atoll.settings import RunSettings
from atoll.settings.parsing import read_toml

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
