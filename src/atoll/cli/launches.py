"""Verbs for the launches of this user: `atoll ps`, `logs`, `cancel` and `scale`.

`LaunchFollower` prints the output of the islands of `atoll launch`, the progress of
their run, and a table of their states. On a terminal the last two are redrawn below the
output; elsewhere every change of state is a line, and they are printed at the end.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import launch_coordinator
from atoll.cli.run_names import RUN, complete_run_name, locate_run
from atoll.cli.terminal import (
    can_redraw,
    console,
    has_colour,
    is_ascii,
    live_view,
    stop_signal,
    table,
    width,
)
from atoll.errors import AtollError, RemoteError, Unreachable, UsageError
from atoll.fields import nearest
from atoll.launch.api import Launched, PollRetry, launch_spec, rows
from atoll.launch.base import GRACE_S, Report, State
from atoll.launch.launches import LaunchRecords, Record
from atoll.run_client import RunStatus, StatusPoll, try_status
from atoll.run_client.location import read_address
from atoll.telemetry import render_head
from atoll.telemetry.text import printable


def launched_url(run: str) -> str:
    """Return the URL by which launches are recorded, even if the run is not served."""
    path = Path(run)
    if path.is_dir() and (last := read_address(path)) is not None:
        return last.url
    return str(locate_run(run))


def launches_of(run: str, launch_records: LaunchRecords | None = None) -> list[Record]:
    """Return the launches of a run, or the one launch of that id.

    Raises:
        UsageError: no launch matches.
    """
    records = (launch_records or LaunchRecords()).records()
    if matches := [record for record in records if record.handle.id == run]:
        return matches
    url = launched_url(run)
    if matches := [record for record in records if record.handle.run == url]:
        return matches
    runs = ", ".join(sorted({record.handle.run for record in records})) or "of none"
    raise UsageError(
        f"Nothing was launched by this user for {url}. Launches are known for: {runs}."
    )


def find_island(records: Sequence[Record], island: str) -> tuple[Record, int]:
    """Return the newest launch that has an island of this name, and its index there.

    Raises:
        UsageError: no launch has such an island.
    """
    names: dict[str, tuple[Record, int]] = {}
    for record in records:
        for index in record.handle.indexes:
            names[record.handle.island(index)] = record, index
    if island not in names:
        raise UsageError(
            f"There is no island {island[:80]!r} among those that were launched. Did "
            f"you mean {nearest(island, names)!r}?"
        )
    return names[island]


if TYPE_CHECKING:  # slow to import
    from rich.console import Group, RenderableType
    from rich.live import Live

NUMBERS = ("restarts", "round", "loss", "tokens")
"""Columns of numbers in the table of islands."""


def print_islands(
    reports: Sequence[Report], metrics: Mapping[str, Mapping[str, Any]]
) -> None:
    """Print a table of islands."""
    console(sys.stdout).print(table(rows(reports, metrics), numbers=NUMBERS))


def ps(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="URL, directory or name of a run. Default: every run.",
            autocompletion=complete_run_name,
            show_default=False,
        ),
    ] = None,
    with_ended: Annotated[
        bool, typer.Option("--all", help="Also list launches that have ended.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List launched islands: their states, restarts and last metrics.

    Without RUN, launches that have ended are left out unless --all is given.
    """
    records = LaunchRecords().records() if run is None else launches_of(run)
    launches = [(record, *_polled(record)) for record in records]
    if run is None and not with_ended:
        launches = [launch for launch in launches if not _is_over(launch[1])]
    if as_json:
        typer.echo(json.dumps([_form(*launch) for launch in launches]))
        return
    for record, reports, trouble in launches:
        handle = record.handle
        typer.echo(f"{handle.id} on {handle.engine}, run {handle.run}")
        if trouble:
            typer.echo(f"  {trouble}")
        else:
            status = None if record.is_coordinator else try_status(handle.run)
            print_islands(reports, status.islands if status else {})
        typer.echo("")


def _polled(record: Record) -> tuple[tuple[Report, ...], str]:
    """Return the reports of a launch; if its engine fails, none and the error."""
    try:
        return Launched(record.handle).poll(), ""
    except AtollError as exc:
        return (), str(exc)


def _is_over(reports: tuple[Report, ...]) -> bool:
    return bool(reports) and all(report.state.is_over for report in reports)


