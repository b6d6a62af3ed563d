"""What this user has launched, by what they call a run; and tables of it.

`atoll ps [RUN]`: what this user has launched, and what became of it.

`atoll logs RUN [ISLAND]`: what launched islands say.

`atoll cancel RUN [ISLAND...]`: islands leave and end, and their coordinator last.

`atoll scale RUN N`: more islands of the same kind, or fewer.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.cli.run_names import RUN, complete, place_of, served
from atoll.cli.terminal import width
from atoll.errors import AtollError, RemoteError, Unreachable, UsageError
from atoll.launch.api import Launched, Patience, launch_spec, rows
from atoll.launch.base import GRACE_S, Report
from atoll.launch.launches import Book, Record
from atoll.launch.run_status import try_look
from atoll.settings.rules import nearest
from atoll.telemetry.text import Cell, printable, table

LEAST_NAME = 8


def url_of_run(run: str) -> str:
    """Return the URL that launches are kept by, although nobody may serve it now."""
    path = Path(run)
    if path.is_dir() and (last := served(path)) is not None:
        return last.url
    return str(place_of(run))


def launches_of(run: str, book: Book | None = None) -> list[Record]:
    """Return the launches of a run, or the one launch of that id.

    Raises:
        UsageError: there are none.
    """
    records = (book or Book()).records()
    if found := [each for each in records if each.handle.id == run]:
        return found
    url = url_of_run(run)
    if found := [each for each in records if each.handle.run == url]:
        return found
    known = ", ".join(sorted({each.handle.run for each in records})) or "of none"
    raise UsageError(
        f"Nothing was launched by this user for {url}. Launches are known for: {known}."
    )


def with_island(records: Sequence[Record], island: str) -> tuple[Record, int]:
    """Return the newest launch that has an island of a name, and its index there.

    Raises:
        UsageError: none has.
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


def tell_table(rows: Sequence[Sequence[str]], *, left: int) -> None:
    """Print rows, the first of which is the head."""
    for line in table_lines(rows, left=left):
        typer.echo(line)


def table_lines(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Return rows as lines, within the terminal."""
    grid = [[Cell(printable(text)) for text in row] for row in rows]
    filled = table(grid, left_columns=left, min_width=LEAST_NAME, width=width())
    return ["  ".join(cell.text for cell in row).rstrip() for row in filled]


def ps(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A URL, a directory or a name; every run without.",
            autocompletion=complete,
            show_default=False,
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Launches that are over, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List launched islands: their states, restarts and last metrics.

    Without RUN, launches of which nothing runs are left out unless --all.
    """
    records = Book().records() if run is None else launches_of(run)
    found = [(record, *_polled(record)) for record in records]
    if run is None and not everything:
        found = [each for each in found if not _is_over(each[1])]
    if as_json:
        typer.echo(json.dumps([_form(*each) for each in found]))
        return
    for record, reports, trouble in found:
        handle = record.handle
        typer.echo(f"{handle.id} on {handle.engine}, run {handle.run}")
        if trouble:
            typer.echo(f"  {trouble}")
        else:
            look = None if record.is_coordinator else try_look(handle.run)
            tell_table(rows(reports, look.islands if look else {}), left=2)
        typer.echo("")


def _polled(record: Record) -> tuple[tuple[Report, ...], str]:
    """Return the reports of a launch, or why its engine cannot be asked."""
    try:
        return Launched(record.handle).poll(), ""
    except AtollError as exc:
        return (), str(exc)


def _is_over(reports: tuple[Report, ...]) -> bool:
    return bool(reports) and all(each.state.is_over for each in reports)


def _form(record: Record, reports: tuple[Report, ...], trouble: str) -> dict[str, Any]:
    islands = [report.to_dict() for report in reports]
    return {
        "launch": json.loads(record.handle.to_json()),
        "islands": islands,
        "trouble": trouble,
    }


EVERY_S = 1.0


@dataclass
class Reading:
    """Logs of one launch, and how much of each was told."""

    launched: Launched
    told: dict[int, int]
    """Lines, by the index of an island."""

    has_names: bool = False
    patience: Patience = field(default_factory=Patience)

    def tell(self, last: int | None = None) -> None:
        """Print what is new, or the last lines of it."""
        handle, launcher = self.launched.handle, self.launched.launcher
        for index, told in self.told.items():
            said = launcher.logs(handle, index, after=told)
            self.told[index] += len(said)
            name = f"{handle.island(index)} | " if self.has_names else ""
            for line in said[0 if last is None else max(0, len(said) - last) :]:
                typer.echo(f"{name}{line}")

    def goes_on(self) -> bool:
        """Print what is new, and return whether there may be more."""
        try:
            reports = self.launched.poll()
            self.tell()
            self.patience.answered()
            return not all(it.state.is_over for it in reports if it.index in self.told)
        except Unreachable as exc:
            for line in self.patience.bear(exc):
                typer.echo(line, err=True)
            return True


def logs(
    run: Annotated[str, RUN],
    island: Annotated[
        str | None,
        typer.Argument(metavar="ISLAND", help="One of them.", show_default=False),
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=0, help="Only so many lines of each.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until all are over.")
    ] = False,
) -> None:
    """Print the output of launched islands, restarts included.

    Lines of several islands begin with the island's name.
    """
    readings = _readings(run, island)
    for reading in readings:
        reading.tell(last)
    while follow and readings:
        readings = [each for each in readings if each.goes_on()]
        time.sleep(EVERY_S if readings else 0.0)


