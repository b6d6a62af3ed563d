"""`atoll cancel RUN [ISLAND...]`: islands leave and end, and their coordinator last."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated

import typer

from atoll.cli.launches import launches_of, tell_table, with_island
from atoll.cli.names import RUN
from atoll.errors import Unreachable
from atoll.launch.base import GRACE_S
from atoll.launch.book import Record
from atoll.launch.launching import Launched
from atoll.launch.states import Report
from atoll.launch.summary import rows

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
    """End islands that were launched: each leaves its run cleanly if it can.

    Without names all of them, and then the coordinator that was launched with them.
    RUN may be the id of a launch, as `atoll ps` shows it.
    """
    records = launches_of(run)
    if islands:
        _cancel_some(records, islands, grace_s)
        return
    # While there is a coordinator to leave.
    for record in sorted(records, key=lambda each: each.is_coordinator):
        launched = Launched(record.handle)
        launched.cancel(grace_s=grace_s)
        reports = _until_over(launched, record.handle.indexes, grace_s)
        tell_table(rows(reports, {}), left=2)


def _cancel_some(
    records: Sequence[Record], islands: Sequence[str], grace_s: float
) -> None:
    wanted: dict[str, list[int]] = defaultdict(list)
    by_id = {each.handle.id: each for each in records}
    for island in islands:
        record, index = with_island(records, island)
        wanted[record.handle.id].append(index)
    for launch, indexes in wanted.items():
        launched = Launched(by_id[launch].handle)
        launched.cancel(indexes, grace_s=grace_s)
        tell_table(rows(_until_over(launched, indexes, grace_s), {}), left=2)


def _until_over(
    launched: Launched, indexes: Sequence[int], grace_s: float
) -> list[Report]:
    until_s = time.monotonic() + grace_s + MORE_S
    while True:
        reports = [each for each in launched.poll() if each.index in indexes]
        if all(each.state.is_over for each in reports):
            return reports
        if time.monotonic() > until_s:
            left = [each.name for each in reports if not each.state.is_over]
            raise Unreachable(
                f"{launched.handle.engine} was told, and {', '.join(left[:8])} run "
                "still. Look again: atoll ps."
            )
        time.sleep(LOOK_S)
