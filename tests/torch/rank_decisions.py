"""What ranks do when one of them decides for all."""

from __future__ import annotations

from atoll.errors import UsageError
from atoll.torch.from_run import decided


def decide(rank: int, is_refused: bool) -> tuple[list[int], str]:
    """Return who was asked as far as this rank saw, and what all were told."""
    asked: list[int] = []

    def ask() -> bool:
        asked.append(rank)
        if is_refused:
            raise UsageError("Nobody consents.")
        return rank == 0

    try:
        return asked, "yes" if decided(ask) else "no"
    except UsageError as exc:
        return asked, str(exc)
