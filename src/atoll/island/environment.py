"""What an island reads from its environment: addresses and secrets, nothing else."""

from __future__ import annotations

import os

from atoll.errors import UsageError


def run_from_environment() -> str:
    """Return the run named by ATOLL_RUN.

    Raises:
        UsageError: the variable is not set.
    """
    run = os.environ.get("ATOLL_RUN", "")
    if not run:
        raise UsageError(
            "No run was given and ATOLL_RUN is not set. Pass run=..., or set "
            'ATOLL_RUN; "none" trains alone.'
        )
    return run
