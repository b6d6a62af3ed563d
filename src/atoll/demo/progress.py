"""What the islands are doing, as lines for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BAR = 24


def lines(status: Mapping[str, Any]) -> list[str]:
    """Return a line for each island of a status document, and why the run waits."""
    last_round = status["last_round"] or 1
    islands = sorted(status["islands"], key=lambda each: str(each["island"]))
    told = [_line(each, last_round) for each in islands]
    return [*told, *([status["why"]] if status["why"] else [])]


def _line(island: Mapping[str, Any], last_round: int) -> str:
    done = min(1.0, island["round"] / last_round)
    filled = round(done * BAR)
    loss = "     " if island["loss"] is None else f"{island['loss']:5.3f}"
    return (
        f"{island['island']:<12} {'━' * filled}{'╌' * (BAR - filled)} "
        f"round {island['round']:>3} of {last_round}   loss {loss}   "
        f"{island['tokens']:>9,} tokens   waited {100 * island['wait_share']:4.1f} %"
    )
