"""The coordinator of a launch: the run to launch islands for, and its server.

`find_or_serve` returns a run that exists, or serves a run file by `atoll serve`. That
coordinator is its own launch, on this machine or by the engine of the islands: it is
restarted if it dies, which loses nothing, and `atoll ps` and `cancel` find it.

`serve_inside` serves a run file on the islands' engine, where this user has no files.
The charter that the coordinator receives is made on this machine: so the islands'
credentials are known here, even if this machine cannot reach the coordinator.

`CoordinatorLaunch` watches such a coordinator by the reports of its engine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from atoll.cli.run_file import settings_of
from atoll.cli.run_names import locate_run
from atoll.errors import RemoteError, SettingsError, Unreachable, UsageError
from atoll.island.environment import credentials_from_environment
from atoll.launch import api
from atoll.launch.base import LaunchPlan, Report, State
from atoll.launch.credentials import CoordinatorFiles, make_coordinator_files
from atoll.launch.launches import COORDINATOR, LaunchRecords, Record
from atoll.launch.spec import IslandSpec
from atoll.run_client import open_run, try_status
from atoll.run_client.location import RunNames, read_address
from atoll.security import Credentials
from atoll.settings import RunSettings
from atoll.settings.run_file import read_toml

LINGER_S = 60
"""How long a coordinator serves after the end of its run, so that observers see the
end, and an island that is being restarted learns of it and finishes. `LaunchFollower`
ends the coordinator earlier, once no island is left."""

UNSEEN_LINGER_S = 5
"""The same for a coordinator out of reach: its exit is the only sign of the end."""


@dataclass(frozen=True)
class RunTarget:
    """The run to launch islands for, and its coordinator if that was launched too."""

    url: str
    coordinator: api.Launched | None = None
    is_reachable: bool = True
    """Whether this machine can reach its coordinator."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options for serving a run file."""

    directory: Path | None
    host: str
    assignments: Sequence[str]
    engine: str = "local"
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of that engine."""

    inside: api.EngineCoordinator | None = None
    """How that engine runs a coordinator without files of this user."""

    image: str | None = None
    requirements: Sequence[str] = ()


def until_end_arguments(linger_s: int) -> list[str]:
    """Return the arguments that end a coordinator when its run has ended."""
    return ["--until-end", "--linger", str(linger_s), "--json"]


def is_run_file(run: str) -> bool:
    """Return whether `run` is the path of a run file, not a name or a URL."""
    return run.endswith(".toml") and "://" not in run


def find_or_serve(run: str, n: int, serve: ServeOptions) -> RunTarget:
    """Return the run with its address; serve it first if `run` is a run file.

    Raises:
        UsageError: the name is unknown here, the file is wrong, or the run has ended.
        RemoteError: its coordinator did not start.
    """
    if not is_run_file(run):
        if serve.directory or serve.assignments:
            raise UsageError(
                f"--dir and --set are for a run file, and {run} is a run that exists "
                "already. Leave them out; `atoll control` changes its settings."
            )
        target = RunTarget(str(locate_run(run)))
        _require_in_sight(target.url)
        require_unfinished(target.url)
        return target
    argv, directory = serve_argv(Path(run), n, serve)
    last = read_address(directory)
    if last is not None and last.is_open and try_status(last.url) is not None:
        typer.echo(f"atoll: {directory} is served already, at {last.url}.", err=True)
        require_unfinished(last.url)
        return RunTarget(last.url)
    return _launch_coordinator(argv, directory, serve)


def serve_argv(run_file: Path, n: int, serve: ServeOptions) -> tuple[list[str], Path]:
    """Return the arguments of `atoll serve` for a run file, and the run's directory.

    Raises:
        SettingsError: the file is wrong, or is for a store.
    """
    settings = served_settings(run_file, serve.assignments)
    directory = (serve.directory or Path(f"{settings.run.name}.atoll")).absolute()
    argv = ["serve", "--dir", str(directory), "--listen", serve.host]
    argv += until_end_arguments(LINGER_S)
    if (directory / "journal").exists():
        return argv, directory  # the run that it holds has its settings
    argv.insert(1, str(run_file.absolute()))
    return argv + set_arguments(run_file, n, serve.assignments), directory


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


def set_arguments(run_file: Path, n: int, assignments: Sequence[str]) -> list[str]:
    """Return the `--set` arguments for settings that the run file does not have."""
    arguments: list[str] = []
    if not _sets_start_islands(run_file, assignments):
        arguments += ["--set", f"run.start_islands={n}"]
    for assignment in assignments:
        arguments += ["--set", assignment]
    return arguments


def _sets_start_islands(run_file: Path, assignments: Sequence[str]) -> bool:
    run_table = read_toml(run_file).get("run", {})
    is_set = any(text.startswith("run.start_islands=") for text in assignments)
    return is_set or "start_islands" in run_table


def serve_spec(argv: Sequence[str], directory: Path) -> IslandSpec:
    """Return the specification of a launch that serves a directory."""
    return IslandSpec(
        command=("-m", "atoll.cli", *argv), run=str(directory), name=COORDINATOR
    )


def _launch_coordinator(
    argv: Sequence[str], directory: Path, serve: ServeOptions
) -> RunTarget:
    spec, launch_records = serve_spec(argv, directory), LaunchRecords()
    launched = api.launch_spec(
        serve.engine, 1, spec, options=serve.options, launch_records=launch_records
    )
    try:
        url = str(wait_until_serving(launched)["url"])
        handle = replace(launched.handle, run=url)
        launch_records.keep(Record(handle, spec))
        target = RunTarget(url, api.Launched(handle, launched.launcher))
        require_unfinished(url)
        return target
    except BaseException as exc:
        api.end_after(exc, launched)
        raise


def _require_in_sight(url: str) -> None:
    if not api.is_reachable(url):
        raise UsageError(
            f"The coordinator of {url} was launched where only its islands reach it, "
            "so this machine cannot follow the run. For more islands: atoll scale "
            f"{url} N"
        )


def require_unfinished(url: str) -> None:
    """Raise unless a run is unfinished.

    Raises:
        UsageError: it has ended.
        Unreachable: its coordinator or store does not answer.
    """
    with closing(open_run(url)) as client:
        status = client.status()
    if status.has_ended:
        raise UsageError(
            f"The run {status.run} has ended with round {status.round}. Begin another "
            f"with --dir, or extend it: atoll control {status.run} set run.end_rounds=N"
        )


LISTEN_HERE = "127.0.0.1"
"""The default of `--listen`."""

INSIDE_STARTS_S = 900.0
"""How long a coordinator may take to serve after its engine reports it running: the
engine fetches images, and pip may install many packages."""

INSIDE_LOOK_S = 1.0


def plan_inside(run_file: Path, n: int, serve: ServeOptions) -> LaunchPlan:
    """Return the plan of the coordinator's launch.

    Raises:
        SettingsError: the file is wrong, or is for a store.
        UsageError: the engine cannot serve it with these options.
    """
    assert serve.inside is not None
    return serve.inside.plan(_inside_spec(run_file, n, serve))


def serve_inside(run: str, n: int, serve: ServeOptions) -> RunTarget:
    """Serve a run file on the islands' engine, and return the run.

    Raises:
        RemoteError: its coordinator did not start.
        Unreachable: this machine should reach it, and does not.
    """
    assert serve.inside is not None
    run_file, launch_records = Path(run), LaunchRecords()
    spec = _inside_spec(run_file, n, serve)
    charter = make_coordinator_files(spec.run, run_file.read_text())
    launched = serve.inside.launch(spec, charter, launch_records)
    try:
        facts = wait_until_serving(
            launched, starts_s=INSIDE_STARTS_S, look_s=INSIDE_LOOK_S
        )
        is_reachable = serve.inside.serving.is_reachable
        url = str(facts["url"]) if is_reachable else launched.handle.run
        handle = replace(launched.handle, run=url)
        launch_records.keep(Record(handle, spec))
        _remember_inside(url, charter, (str(facts["run"]), str(facts["name"])))
        if is_reachable:
            require_unfinished(url)
        return RunTarget(url, api.Launched(handle, launched.launcher), is_reachable)
    except BaseException as exc:
        api.end_after(exc, launched)
        raise


def _inside_spec(run_file: Path, n: int, serve: ServeOptions) -> IslandSpec:
    assert serve.inside is not None
    if serve.host != LISTEN_HERE:
        raise UsageError(
            f"--listen {serve.host} is for a run that is served here, and on "
            f"{serve.engine} a coordinator has its host's address. Leave it out."
        )
    if serve.directory is not None and not serve.directory.is_absolute():
        raise UsageError(
            f"--dir {serve.directory} is a path on the coordinator's host on "
            f"{serve.engine}, and relative to nothing there. Give an absolute path."
        )
    settings = served_settings(run_file, serve.assignments)
    linger_s = LINGER_S if serve.inside.serving.is_reachable else UNSEEN_LINGER_S
    return serve.inside.spec(
        settings.run.name,
        [
            *until_end_arguments(linger_s),
            *set_arguments(run_file, n, serve.assignments),
        ],
        directory=None if serve.directory is None else str(serve.directory),
        image=serve.image,
        requirements=serve.requirements,
    )


def _remember_inside(
    url: str, charter: CoordinatorFiles, names: tuple[str, ...]
) -> None:
    """Let this user's commands find the run by its names, with its credentials."""
    paths = credentials_from_environment()
    credentials = Credentials(paths.credentials)
    credentials.remember(url, pin=charter.pin, tokens=charter.tokens)
    for name in names:
        RunNames(paths).remember(name, url)