def _readings(run: str, island: str | None) -> list[Reading]:
    records = launches_of(run)
    if island is not None:
        record, index = with_island(records, island)
        return [Reading(Launched(record.handle), {index: 0})]
    has_names = sum(each.handle.num_islands for each in records) > 1
    return [
        Reading(Launched(each.handle), dict.fromkeys(each.handle.indexes, 0), has_names)
        for each in records
    ]


LOOK_S = 0.2
MORE_S = 60.0
"""Beyond the grace, for an engine to tell that they are gone."""


def cancel(
    run: Annotated[str, RUN],
    islands: Annotated[
        list[str] | None,
        typer.Argument(metavar="ISLAND...", help="Only these.", show_default=False),
    ] = None,
    grace_s: Annotated[
        float, typer.Option(min=0, help="For islands to leave before they are killed.")
    ] = GRACE_S,
) -> None:
    """End launched islands; each leaves its run cleanly if it can.

    Without names all of them, and then the coordinator that was launched with them.
    RUN may be the id of a launch, as `atoll ps` shows it.
    """
    records = launches_of(run)
    going = _named(records, islands) if islands else _all(records)
    trouble: list[str] = []
    for record, indexes in going:
        try:
            _end(record, indexes, grace_s)
        except AtollError as exc:
            # The others are no less to go, and on other engines perhaps.
            handle = record.handle
            trouble.append(f"{handle.id} on {handle.engine}: {exc}")
    for line in trouble:
        typer.echo(f"atoll: {line}", err=True)
    if trouble:
        raise RemoteError(
            f"{len(trouble)} of {len(going)} launches could not be ended, for what is "
            f"said above. When that is mended say it again: atoll cancel {run}"
        )


Going = tuple[Record, Sequence[int] | None]
"""A launch, and which of its islands are to go: None is all."""


def _all(records: Sequence[Record]) -> list[Going]:
    # Coordinators last: islands leave while there is one to leave.
    ordered = sorted(records, key=lambda each: each.is_coordinator)
    return [(record, None) for record in ordered]


def _named(records: Sequence[Record], islands: Sequence[str]) -> list[Going]:
    wanted: dict[str, list[int]] = defaultdict(list)
    by_id = {each.handle.id: each for each in records}
    for island in islands:
        record, index = with_island(records, island)
        wanted[record.handle.id].append(index)
    return [(by_id[launch], indexes) for launch, indexes in wanted.items()]


