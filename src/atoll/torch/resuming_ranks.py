"""Checkpoints of an island of several ranks: each rank saves what it holds.

The work that no round has counted is not among it, nor are rounds made again: such an
island rejoins, takes the anchor, and tells what it has lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from atoll.errors import UsageError
from atoll.island.joining import is_alone
from atoll.island.keeping import Keeping, as_policy
from atoll.island.saved import SavedIsland
from atoll.torch.checkpointing_ranks import WorldRanks
from atoll.torch.life import Life
from atoll.torch.ranks.kinds import Team
from atoll.torch.resuming import Optimizers


class RankKept:
    """One rank's part of an island. Implements `Kept`."""

    def __init__(self, life: Life, *, is_leader: bool) -> None:
        self._life, self._is_leader = life, is_leader

    @property
    def round(self) -> int:
        return self._life.round_told

    @property
    def progress(self) -> tuple[int, int]:
        if self._is_leader:
            return self._life.host.progress
        return self._life.tally.inner_steps, self._life.tally.tokens

    @property
    def settled_steps(self) -> int:
        return 0

    @contextmanager
    def saving(self, *, is_exact: bool) -> Iterator[SavedIsland | None]:
        """Give the island's counts, at its leader."""
        if not self._is_leader:
            yield None
            return
        host, joined = self._life.host, self._life.host.joined
        yield SavedIsland(
            run=joined.run,
            island=joined.island,
            incarnation=joined.incarnation,
            origin=joined.incarnation,
            step=host.run_steps,
            inner_steps=host.tally.inner_steps,
            tokens=host.tally.tokens,
            before_steps=joined.inner_steps,
            before_tokens=joined.tokens,
            is_exact=False,
            fragments=[],
        )


def keeping_of_ranks(
    checkpoint: object, team: Team, optimizer: Optimizers, run: object
) -> Keeping | None:
    """Restore what `checkpoint=` holds on every rank; None without one.

    Raises:
        UsageError: the island is not the whole world of torch.distributed.
    """
    if checkpoint is None:
        return None
    if len(team.ranks) != dist.get_world_size():
        raise UsageError(
            f"The island has {len(team.ranks)} ranks of {dist.get_world_size()}, and "
            "checkpoint= is for islands that are a world of their own. Save with "
            "atoll.checkpoint instead."
        )
    modules = [stage.module for stage in team.stages]
    several = list(optimizer) if isinstance(optimizer, Sequence) else optimizer
    objects = {
        "model": modules[0] if len(modules) == 1 else modules,
        "optimizer": several,
    }
    policy, ranks = as_policy(checkpoint), WorldRanks()
    return Keeping(policy, objects, is_alone=is_alone(run), ranks=ranks)


def go_on(keeping: Keeping, life: Life) -> None:
    """Begin to keep checkpoints, on every rank, once the island is a member."""
    is_leader = dist.get_rank() == 0
    if is_leader:
        keeping.tell(life.host)
    else:
        life.tally.inner_steps = int(life.metrics()["atoll/inner_steps"])
    keeping.go_on(RankKept(life, is_leader=is_leader), is_leader=is_leader)
