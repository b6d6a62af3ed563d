"""`atoll simulate`: run islands in virtual time, and print the timeline."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.run_file import Assignments, RunFileOrNone, print_warnings, values_of
from atoll.cli.terminal import can_redraw, echo, live_view, width
from atoll.errors import UsageError

if TYPE_CHECKING:  # the simulator needs greenlet, which may not be installed
    from atoll.simulate.report import (
        Facts,
        PageLine,
    )
    from atoll.simulate.run import Simulated
    from atoll.simulate.scheduler import TraceEvent
    from atoll.simulate.setup import Setup
    from atoll.simulate.story import Narrator

MAX_ISLANDS, MAX_ROUNDS, MAX_SEED = 1024, 10_000, 2**63 - 1

COLOURS = {
    "good": "green",
    "bad": "red",
    "fault": "yellow",
    "faint": "bright_black",
}


def simulate(
    run_file: RunFileOrNone = None,
    islands: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_ISLANDS, help="Islands. Default: start_islands, or 4."
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_ROUNDS, help="Last round. Default: end_rounds, or 20."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Seed of all randomness.")
    ] = 0,
    faults: Annotated[
        str | None,
        typer.Option(metavar="PLAN.toml", help="Plan of faults, or 'none'."),
    ] = None,
    storm: Annotated[
        float | None,
        typer.Option(
            metavar="INTENSITY",
            min=0.01,
            max=100.0,
            help="Intensity of random faults. Default: 1.0 if --faults is absent.",
        ),
    ] = None,
    store: Annotated[
        bool,
        typer.Option("--store", help="Use a bucket instead of a coordinator."),
    ] = False,
    assignments: Assignments = None,
    is_detailed: Annotated[
        bool, typer.Option("--all", help="Show every message and disk call.")
    ] = False,
    is_quiet: Annotated[
        bool, typer.Option("--quiet", help="Leave out the timeline.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
) -> None:
    """Simulate islands and a coordinator in virtual time.

    With --store there is no coordinator: rosters in a bucket decide the rounds. The
    same options print the same bytes. After the timeline each island has a lane, with
    one mark for each round of a fragment. With --json the first object is the setup,
    the last one the summary, and each one between them an event.

    Exits with 0 if every invariant held, 1 if one was violated, 2 if the options are
    wrong.
    """
    _require_greenlet()
    from atoll.simulate.setup import prepare

    with print_warnings():
        setup = prepare(
            run_file,
            values_of(assignments),
            islands=islands,
            rounds=rounds,
            seed=seed,
            faults=faults,
            storm=storm,
            store=store,
        )
    if is_quiet and (as_json or is_detailed):
        raise UsageError(
            "--quiet leaves out the timeline, so it excludes --all, --json."
        )
    show = _as_json if as_json else partial(_as_text, is_quiet=is_quiet)
    options: dict[str, object] = {"islands": islands, "rounds": rounds, "seed": seed}
    options |= {"faults": faults, "storm": storm, "store": store or None}
    if not show(setup, is_detailed, _command(run_file, options, assignments or [])):
        raise typer.Exit(1)


def _require_greenlet() -> None:
    if importlib.util.find_spec("greenlet") is None:
        raise UsageError(
            "atoll simulate needs greenlet, which is not installed. "
            'Run: pip install "atoll[simulate]"'
        )


def _as_text(setup: Setup, is_detailed: bool, command: str, *, is_quiet: bool) -> bool:
    from atoll.simulate import report
    from atoll.simulate.story import Narrator, StoryEntry

    columns = width(report.WIDTH)
    page = report.Page(
        setup.islands,
        setup.rounds,
        width=columns,
        is_verbose=is_detailed,
        is_async=setup.settings.sync.is_async,
    )
    lanes = report.Lanes(setup.islands, has_coordinator=not setup.store)

    def show(entry: StoryEntry) -> None:
        lanes.add(entry)
        if not is_quiet:
            _print(page.add(entry))

    _print(report.heading(setup, page))
    narrator = Narrator(setup.plan, setup.islands, show, is_verbose=is_detailed)
    result = _run(setup, narrator)
    if not is_quiet:
        _print([*page.flush(), report.PageLine("")])
    if drawn := [*lanes.lines(columns)]:
        _print([*drawn, report.PageLine("")])
    _print(report.summary(setup, page, result, narrator.tallies))
    if result.violations:
        _print(report.reproduction(setup, command))
    return not result.violations


def _as_json(setup: Setup, is_detailed: bool, command: str) -> bool:
    from atoll.simulate import report
    from atoll.simulate.story import Narrator

    def write(facts: Facts) -> None:
        typer.echo(json.dumps(facts))

    write(report.opening_facts(setup))
    narrator = Narrator(
        setup.plan,
        setup.islands,
        lambda entry: write(report.entry_facts(entry)),
        is_verbose=is_detailed,
    )
    result = _run(setup, narrator)
    summary = report.closing_facts(setup, result, narrator.tallies)
    if result.violations:
        summary["command"] = command
    write(summary)
    return not result.violations


def _run(setup: Setup, narrator: Narrator) -> Simulated:
    from atoll.simulate.run import simulate as run
    from atoll.simulate.run import without_warnings

    with (
        _round_progress(setup.rounds) as show,
        without_warnings(),  # the timeline has them already
    ):

        def trace(event: TraceEvent) -> None:
            narrator.add(event)
            if event.action == "commit":
                show(event.detail.split()[1])

        return run(
            setup.settings,
            islands=len(setup.islands),
            faults=setup.plan,
            seed=setup.seed,
            trace=trace,
            store=setup.store,
        )


@contextmanager
def _round_progress(rounds: int) -> Iterator[Callable[[str], None]]:
    """Show the current round on stderr, if the timeline goes to a file or pipe."""
    if not can_redraw(sys.stderr) or sys.stdout.isatty():
        yield lambda number: None
        return
    with live_view(sys.stderr, is_transient=True) as live:
        yield lambda number: live.update(f"round {number} of {rounds}", refresh=True)


def _print(lines: Iterable[PageLine]) -> None:
    for line in lines:
        echo((line.text, COLOURS.get(line.tone, "")))


def _command(
    run_file: Path | None, options: Mapping[str, object], assignments: Sequence[str]
) -> str:
    """Return the command that makes the same run."""
    argv = ["atoll", "simulate", *([str(run_file)] if run_file else [])]
    for name, value in options.items():
        if value is not None:
            argv += [f"--{name}", *([] if value is True else [str(value)])]
    for assignment in assignments:
        argv += ["--set", assignment]
    return shlex.join(argv)
