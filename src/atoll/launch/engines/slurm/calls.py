"""Slurm's programs, asked and understood.

No accounting database is needed: `scontrol` knows live jobs and those that ended some
minutes ago, and leaders have written down the rest.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from atoll.errors import Refused, RemoteError, Unreachable, UsageError
from atoll.launch.passes import PASS, PASS_FILE

PROGRAMS = ("sbatch", "scontrol", "squeue", "scancel")
ASK_S = 60.0
AT_ONCE = 256
"""Tasks that one `scancel` is told of."""

_ABSENT = re.compile(r"Invalid job id|job not found|already completing", re.I)
_UNREACHABLE = re.compile(
    r"unable to contact|connection (refused|timed out)|timed out|controller", re.I
)
_DENIED = re.compile(r"access.*denied|not permitted|permission|invalid account", re.I)


def submit(script: Path) -> int:
    """Submit a batch script, and return the number of its job."""
    said = ask(["sbatch", "--parsable", str(script)])
    number = said.strip().partition(";")[0]
    if not number.isdecimal():
        raise RemoteError(f"sbatch has answered with {said[:200]!r}, and no number.")
    return int(number)


def shown(job: int) -> list[dict[str, str]]:
    """Return what the controller knows of a job's tasks, [] if it knows nothing."""
    said = ask(["scontrol", "--oneliner", "show", "job", str(job)], absent="")
    return [_fields(line) for line in said.splitlines() if "JobId=" in line]


def number_named(name: str) -> int | None:
    """Return the job of a name, if one is waiting or running."""
    said = ask(["squeue", "--noheader", "--format=%A", f"--name={name}"])
    numbers = [int(each) for each in said.split() if each.isdecimal()]
    return min(numbers) if numbers else None


def scancel(named: Sequence[str]) -> None:
    """Have Slurm end tasks; those that it does not know are over."""
    for first in range(0, len(named), AT_ONCE):
        ask(["scancel", *named[first : first + AT_ONCE]], absent="")


def ask(words: Sequence[str], *, absent: str | None = None) -> str:
    """Return what a program says, or `absent` if it knows of no such job.

    Raises:
        UsageError, Refused, Unreachable: it failed; its own words are told.
    """
    # What this process was given to be an island is not for those it launches.
    hidden = {PASS, PASS_FILE, "ATOLL_RUN", "ATOLL_ISLAND", "ATOLL_ISLAND_INDEX"}
    around = {key: value for key, value in os.environ.items() if key not in hidden}
    try:
        done = subprocess.run(
            list(words), env=around, capture_output=True, text=True, timeout=ASK_S
        )
    except subprocess.TimeoutExpired as exc:
        raise Unreachable(
            f"{words[0]} has not answered for {ASK_S:g} s. Is Slurm's controller up?"
        ) from exc
    if done.returncode == 0:
        return done.stdout
    said = " ".join((done.stderr or done.stdout).split())[:500]
    if absent is not None and _ABSENT.search(said):
        return absent
    if _UNREACHABLE.search(said):
        raise Unreachable(f"Slurm's controller does not answer: {said}.")
    if _DENIED.search(said):
        raise Refused(f"Slurm does not let this user: {said}.")
    raise UsageError(f"{words[0]} says: {said or f'exit code {done.returncode}'}.")


def _fields(line: str) -> dict[str, str]:
    """Return the `Key=value` words of a line; a value may hold spaces, a key none."""
    fields: dict[str, str] = {}
    for match in re.finditer(r"(?:^| )([A-Za-z:/]+)=(.*?)(?= [A-Za-z:/]+=|$)", line):
        fields.setdefault(match[1], match[2])
    return fields