def _form(record: Record, reports: tuple[Report, ...], trouble: str) -> dict[str, Any]:
    islands = [report.to_dict() for report in reports]
    return {
        "launch": json.loads(record.handle.to_json()),
        "islands": islands,
        "trouble": trouble,
    }


EVERY_S = 1.0


@dataclass
class LogReader:
    """Prints the logs of one launch, each line once."""

    launched: Launched
    num_printed: dict[int, int]
    """Lines printed so far, by the index of an island."""

    has_names: bool = False
    patience: PollRetry = field(default_factory=PollRetry)

    def print_new(self, last: int | None = None) -> None:
        """Print the new lines of each island, or only the `last` of them."""
        handle, launcher = self.launched.handle, self.launched.launcher
        for index, after in self.num_printed.items():
            lines = launcher.logs(handle, index, after=after)
            self.num_printed[index] += len(lines)
            name = f"{handle.island(index)} | " if self.has_names else ""
            for line in lines[0 if last is None else max(0, len(lines) - last) :]:
                typer.echo(f"{name}{line}")

    def follow(self) -> bool:
        """Print the new lines, and return whether more may come."""
        try:
            reports = self.launched.poll()
            self.print_new()
            self.patience.answered()
            followed = (r for r in reports if r.index in self.num_printed)
            return not all(report.state.is_over for report in followed)
        except Unreachable as exc:
            for line in self.patience.note_failure(exc):
                typer.echo(line, err=True)
            return True


def logs(
    run: Annotated[str, RUN],
    island: Annotated[
        str | None,
        typer.Argument(metavar="ISLAND", help="Only this island.", show_default=False),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(min=0, help="Number of lines of each island, the last ones."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue until all islands ended.")
    ] = False,
) -> None:
    """Print the output of launched islands, restarts included.

    If there are several islands, each line begins with the island's name.
    """
    readers = _log_readers(run, island)
    for reader in readers:
        reader.print_new(last)
    while follow and readers:
        readers = [reader for reader in readers if reader.follow()]
        time.sleep(EVERY_S if readers else 0.0)


def _log_readers(run: str, island: str | None) -> list[LogReader]:
    records = launches_of(run)
    if island is not None:
        record, index = find_island(records, island)
        return [LogReader(Launched(record.handle), {index: 0})]
    has_names = sum(record.handle.num_islands for record in records) > 1
    return [
        LogReader(
            Launched(record.handle), dict.fromkeys(record.handle.indexes, 0), has_names
        )
        for record in records
    ]


LOOK_S = 0.2
END_S = 60.0
"""After the grace period, for an engine to report that the islands have ended."""


def cancel(
    run: Annotated[str, RUN],
    islands: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ISLAND...", help="Only these islands.", show_default=False
        ),
    ] = None,
    grace_s: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds for islands to leave before they are killed."
        ),
    ] = GRACE_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """End launched islands; each leaves its run cleanly if it can.

    Without names ends all of them, then the coordinator that was launched with them.
    RUN may also be the id of a launch that `atoll ps` shows.
    """
    records = launches_of(run)
    cancellations = _cancel_named(records, islands) if islands else _cancel_all(records)
    trouble: list[str] = []
    ended: list[dict[str, Any]] = []
    for record, indexes in cancellations:
        try:
            reports = _end(record, indexes, grace_s)
            ended.append(_form(record, tuple(reports), ""))
            if not as_json:
                print_islands(reports, {})
        except AtollError as exc:
            # Other launches must end all the same; their engines may be others.
            handle = record.handle
            trouble.append(f"{handle.id} on {handle.engine}: {exc}")
            ended.append(_form(record, (), str(exc)))
    if as_json:
        typer.echo(json.dumps(ended))
    for line in trouble:
        typer.echo(f"atoll: {line}", err=True)
    if trouble:
        raise RemoteError(
            f"{len(trouble)} of {len(cancellations)} launches could not be ended; the "
            f"reasons are above. Remove them, and repeat: atoll cancel {run}"
        )


Cancellation = tuple[Record, Sequence[int] | None]
"""A launch, and the indexes of its islands to end; None means all."""


def _cancel_all(records: Sequence[Record]) -> list[Cancellation]:
    # Coordinators last: islands leave while there is one to leave.
    ordered = sorted(records, key=lambda record: record.is_coordinator)
    return [(record, None) for record in ordered]


def _cancel_named(
    records: Sequence[Record], islands: Sequence[str]
) -> list[Cancellation]:
    wanted: dict[str, list[int]] = defaultdict(list)
    by_id = {record.handle.id: record for record in records}
    for island in islands:
        record, index = find_island(records, island)
        wanted[record.handle.id].append(index)
    return [(by_id[launch], indexes) for launch, indexes in wanted.items()]


