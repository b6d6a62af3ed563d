"""`atoll doctor RUN`: check the connection from this machine to a run, step by step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from atoll import disk
from atoll.cli.run_names import RUN, locate_run
from atoll.cli.terminal import echo
from atoll.disk.space import RECORDS_BYTES
from atoll.errors import DiskFull, UsageError, exit_code
from atoll.run_client import Check, open_run
from atoll.run_client.checks import run_checks
from atoll.security import RunUrl
from atoll.security.private_files import private_directory
from atoll.telemetry.text import format_size


def doctor(
    run: Annotated[str | None, RUN] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Directory on this machine for a run to serve."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the connection from this machine to a run, step by step.

    Exits with 0 when every step is well, and otherwise with the code of the first
    that failed, whose text has the remedy.
    """
    if run is None and directory is None:
        raise UsageError("Name a run, or give a directory with --dir.")
    checks = []
    for check in _all_checks(run, directory):
        checks.append(check)
        if not as_json:
            _print_check(check)
    if as_json:
        rows = [{"step": c.name, "ok": c.is_ok, "said": c.detail} for c in checks]
        typer.echo(json.dumps(rows, indent=2))
    if checks[-1].error is not None:
        raise typer.Exit(exit_code(checks[-1].error))


def _all_checks(run: str | None, directory: Path | None) -> Iterator[Check]:
    """Yield the results of checks up to the first that failed."""
    if directory is not None:
        for check in run_checks(
            (
                ("directory", partial(_check_private, directory)),
                ("file system", partial(_check_file_system, directory)),
                ("free space", partial(_check_free_space, directory)),
            )
        ):
            yield check
            if not check.is_ok:
                return
    if run is None:
        return
    (name,) = run_checks([("name", partial(_check_name, run))])
    if not name.is_ok:
        yield name
        return
    location = locate_run(run)
    if isinstance(location, RunUrl):
        yield name
    yield from open_run(str(location)).checks()


def _check_name(run: str) -> str:
    url = str(locate_run(run))
    return f"{run} is {url}" if run != url else run


def _check_private(directory: Path) -> str:
    private_directory(directory)
    return f"{directory} is this user's alone"


def _check_file_system(directory: Path) -> str:
    traits = disk.require_able(directory)
    detail = "locks, syncs and renames"
    if not traits.has_tmpfile:
        detail += "; it has no O_TMPFILE, so updates have a name for a moment"
    if not traits.has_links:
        detail += "; it has no hard links, so private files are made under a lock"
    return detail


def _check_free_space(directory: Path) -> str:
    stats = os.statvfs(directory)
    free = stats.f_bavail * stats.f_frsize
    if free < RECORDS_BYTES:
        raise DiskFull(
            f"{free} bytes are free in {directory}, and {RECORDS_BYTES} are kept for "
            "the journal of even the smallest run. Free some space there."
        )
    return f"{format_size(free)}, of which a run keeps a reserve for its journal"


def _print_check(check: Check) -> None:
    verdict = ("ok    ", "green") if check.is_ok else ("failed", "red")
    echo(verdict, (f"  {check.name:<11} {check.detail}", ""))