STARTS_S = 90.0
LOOK_S = 0.1
ENDS_S = 120.0
"""How long a coordinator out of reach may take to end after its islands: it lingers,
islands that died live until their leases end, and its engine has to notice."""


class CoordinatorLaunch:
    """Watches a launch that serves the run until its end."""

    def __init__(self, launched: api.Launched) -> None:
        self.launched = launched
        self._is_elsewhere = launched.launcher.traits.is_elsewhere
        self.reports: tuple[Report, ...] = ()
        self._cancelled_at_s: float | None = None

    @property
    def has_finished(self) -> bool:
        """Whether the run has ended: `serve --until-end` finishes for no other cause.

        On another machine only its supervisor stops it, and reports that. On this
        user's machines a signal can stop it, and it exits with 0 then as well, so that
        its exit proves nothing.
        """
        return self._is_elsewhere and self._is(State.FINISHED)

    @property
    def is_gone(self) -> bool:
        """Whether it has not finished, and cannot be restarted.

        In a directory of this user it can be: `atoll serve --dir`.
        """
        is_over = self._is(State.FAILED, State.LOST, State.CANCELLED)
        return self._is_elsewhere and is_over

    @property
    def is_over(self) -> bool:
        """Whether its launch has ended."""
        return any(report.state.is_over for report in self.reports)

    def _is(self, *states: State) -> bool:
        return any(report.state in states for report in self.reports)

    def look(self) -> list[str]:
        """Poll its engine, and return the lines to print.

        A final report is kept: an engine may forget a launch before its islands end.
        """
        before = self.reports[0] if self.reports else None
        if before is None or not before.state.is_over:
            self.reports = self.launched.poll()
        return change_lines(before, self.reports[0])

    def end(self) -> list[str]:
        """Cancel it, and return the lines to print if it does not end in time.

        Cancels once only: an engine may take a second request for a stronger one.
        """
        if self._cancelled_at_s is None:
            self.launched.cancel()
            self._cancelled_at_s = time.monotonic()
        self.look()
        if self.is_over or time.monotonic() < self._cancelled_at_s + ENDS_S:
            return []
        handle = self.launched.handle
        return [
            f"atoll: {handle.id} is cancelled on {handle.engine}, and still runs. "
            "Check again: atoll ps"
        ]


