"""The run file of a command, and the `--set` changes to it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.errors import AtollWarning, SettingsError
from atoll.fields import shortest_fp32
from atoll.settings import RunSettings, parse_assignment

FEW_ROUNDS = 200
"""Rounds that outer momentum 0.9 needs to take effect."""

SHORT_MOMENTUM = 0.81
"""Above this a short run ends before its velocity has settled."""


def _argument(help_text: str) -> Any:
    return typer.Argument(metavar="RUN.toml", help=help_text, show_default=False)


RunFile = Annotated[Path, _argument("A run file.")]
RunFileOrNone = Annotated[
    Path | None, _argument("A run file. Default: a run with 2 fragments.")
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


def settings_of(run_file: Path, assignments: Sequence[str] | None) -> RunSettings:
    """Return the settings of a new run; print a warning about unwise values.

    Raises:
        SettingsError: the file or a `--set` is wrong.
    """
    with print_warnings():
        settings = RunSettings.from_toml(run_file)
        settings = settings.with_values(values_of(assignments))
    rounds, momentum = settings.run.end_rounds, settings.outer.momentum
    decay = settings.run.decay_round
    # Not a rule of the settings: a run that is stopped early has such values.
    if rounds is not None and decay is not None and decay > rounds:
        raise SettingsError(
            f"run.decay_round={decay} is beyond run.end_rounds={rounds}, so that no "
            f"step would decay. Choose at most {rounds}."
        )
    if rounds is not None and rounds < FEW_ROUNDS and momentum > SHORT_MOMENTUM:
        typer.echo(
            f"atoll: outer.momentum={shortest_fp32(momentum)} wants about {FEW_ROUNDS} "
            f"rounds, and run.end_rounds={rounds}. Choose 0.5 to 0.8 for a short run.",
            err=True,
        )
    return settings


@contextmanager
def print_warnings() -> Iterator[None]:
    """Print each warning of the settings once, after the block."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AtollWarning)
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        typer.echo(f"atoll: {text}", err=True)
