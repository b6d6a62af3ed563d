"""`atoll cancel RUN [ISLAND...]`: islands leave and end, and their coordinator last."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated

import typer

from atoll.cli.launches import launches_of, tell_table, with_island
from atoll.cli.names import RUN
from atoll.errors import AtollError, RemoteError, Unreachable
from atoll.launch.api import Launched, rows
from atoll.launch.base import GRACE_S, Report
from atoll.launch.launches import Record

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
