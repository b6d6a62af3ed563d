"""Launches islands, and follows them: the Python interface behind `atoll launch`.

From a spec to an order (a launch's id, its secrets, and the islands' pass), from an
order to a submission, from a submission to reports, and from reports to lines for
people. A coordinator can be launched the same way, on the engine of its islands.

Requests to an engine that does not respond are retried for a bounded time.
Rule 1: an outage is reported once, and ends with the next response.
Rule 2: only `Unreachable` is retried; any other error is raised immediately.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atoll.errors import AtollError, RemoteError, Unreachable, UsageError
from atoll.island.connection import is_coordinator
from atoll.island.environment import credentials_from_environment
from atoll.launch import base
from atoll.launch.code import pack_code, ship_code
from atoll.launch.credentials import (
    RUN_FILE,
    SEED_BYTES,
    CoordinatorFiles,
    IslandCredentials,
)
from atoll.launch.launches import COORDINATOR, LaunchRecords, Record
from atoll.launch.registry import open_launcher
from atoll.launch.spec import CHARTER, PASS, IslandSpec, in_engine, resolve
from atoll.run_client import StatusPoll, open_run
from atoll.runtime import Clock, SystemClock
from atoll.security import Credentials, Role, Secret, read_token

SILENT_S = 600.0
"""How long an engine may not respond before its islands are no longer followed."""


class PollRetry:
    """The retries of one repeated request to an engine."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._silent_since_s: float | None = None

    def answered(self) -> None:
        """Record a response."""
        self._silent_since_s = None

    def note_failure(self, error: Unreachable) -> list[str]:
        """Return the lines that report an outage: none if it was reported before.

        Raises:
            Unreachable: it has lasted longer than `SILENT_S`.
        """
        now_s = self._clock.now_s()
        if self._silent_since_s is None:
            self._silent_since_s = now_s
            return [f"atoll: {error} Retrying."]
        if now_s - self._silent_since_s > SILENT_S:
            raise error
        return []


LAST_LINES = 12
MAX_NAMES = 8
BAD = (base.State.FAILED, base.State.LOST)


def failures(
    reports: Sequence[base.Report], last_lines: Callable[[base.Report], Sequence[str]]
) -> Iterator[str]:
    """Yield which islands failed, by cause, with the last log lines of each.

    Equal last lines of several islands are printed once.
    """
    by_cause: dict[tuple[base.State, str], list[base.Report]] = defaultdict(list)
    for report in reports:
        if report.state in BAD:
            by_cause[report.state, report.reason].append(report)
    for (state, reason), failed in by_cause.items():
        yield f"{_counted(failed)} {state.value}: {reason or 'no reason was given'}"
        printed: dict[tuple[str, ...], str] = {}
        for report in failed:
            lines = tuple(last_lines(report)[-LAST_LINES:])
            if lines in printed:
                yield f"  {report.name}: as {printed[lines]}"
                continue
            printed[lines] = report.name
            yield f"  {report.name} printed{':' if lines else ' nothing'}"
            yield from (f"    {line}" for line in lines)


def rows(
    reports: Sequence[base.Report], metrics: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, ...]]:
    """Return a table of islands, its head first: the same width in every row."""
    head = ("island", "state", "restarts", "round", "loss", "tokens", "place", "why")
    return [head, *(_row(report, metrics.get(report.name, {})) for report in reports)]


def _row(report: base.Report, metrics: Mapping[str, Any]) -> tuple[str, ...]:
    loss = metrics.get("loss")
    return (
        report.name,
        report.state.value,
        str(report.restarts),
        _or_dash(metrics.get("round")),
        "-" if loss is None else f"{loss:.4g}",
        _or_dash(metrics.get("tokens")),
        report.host or "-",
        report.reason or "-",
    )


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _counted(reports: Sequence[base.Report]) -> str:
    names = ", ".join(report.name for report in reports[:MAX_NAMES])
    rest = f" and {len(reports) - MAX_NAMES} more" if len(reports) > MAX_NAMES else ""
    return f"{names}{rest}"


LOOK_S = 0.5

log = logging.getLogger("atoll")


