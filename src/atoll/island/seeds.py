"""Numbers that look random and are not: the same names give the same numbers."""

from __future__ import annotations

from atoll.wire import blake3_digest


def island_seed(run: str, island: str) -> int:
    """Return a seed of 63 bits that differs for each island of a run."""
    return _hash("island", run, island) >> 1


def update_seed(run: str, fragment: int, round: int, island: str) -> int:
    """Return the seed of one update's stochastic rounding."""
    return _hash("update", run, str(fragment), str(round), island)


def _hash(*words: str) -> int:
    joined = b"\0".join(word.encode() for word in words)
    return int.from_bytes(blake3_digest(joined)[:8], "little")