def _end(record: Record, indexes: Sequence[int] | None, grace_s: float) -> list[Report]:
    """Cancel islands of a launch, and return their reports once they have ended."""
    launched = Launched(record.handle)
    launched.cancel(indexes, grace_s=grace_s)
    all_indexes = record.handle.indexes if indexes is None else indexes
    return _until_over(launched, all_indexes, grace_s)


def _until_over(
    launched: Launched, indexes: Sequence[int], grace_s: float
) -> list[Report]:
    until_s = time.monotonic() + grace_s + END_S
    remaining = [launched.handle.island(index) for index in indexes]
    while True:
        try:
            reports = [report for report in launched.poll() if report.index in indexes]
            remaining = [report.name for report in reports if not report.state.is_over]
            if not remaining:
                return reports
        except Unreachable:
            if time.monotonic() > until_s:
                raise
        if time.monotonic() > until_s:
            raise Unreachable(
                f"{', '.join(remaining[:8])} still run, but are cancelled on "
                f"{launched.handle.engine}. Check again: atoll ps."
            )
        time.sleep(LOOK_S)


def scale(
    run: Annotated[str, RUN],
    n: Annotated[int, typer.Argument(metavar="N", min=0, show_default=False)],
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of the islands, if several were launched."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Scale a launch to N islands.

    Afterwards NAME-0 to NAME-(N-1) are live. New islands are launched with the options
    of the last launch; islands beyond N leave cleanly.
    """
    launches = launches_of(run)
    records = _named_records(launches, name)
    live: dict[int, Record] = {}
    for record in records:
        for report in Launched(record.handle).poll():
            if not report.state.is_over:
                live[report.index] = record
    newest = records[-1]
    missing = [index for index in range(n) if index not in live]
    if missing:
        _require_served(launches)
    changes: dict[str, list[str]] = {"leaving": [], "launched": []}

    def note(action: str, indexes: Sequence[int]) -> None:
        names = [newest.handle.island(index) for index in indexes]
        changes[action] += names
        if not as_json:
            typer.echo(f"{action}: {', '.join(names)}")

    for record in records:
        leaving = [index for index in live if index >= n and live[index] is record]
        if leaving:
            Launched(record.handle).cancel(leaving)
            note("leaving", leaving)
    for block in _contiguous(missing):
        launch_spec(
            newest.handle.engine,
            len(block),
            newest.spec,
            first=block[0],
            options=newest.handle.options,
        )
        note("launched", block)
    if as_json:
        typer.echo(json.dumps(changes))


def _require_served(launches: Sequence[Record]) -> None:
    """Raise if the run's coordinator was launched with it, and has ended.

    The run may be served again since then: in that case its coordinator answers.

    Raises:
        UsageError: no coordinator serves the run, so new islands could not join.
    """
    for record in launches:
        if not record.is_coordinator:
            continue
        is_over = all(report.state.is_over for report in Launched(record.handle).poll())
        if is_over and try_status(record.handle.run) is None:
            raise UsageError(
                f"{record.handle.run} is no longer served, so no island could join it. "
                "Launch its run file again: atoll launch -n N RUN.toml -- COMMAND"
            )


def _named_records(records: Sequence[Record], name: str | None) -> list[Record]:
    islands = [record for record in records if not record.is_coordinator]
    names = sorted({record.handle.name for record in islands})
    if name is None and len(names) > 1:
        raise UsageError(f"Islands of {', '.join(names)} were launched. Give --name.")
    matches = [record for record in islands if name in (None, record.handle.name)]
    if not matches:
        raise UsageError(
            f"No islands of the name {name!r} were launched for it; there are "
            f"{', '.join(names) or 'none'}."
        )
    return matches


def _contiguous(indexes: Sequence[int]) -> Iterator[list[int]]:
    """Yield lists of consecutive indexes."""
    block: list[int] = []
    for index in indexes:
        if block and index != block[-1] + 1:
            yield block
            block = []
        block.append(index)
    if block:
        yield block


NEAR_S, FAR_S = 0.5, 5.0
"""Between two polls of this machine's islands, and of those of remote engines."""

SOON_S = 0.1
"""Between two polls while the coordinator ends on this machine; elsewhere `NEAR_S`."""

STATUS_S = 1.0
"""How long to wait for the end of the run in its status, once all islands ended."""


MAX_LISTED = 12
"""Of more islands, the others are counted by state below the table."""


def listed_reports(reports: Sequence[Report]) -> tuple[list[Report], str]:
    """Return the islands to list, troubled ones first, and a line about the others."""
    if len(reports) <= MAX_LISTED:
        return list(reports), ""
    calm = (State.RUNNING, State.FINISHED)
    ranked = sorted(reports, key=lambda report: report.state in calm)
    others = ranked[MAX_LISTED:]
    counts = Counter(report.state.value for report in others)
    states = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    return ranked[:MAX_LISTED], f"and {len(others)} more: {states}"


class LaunchFollower:
    """Follows islands until all have ended; cancels them when it is interrupted."""

    def __init__(
        self,
        launched: Launched,
        coordinator: Launched | None,
        *,
        is_reachable: bool = True,
    ) -> None:
        self._launched = launched
        self._coordinator = (
            None
            if coordinator is None
            else launch_coordinator.CoordinatorLaunch(coordinator)
        )
        # A coordinator out of reach is known by the reports of its engine alone.
        self._statuses = StatusPoll(launched.handle.run) if is_reachable else None
        self._reports: tuple[Report, ...] = ()
        self._num_read = dict.fromkeys(launched.handle.indexes, 0)
        self._can_redraw = can_redraw(sys.stdout)
        self._live: Live | None = None
        self._is_asked_to_leave = self._is_cancelled = self._is_orphaned = False
        self._poll_patience, self._cancel_patience = PollRetry(), PollRetry()
        is_elsewhere = launched.launcher.traits.is_elsewhere
        self._every_s = FAR_S if is_elsewhere else NEAR_S
        self._soon_s = NEAR_S if is_elsewhere else SOON_S

    def follow(self) -> bool:
        """Return whether the run has finished, once no island is left.

        The first SIGINT or SIGTERM makes the islands leave; the second has its default
        effect.
        """
        with ExitStack() as cleanup:
            stop = cleanup.enter_context(stop_signal())
            cleanup.callback(self._close)
            if self._can_redraw:
                live = live_view(sys.stdout, is_transient=True)
                self._live = cleanup.enter_context(live)
            while not self._is_over():
                self._poll()
                self._end(is_interrupted=stop.is_set())
                time.sleep(0.0 if self._is_over() else self._every_s)
            self._poll()
            self._end_coordinator()
        self._live = None
        self._show_end()
        return self._has_ended

    def _close(self) -> None:
        if self._statuses is not None:
            self._statuses.close()

    @property
    def was_interrupted(self) -> bool:
        """Whether a signal has interrupted it."""
        return self._is_asked_to_leave and not self._is_orphaned

    def _is_over(self) -> bool:
        return bool(self._reports) and all(
            report.state.is_over for report in self._reports
        )

    @property
    def _status(self) -> RunStatus | None:
        return self._statuses.newest if self._statuses else None

    @property
    def _has_ended(self) -> bool:
        if self._status is not None and self._status.has_ended:
            return True
        return self._coordinator is not None and self._coordinator.has_finished

    def _poll(self) -> None:
        if self._statuses is not None:
            self._statuses.status(at_once=self._is_over())
        before = {report.index: report for report in self._reports}
        lines: list[str] = []
        try:
            self._reports = self._launched.poll()
            changes = self._coordinator.look() if self._coordinator else []
            if self._statuses is None and not self._can_redraw:
                lines += changes
            for line in self._new_lines():
                lines.append(line)  # one by one: lines read before an error are kept
            self._poll_patience.answered()
        except Unreachable as exc:
            lines += self._poll_patience.note_failure(exc)
        if not self._can_redraw:
            for report in self._reports:
                lines += launch_coordinator.change_lines(
                    before.get(report.index), report
                )
        self._draw(lines)

    def _new_lines(self) -> Iterator[str]:
        handle, launcher = self._launched.handle, self._launched.launcher
        for index, after in self._num_read.items():
            lines = launcher.logs(handle, index, after=after)
            self._num_read[index] = after + len(lines)
            yield from (f"{handle.island(index)} | {line}" for line in lines)

    def _draw(self, lines: Sequence[str]) -> None:
        """Print lines; on a terminal, above the table, which is redrawn."""
        if self._live is None:
            for line in lines:
                typer.echo(line)
            return
        from rich.text import Text

        if lines:
            self._live.console.print(Text("\n".join(lines)), soft_wrap=True)
        self._live.update(self._page(), refresh=True)

    def _page(self) -> Group:
        """Return the progress of the run, and the table of islands."""
        from rich.console import Group
        from rich.text import Text

        # The state of a run out of reach shows only in the report of its coordinator.
        coordinator = self._coordinator if self._statuses is None else None
        reports = [*self._reports, *(coordinator.reports if coordinator else ())]
        status = self._status
        metrics = status.islands if status else {}
        listed, others = listed_reports(reports)
        parts: list[RenderableType] = [""]
        if status is not None:
            head = render_head(
                status.document,
                width=width(),
                is_colour=has_colour(),
                is_ascii=is_ascii(sys.stdout),
            )
            parts += [Text.from_ansi(f"{head}{printable(status.reason)}".rstrip()), ""]
        parts.append(table(rows(listed, metrics), numbers=NUMBERS))
        return Group(*parts, *([others] if others else []))

    def _end(self, *, is_interrupted: bool) -> None:
        """Cancel islands that must not run; a cancel that failed is repeated."""
        with self._tolerate_silence():
            if is_interrupted and not self._is_cancelled:
                self._ask_to_leave()
            self._cancel_waiting()
            self._cancel_orphans()

    def _ask_to_leave(self) -> None:
        if not self._is_asked_to_leave:
            leaving = (
                "atoll: islands are leaving; interrupt again to exit without them."
            )
            self._draw([leaving])
        self._is_asked_to_leave = True
        self._launched.cancel()
        self._is_cancelled = True

    def _cancel_waiting(self) -> None:
        """Cancel islands that would start for a run that has ended."""
        if not self._has_ended:
            return
        waiting = (State.PENDING, State.RESTARTING)
        late = [report.index for report in self._reports if report.state in waiting]
        can_some = self._launched.launcher.traits.can_cancel_some
        if late and (can_some or len(late) == len(self._reports)):
            self._launched.cancel(late if can_some else None)

    def _cancel_orphans(self) -> None:
        """Cancel islands if their coordinator has ended and cannot be restarted."""
        is_gone = self._coordinator is not None and self._coordinator.is_gone
        if not is_gone or self._has_ended or self._is_cancelled:
            return
        if not self._is_asked_to_leave:
            self._is_orphaned = self._is_asked_to_leave = True
            self._draw(["atoll: the run's coordinator is gone; islands are ended."])
        self._launched.cancel()
        self._is_cancelled = True

    def _end_coordinator(self) -> None:
        """Wait a moment for the end of the run, then cancel the coordinator."""
        if self._coordinator is None:
            return
        until_s = time.monotonic() + self._end_timeout_s()
        while time.monotonic() < until_s and not self._has_ended:
            self._look_for_end(self._coordinator)
            time.sleep(self._soon_s)
        self._cancel_coordinator(self._coordinator)

    def _look_for_end(self, coordinator: launch_coordinator.CoordinatorLaunch) -> None:
        if self._statuses is not None:
            self._statuses.status()
            return
        with self._tolerate_silence():
            coordinator.look()

    def _end_timeout_s(self) -> float:
        """Return how long to wait for the end of the run."""
        if self._statuses is not None:
            return STATUS_S
        is_likely = any(report.state is State.FINISHED for report in self._reports)
        is_gone = self._coordinator is None or self._coordinator.is_gone
        return launch_coordinator.ENDS_S if is_likely and not is_gone else 0.0

    def _cancel_coordinator(
        self, coordinator: launch_coordinator.CoordinatorLaunch
    ) -> None:
        lines: list[str] = []
        while not (coordinator.is_over or lines):
            with self._tolerate_silence():
                lines = coordinator.end()
            time.sleep(0.0 if coordinator.is_over else self._soon_s)
        self._draw(lines)

    @contextmanager
    def _tolerate_silence(self) -> Iterator[None]:
        """Continue while an engine does not answer a request to cancel."""
        try:
            yield
            self._cancel_patience.answered()
        except Unreachable as exc:
            self._draw(self._cancel_patience.note_failure(exc))

    def _show_end(self) -> None:
        console(sys.stdout).print(self._page())
        lines = [*launch_coordinator.failure_lines(self._launched, self._reports)]
        if self._coordinator is not None:
            lines += launch_coordinator.failure_lines(
                self._coordinator.launched, self._coordinator.reports
            )
        for line in lines:
            typer.echo(line, err=True)
