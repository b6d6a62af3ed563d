"""What every command that takes a run file takes: the file, and changes to it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.errors import AtollWarning
from atoll.settings import parse_assignment


def _argument(about: str) -> Any:
    return typer.Argument(metavar="RUN.toml", help=about, show_default=False)


RunFile = Annotated[Path, _argument("A run file.")]
RunFileOrNone = Annotated[
    Path | None, _argument("A run file; streaming in 2 fragments without.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; repeatable."),
]


def values_of(assignments: Sequence[str] | None) -> dict[str, object]:
    """Return the values that `--set` was given; the last one of a key stands.

    Raises:
        UsageError: one is no KEY=VALUE.
    """
    return dict(map(parse_assignment, assignments or ()))


@contextmanager
def warnings_told() -> Iterator[None]:
    """Tell each warning of the settings once, after the block."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AtollWarning)
        yield
    for said in dict.fromkeys(str(each.message) for each in caught):
        typer.echo(f"atoll: {said}", err=True)