def wait_until_serving(
    launched: api.Launched, *, starts_s: float = STARTS_S, look_s: float = LOOK_S
) -> dict[str, Any]:
    """Return the facts that a coordinator prints once it listens.

    Raises:
        RemoteError: it did not start within `starts_s`, counted while it runs.
        Unreachable: its engine has not answered for too long.
    """
    until_s, patience = time.monotonic() + starts_s, api.PollRetry()
    before, log_lines = None, list[str]()
    while time.monotonic() < until_s:
        report, log_lines = _poll(launched, patience) or (None, log_lines)
        if report is None or report.state is State.PENDING:
            # An engine may be full, or unreachable, for any time.
            until_s = time.monotonic() + starts_s
        _print_waiting(before, report)
        for line in log_lines:
            if (facts := _parse_facts(line)) is not None:
                _print_notes(log_lines)
                return facts
        if report is not None and (report.restarts or report.state.is_over):
            break
        before = report or before
        time.sleep(look_s)
    tail = " ".join(
        line for line in log_lines[-5:] if not line.startswith("atoll: coord")
    )
    raise RemoteError(f"The coordinator did not start: {tail or 'it printed nothing'}")


def _poll(
    launched: api.Launched, patience: api.PollRetry
) -> tuple[Report, list[str]] | None:
    """Return the coordinator's report and log; None if its engine does not answer."""
    try:
        (report,) = launched.poll()
        log_lines = launched.logs()[report.name]
        patience.answered()
        return report, log_lines
    except Unreachable as exc:
        for line in patience.note_failure(exc):
            typer.echo(line, err=True)
        return None


def _print_waiting(before: Report | None, now: Report | None) -> None:
    if now is None or now.state is not State.PENDING:
        return
    if now.reason not in ("", before.reason if before else ""):
        typer.echo(f"atoll: {now.name} waits: {now.reason}", err=True)


def _parse_facts(line: str) -> dict[str, Any] | None:
    try:
        facts = json.loads(line)
    except ValueError:
        return None
    return facts if isinstance(facts, dict) and "url" in facts else None


def _print_notes(lines: Sequence[str]) -> None:
    for line in lines:
        if line.startswith("atoll: "):
            typer.echo(line, err=True)


def failure_lines(launched: api.Launched, reports: Sequence[Report]) -> Iterator[str]:
    """Yield the reasons of the failed islands of a launch, with their last lines."""

    def last_lines(report: Report) -> list[str]:
        try:
            return launched.launcher.logs(launched.handle, report.index)[
                -api.LAST_LINES :
            ]
        except Unreachable as exc:
            return [f"(its log cannot be read: {exc})"]

    yield from api.failures(reports, last_lines)


def change_lines(before: Report | None, now: Report) -> list[str]:
    """Return the line that reports a new state or restart; none without a change."""
    if before is not None and (before.state, before.restarts) == (
        now.state,
        now.restarts,
    ):
        return []
    reason = f": {now.reason}" if now.reason else ""
    restarts = f" (restart {now.restarts})" if now.restarts else ""
    return [f"{now.name} is {now.state.value}{restarts}{reason}"]
