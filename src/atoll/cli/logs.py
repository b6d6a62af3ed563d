"""`atoll logs RUN [ISLAND]`: what launched islands say."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated

import typer

from atoll.cli.launches import launches_of, with_island
from atoll.cli.names import RUN
from atoll.launch.launching import Launched

EVERY_S = 1.0


@dataclass
class Tail:
    """One island's log, and how much of it was told."""

    launched: Launched
    index: int
    told: int = 0

    @property
    def island(self) -> str:
        return self.launched.handle.island(self.index)

    def new_lines(self) -> list[str]:
        handle, launcher = self.launched.handle, self.launched.launcher
        said = launcher.logs(handle, self.index, after=self.told)
        self.told += len(said)
        return said


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
    """Print what islands that were launched have said, all of their lives.

    Lines of several islands begin with the island's name.
    """
    tails = _tails(run, island)
    has_names = len(tails) > 1
    for tail in tails:
        said = tail.new_lines()
        first = 0 if last is None else max(0, len(said) - last)
        _tell(tail, said[first:], has_names)
    while follow:
        is_over = all(_is_over(tail) for tail in tails)
        for tail in tails:
            _tell(tail, tail.new_lines(), has_names)
        if is_over:
            return
        time.sleep(EVERY_S)


def _tails(run: str, island: str | None) -> list[Tail]:
    records = launches_of(run)
    if island is not None:
        record, index = with_island(records, island)
        return [Tail(Launched(record.handle), index)]
    return [
        Tail(launched, index)
        for launched in (Launched(each.handle) for each in records)
        for index in launched.handle.indexes
    ]


def _tell(tail: Tail, said: list[str], has_names: bool) -> None:
    for line in said:
        typer.echo(f"{tail.island} | {line}" if has_names else line)


def _is_over(tail: Tail) -> bool:
    reports = tail.launched.poll()
    return all(each.state.is_over for each in reports if each.index == tail.index)