def _end(record: Record, indexes: Sequence[int] | None, grace_s: float) -> None:
    """Tell islands of a launch to go, and show them when they are gone."""
    launched = Launched(record.handle)
    launched.cancel(indexes, grace_s=grace_s)
    those = record.handle.indexes if indexes is None else indexes
    tell_table(rows(_until_over(launched, those, grace_s), {}), left=2)


def _until_over(
    launched: Launched, indexes: Sequence[int], grace_s: float
) -> list[Report]:
    until_s = time.monotonic() + grace_s + MORE_S
    left = [launched.handle.island(index) for index in indexes]
    while True:
        try:
            reports = [each for each in launched.poll() if each.index in indexes]
            left = [each.name for each in reports if not each.state.is_over]
            if not left:
                return reports
        except Unreachable:
            if time.monotonic() > until_s:
                raise
        if time.monotonic() > until_s:
            raise Unreachable(
                f"{launched.handle.engine} was told, and {', '.join(left[:8])} run "
                "still. Look again: atoll ps."
            )
        time.sleep(LOOK_S)


def scale(
    run: Annotated[str, RUN],
    n: Annotated[int, typer.Argument(metavar="N", min=0, show_default=False)],
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of islands, where several were launched."),
    ] = None,
) -> None:
    """Scale a launch to N islands.

    Afterwards NAME-0 to NAME-(N-1) are live. More are launched as the first ones were;
    those beyond N leave cleanly.
    """
    launches = launches_of(run)
    records = _of_name(launches, name)
    live: dict[int, Record] = {}
    for record in records:
        for each in Launched(record.handle).poll():
            if not each.state.is_over:
                live[each.index] = record
    newest = records[-1]
    missing = [index for index in range(n) if index not in live]
    if missing:
        _require_served(launches)
    for record in records:
        going = [index for index in live if index >= n and live[index] is record]
        if going:
            Launched(record.handle).cancel(going)
            _tell(newest, going, "told to leave")
    for stretch in _stretches(missing):
        launch_spec(
            newest.handle.engine,
            len(stretch),
            newest.spec,
            first=stretch[0],
            options=newest.handle.options,
        )
        _tell(newest, stretch, "launched")


def _require_served(launches: Sequence[Record]) -> None:
    """Return unless the run's coordinator was launched with it, and is over.

    Somebody may serve the run again since: then it answers.

    Raises:
        UsageError: it is, so more islands would find nobody.
    """
    for record in launches:
        if not record.is_coordinator:
            continue
        is_over = all(it.state.is_over for it in Launched(record.handle).poll())
        if is_over and try_look(record.handle.run) is None:
            raise UsageError(
                f"Nobody serves {record.handle.run} any more, so no island could join "
                "it. Launch its run file again: atoll launch -n N RUN.toml -- COMMAND"
            )


def _of_name(records: Sequence[Record], name: str | None) -> list[Record]:
    islands = [each for each in records if not each.is_coordinator]
    names = sorted({each.handle.name for each in islands})
    if name is None and len(names) > 1:
        raise UsageError(f"Islands of {', '.join(names)} were launched. Give --name.")
    found = [each for each in islands if name in (None, each.handle.name)]
    if not found:
        raise UsageError(
            f"No islands of the name {name!r} were launched for it; there are "
            f"{', '.join(names) or 'none'}."
        )
    return found


def _stretches(indexes: Sequence[int]) -> Iterator[list[int]]:
    """Yield indexes that follow each other, together."""
    stretch: list[int] = []
    for index in indexes:
        if stretch and index != stretch[-1] + 1:
            yield stretch
            stretch = []
        stretch.append(index)
    if stretch:
        yield stretch


def _tell(record: Record, indexes: Sequence[int], what: str) -> None:
    names = ", ".join(record.handle.island(index) for index in indexes)
    typer.echo(f"{what}: {names}")
