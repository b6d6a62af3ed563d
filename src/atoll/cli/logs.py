"""`atoll logs RUN [ISLAND]`: what launched islands say."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated

import typer

from atoll.cli.launches import launches_of, with_island
from atoll.cli.names import RUN
from atoll.errors import Unreachable
from atoll.launch.api import Launched, Patience

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