@dataclass(frozen=True)
class Result:
    """The final state of one island."""

    report: base.Report
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Its last metrics in the run: loss, round, tokens and bytes."""

    last_lines: Sequence[str] = ()


class Launched:
    """A launch: its islands can be polled, waited for and cancelled."""

    def __init__(
        self, handle: base.Handle, launcher: base.Launcher | None = None
    ) -> None:
        self.handle = handle
        self._launcher = launcher or open_launcher(handle.engine, handle.options)

    @property
    def launcher(self) -> base.Launcher:
        return self._launcher

    def poll(self) -> tuple[base.Report, ...]:
        """Return the present state of every island."""
        return self._launcher.poll(self.handle)

    def wait(self, timeout_s: float | None = None) -> tuple[Result, ...]:
        """Wait until all islands are over, and return their results.

        Requests to an engine that does not respond are retried for some minutes.

        Raises:
            TimeoutError: some are not over after `timeout_s`. They keep running.
            Unreachable: the engine has not responded for `SILENT_S`.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        running = [self.handle.island(index) for index in self.handle.indexes]
        retry = PollRetry()
        with closing(StatusPoll(self.handle.run)) as statuses:
            while True:
                # Metrics are read while islands run: a coordinator ends with them.
                statuses.status()
                try:
                    reports = self.poll()
                    running = [
                        report.name for report in reports if not report.state.is_over
                    ]
                    if not running:
                        status = statuses.status(at_once=True)
                        return self.results(reports, status.islands if status else {})
                    retry.answered()
                except Unreachable as exc:
                    for line in retry.note_failure(exc):
                        log.warning("%s", line)
                if until_s is not None and time.monotonic() > until_s:
                    raise TimeoutError(
                        f"{', '.join(running[:8])} still run after {timeout_s:g} s. "
                        "Wait longer, or cancel."
                    )
                time.sleep(LOOK_S)

    def results(
        self, reports: Sequence[base.Report], metrics: Mapping[str, Any]
    ) -> tuple[Result, ...]:
        """Return the results of islands, with the last lines of their logs."""
        return tuple(
            Result(
                report,
                metrics.get(report.name, {}),
                self._launcher.logs(self.handle, report.index)[-LAST_LINES:],
            )
            for report in reports
        )

    def logs(self) -> dict[str, list[str]]:
        """Return the log of each island, by its name."""
        return {
            self.handle.island(index): self._launcher.logs(self.handle, index)
            for index in self.handle.indexes
        }

    def cancel(
        self, indexes: Collection[int] | None = None, *, grace_s: float = base.GRACE_S
    ) -> None:
        """Make islands leave the run and end. Safe to repeat."""
        self._launcher.cancel(self.handle, indexes=indexes, grace_s=grace_s)


def launch(
    engine: str,
    n: int,
    run: str,
    command: Sequence[str],
    *,
    name: str | None = None,
    options: Mapping[str, str] | None = None,
) -> Launched:
    """Start `n` islands of a run on an engine, and return the launch.

    They keep running when this process ends; `atoll ps`, `logs` and `cancel` find them.

    Args:
        engine: `local`, `slurm`, `ray`, ...
        n: Number of islands.
        run: The URL of a coordinator or of a store.
        command: A script, `-m` and a module, `module:function` or a program; and its
            arguments.
        name: Island 3 is `name-3`. Default: the engine's name.
        options: The engine's own options.

    Raises:
        UsageError: the engine, an option or the command is wrong, or islands of that
            name are launched already.
        Refused, Unreachable: the engine or the run refused, or did not respond.
    """
    if isinstance(command, str):
        raise UsageError(
            f"command={command[:80]!r} is one text. Give its words: command.split()."
        )
    default = engine.replace("_", "-")
    spec = IslandSpec(command=tuple(command), run=run, name=name or default)
    return launch_spec(engine, n, spec, options=options)


def launch_spec(
    engine: str,
    n: int,
    spec: IslandSpec,
    *,
    first: int = 0,
    options: Mapping[str, str] | None = None,
    ship: Path | None = None,
    launch_records: LaunchRecords | None = None,
) -> Launched:
    """Start islands of a full specification.

    `ship` is a directory whose code is stored with the run, and fetched by the islands.
    After an error or an interruption, nothing keeps running; if that is impossible, the
    launch stays recorded, and the error names it.
    """
    launcher, launch_records = (
        open_launcher(engine, options),
        launch_records or LaunchRecords(),
    )
    _forget_old(launch_records)
    with launch_records.holding(spec.run, spec.name):
        _require_free(spec, first, n, launch_records)
        if ship is not None:
            code = pack_code(ship)
            ship_code(spec.run, code)
            spec = replace(spec, code=code.digest)
        order = make_order(launcher, n, spec, first=first)
        return submit(launcher, order, launch_records)


