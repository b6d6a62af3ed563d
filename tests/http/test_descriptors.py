"""Connections leave descriptors for files; the soft limit is raised where it can be."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, resource, sys
from atoll.http.listener import connection_budget, raise_soft_limit
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
before = connection_budget()
got = raise_soft_limit()
now = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
print(json.dumps([before, got, now, connection_budget()]))
"""


def limited(soft: int, hard: int) -> list[int]:
    """Return what a process with these limits gets: its own cannot be put back."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(soft), str(hard)],
        check=True,
        capture_output=True,
        text=True,
    )
    found: list[int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("soft", "hard", "before", "after"),
    [
        (256, 256, 128, 128),  # half of them
        (256, 2048, 128, 1024),  # raised to the hard limit
        (200, 200, 72, 72),  # 128 are for files
        (100, 100, 16, 16),  # too few for anything; some are served nevertheless
    ],
)
def test_connections_get_at_most_half(
    soft: int, hard: int, before: int, after: int
) -> None:
    """The budget follows from the limit that the process has got."""
    assert limited(soft, hard) == [before, hard, hard, after]
