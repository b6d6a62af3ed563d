"""Owns the mathematics of a round: when, which part, how merged, stepped and adopted.

Does not know time, bytes, islands' processes or any framework: arrays in, arrays out.
Start reading at `arithmetic`, then `outer` and `merge`; `schedule` and `fragments`
stand alone.
"""

from atoll.algorithm import (
    adopt,
    arithmetic,
    compress,
    fragments,
    merge,
    outer,
    pace,
    schedule,
)

__all__ = [
    "adopt",
    "arithmetic",
    "compress",
    "fragments",
    "merge",
    "outer",
    "pace",
    "schedule",
]
