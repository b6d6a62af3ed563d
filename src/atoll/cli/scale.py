"""`atoll scale RUN N`: more islands of the same kind, or fewer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from atoll.cli.launches import launches_of
from atoll.cli.names import RUN
from atoll.errors import UsageError
from atoll.launch.api import Launched, launch_spec
from atoll.launch.launches import Record
from atoll.launch.run_status import try_look


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