def submit(
    launcher: base.Launcher, order: base.LaunchOrder, launch_records: LaunchRecords
) -> Launched:
    """Submit an order, and store its handle. Errors as `launch_spec`."""
    handles: list[base.Handle] = []

    def keep(handle: base.Handle) -> None:
        launch_records.keep(Record(handle, order.spec))
        handles.append(handle)

    try:
        return Launched(launcher.launch(order, keep=keep), launcher)
    except BaseException as exc:
        if handles:
            _undo(launcher, handles[-1], launch_records, exc)
        raise


def plan_spec(
    engine: str,
    n: int,
    spec: IslandSpec,
    *,
    options: Mapping[str, str] | None = None,
    ship: Path | None = None,
) -> base.LaunchPlan:
    """Return the submission of `launch_spec`; neither run nor engine is contacted."""
    launcher = open_launcher(engine, options)
    if ship is not None:
        spec = replace(spec, code=pack_code(ship).digest)
    # A plan has the names of the secrets that `make_order` reads, and no value.
    stored = in_engine(spec.secrets)
    variables = [name for name in spec.secrets if name not in stored]
    variables += [PASS] if launcher.traits.is_elsewhere else []
    order = base.LaunchOrder(
        id=new_id(spec, is_plan=True),
        spec=spec,
        num_islands=n,
        values=dict.fromkeys(variables, Secret("to be read at the launch")),
    )
    return launcher.plan(order)


def _require_free(
    spec: IslandSpec, first: int, n: int, launch_records: LaunchRecords
) -> None:
    """Check that no island of these names runs; forget launches that are over."""
    wanted = set(range(first, first + n))
    for record in launch_records.of_run(spec.run):
        handle = record.handle
        if handle.name != spec.name or not wanted & set(handle.indexes):
            continue
        reports = Launched(handle).poll()
        live = [report for report in reports if not report.state.is_over]
        names = [report.name for report in live if report.index in wanted]
        if names:
            raise UsageError(
                f"{', '.join(names[:8])} of {spec.run} are launched already. Give "
                f"another --name, or end them: atoll cancel {spec.run}"
            )
        if not live:
            launch_records.forget(handle.id)


def _forget_old(launch_records: LaunchRecords) -> None:
    """Forget the oldest launches if there are many, but none that may run."""
    silent: set[str] = set()
    for record in launch_records.surplus():
        if record.handle.engine in silent:
            continue
        try:
            reports = Launched(record.handle).poll()
        except AtollError:
            silent.add(record.handle.engine)  # each further attempt would cost time
            continue
        if all(report.state.is_over for report in reports):
            launch_records.forget(record.handle.id)


def _undo(
    launcher: base.Launcher,
    handle: base.Handle,
    launch_records: LaunchRecords,
    error: BaseException,
) -> None:
    """End the islands of a failed launch, and forget it."""
    end_after(error, Launched(handle, launcher))
    launch_records.forget(handle.id)


def end_after(error: BaseException, launched: Launched) -> None:
    """End a launch that is useless after an error elsewhere.

    Raises:
        RemoteError: it cannot be ended now. The message has both errors and the remedy.
    """
    try:
        launched.cancel()
    except AtollError as exc:
        launch = launched.handle.id
        raise RemoteError(
            f"The launch {launch} failed ({error}), and its islands could not be "
            f"ended ({exc}). End them: atoll cancel {launch}"
        ) from error


