"""File descriptors: how many connections may be open so that files can be opened, too.

A connection is a descriptor, and so is a file of the journal and an update on its way.
Without a descriptor nothing is committed, so connections get at most half of them.
"""

from __future__ import annotations

from typing import Final

WANTED: Final = 16384
"""Enough for all connections that a listener takes by default, and as many files."""

RESERVED: Final = 128
"""Kept for files at least: the journal, 64 bodies in lanes, a few for libraries."""

FEWEST: Final = 16
"""Connections that are taken however few descriptors there are."""


def raise_soft_limit() -> int:
    """Raise the soft limit of this process towards `WANTED`; return what it is then.

    It stays as it is where the system does not let it be raised.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return _finite(soft)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # macOS has a bound that the hard limit hides
        return _finite(soft)
    return most


def connection_budget() -> int:
    """Return how many connections leave enough descriptors for files."""
    import resource

    soft = _finite(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return max(FEWEST, min(soft // 2, soft - RESERVED))


def _finite(limit: int) -> int:
    import resource

    return 2**20 if limit == resource.RLIM_INFINITY else limit
