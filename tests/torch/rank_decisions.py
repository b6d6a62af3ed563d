"""What ranks do when one of them decides for all."""

from __future__ import annotations

from atoll.errors import UsageError
from atoll.torch.agreement import decided


def decide(rank: int, is_refused: bool) -> tuple[list[int], str]:
    """Return who was asked as far as this rank saw, and what all were told."""
    asked: list[int] = []

    def ask() -> None:
        asked.append(rank)
        if is_refused:
            raise UsageError("Nobody consents.")

    try:
        decided(ask)
    except UsageError as exc:
        return asked, str(exc)
    return asked, ""