@dataclass(frozen=True, kw_only=True)
class EngineCoordinator:
    """How an engine runs a coordinator."""

    engine: str
    launcher: base.Launcher
    serving: base.CoordinatorPlacement

    def spec(
        self,
        run: str,
        arguments: Sequence[str],
        *,
        directory: str | None = None,
        image: str | None = None,
        requirements: Sequence[str] = (),
    ) -> IslandSpec:
        """Return the spec of `atoll serve` with further arguments, in its directory.

        It has the image of the islands, and none of their resources.
        """
        serving = self.serving
        argv = ["-m", "atoll.cli", "serve", RUN_FILE, "--dir", "."]
        argv += ["--listen", serving.host]
        argv += [] if serving.port is None else ["--port", str(serving.port)]
        return IslandSpec(
            command=(*argv, *arguments),
            run=run,
            name=COORDINATOR,
            directory=directory,
            image=image,
            requirements=tuple(requirements),
        )

    def plan(self, spec: IslandSpec) -> base.LaunchPlan:
        """Return the submission, with the URL for islands if it is known."""
        values = {CHARTER: Secret("to be made at the launch")}
        return self.launcher.plan(_order(new_id(spec, is_plan=True), spec, values))

    def launch(
        self, spec: IslandSpec, charter: CoordinatorFiles, launch_records: LaunchRecords
    ) -> Launched:
        """Launch a coordinator; errors as `launch_spec`."""
        order = _order(new_id(spec), spec, {CHARTER: charter.to_secret()})
        return submit(self.launcher, order, launch_records)


def engine_coordinator(engine: str, options: dict[str, str]) -> EngineCoordinator:
    """Return the coordinator of an engine whose islands have no access to this machine.

    Raises:
        UsageError: the engine cannot run one, or an option is wrong.
    """
    serving = open_launcher(engine, options).traits.serving
    if serving is None:
        raise UsageError(
            f"--coordinator island0 needs islands that reach each other, and {engine} "
            "gives them no address for that. Serve the run here, at an address that "
            "the islands reach: --listen; or use a run in a store."
        )
    launcher = open_launcher(engine, serving.options)
    return EngineCoordinator(engine=engine, launcher=launcher, serving=serving)


def _order(
    launch: str, spec: IslandSpec, values: dict[str, Secret]
) -> base.LaunchOrder:
    return base.LaunchOrder(
        id=launch, spec=spec, num_islands=1, values=values, is_coordinator=True
    )


def make_order(
    launcher: base.Launcher, n: int, spec: IslandSpec, *, first: int = 0
) -> base.LaunchOrder:
    """Return an order, with the secrets that its islands need.

    Raises:
        UsageError: a reference to a secret points to nothing.
        Unreachable, Refused: the run did not send its id, which a pass needs.
    """
    values = resolve(spec.secrets, environment=os.environ)
    if launcher.traits.is_elsewhere:
        values[PASS] = make_pass(spec.run).to_secret()
    return base.LaunchOrder(
        id=new_id(spec), spec=spec, num_islands=n, first=first, values=values
    )


def make_pass(run: str) -> IslandCredentials:
    """Return the pass for islands on machines without this user's credentials."""
    name = _run_id(run) if is_reachable(run) else None
    seed = Secret(secrets.token_hex(SEED_BYTES))
    if not is_coordinator(run):
        return IslandCredentials(run=name, seed=seed)
    environment = credentials_from_environment()
    credentials = Credentials(environment.credentials).find(run)
    token = credentials.token(Role.ISLAND) if credentials else None
    if token is None and environment.token_file is not None:
        token = read_token(environment.token_file, is_given=True)
    pin = credentials.pin if credentials else None
    return IslandCredentials(run=name, seed=seed, url=run, pin=pin, token=token)


def _run_id(run: str) -> str:
    with closing(open_run(run)) as client:
        return client.status().run


def is_reachable(run: str, launch_records: LaunchRecords | None = None) -> bool:
    """Return whether this machine can reach a run.

    It cannot if the coordinator was launched on a network of its islands only.
    """
    records = (launch_records or LaunchRecords()).of_run(run)
    handles = [record.handle for record in records if record.is_coordinator]
    placements = [
        open_launcher(handle.engine, handle.options).traits.serving
        for handle in handles
    ]
    return all(placement is None or placement.is_reachable for placement in placements)


def new_id(spec: IslandSpec, *, is_plan: bool = False) -> str:
    """Return an id that is a valid name on engines; a plan always has the same."""
    stem = re.sub("[^a-z0-9]+", "-", spec.name.lower()).strip("-")[:36]
    return f"atoll-{stem}-{'0' * 8 if is_plan else secrets.token_hex(4)}"
