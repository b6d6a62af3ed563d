"""What people are told when an island goes on, or begins anew."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

from atoll.errors import AtollWarning
from atoll.island.resuming import Resumed
from atoll.protocol import JoinReply

log = logging.getLogger("atoll")


def tell_fresh(
    joined: JoinReply, is_fresh: bool, *, directory: Path | None = None
) -> None:
    """Say that the optimizer begins anew, if an earlier life of the island counted."""
    if not is_fresh or not joined.inner_steps:
        return
    where = f"{directory} holds no checkpoint of it" if directory else "no checkpoint="
    warnings.warn(
        f"Island {joined.island!r} has counted {joined.inner_steps} inner steps in an "
        f"earlier life, and goes on with a fresh optimizer: {where}. "
        'Give join(..., checkpoint="DIRECTORY") to keep its moments.',
        AtollWarning,
        stacklevel=4,
    )


def tell_resumed(
    joined: JoinReply,
    resumed: Resumed,
    *,
    made: tuple[int, int],
    cursor: bool | None,
) -> None:
    """Say how an island goes on, and what of its work is lost, in steps and tokens.

    `made` is how far it had come before it died. `cursor` is whether its data stands
    where the run has counted it; None: it need not be moved.
    """
    steps, tokens = resumed.saved
    island = joined.island
    if resumed.is_exact:
        again = max(0, made[0] - steps)
        log.info(
            "island %s goes on exactly from inner step %d; %d inner steps are made "
            "again",
            island,
            steps,
            again,
        )
        return
    if resumed.why:
        _warn(f"Island {island!r} rejoins instead of going on exactly: {resumed.why}.")
    kept = (max(steps, resumed.counted[0]), max(tokens, resumed.counted[1]))
    lost = (
        max(0, made[0] - kept[0]) + resumed.lost[0],
        max(0, made[1] - kept[1]) + resumed.lost[1],
    )
    log.info(
        "island %s rejoins from its checkpoint at inner step %d; the run has counted "
        "%d",
        island,
        steps,
        resumed.counted[0],
    )
    if lost[0]:
        _warn(
            f"Island {island!r} had made {made[0]} inner steps. The run has counted "
            f"{resumed.counted[0]}, the checkpoint holds {steps}: {lost[0]} inner "
            f"steps with {lost[1]} tokens are lost."
        )
    if cursor is False:
        _warn(
            f"Island {island!r} trains rows again that the run has counted: its data "
            f"stands at inner step {steps}, and {resumed.counted[0]} have counted."
        )


def _warn(what: str) -> None:
    warnings.warn(what, AtollWarning, stacklevel=5)
