"""Checkpoints of an island of several ranks: each rank saves what it holds.

Of the island itself each has its own parts of every vector, and the leader all that
they are known by.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from atoll.checkpoint import Policy
from atoll.checkpoint.ranks import LEADER, together
from atoll.errors import UsageError
from atoll.island.joining import is_alone
from atoll.island.keeping import Keeping, as_policy
from atoll.island.saved import SavedIsland
from atoll.torch.checkpointing_ranks import WorldRanks
from atoll.torch.ranks.follower import Follower
from atoll.torch.ranks.kinds import Team
from atoll.torch.ranks.leader import Leader
from atoll.torch.resuming import Optimizers


class RankKept:
    """One rank's part of an island. Implements `Kept`."""

    def __init__(self, life: Leader | Follower) -> None:
        self._life, self._before_steps = life, 0

    @property
    def round(self) -> int:
        return self._life.round_told

    @property
    def progress(self) -> tuple[int, int]:
        if isinstance(self._life, Leader):
            return self._life.progress
        tally = self._life.tally
        return self._before_steps + tally.inner_steps, tally.tokens

    @property
    def settled_steps(self) -> int:
        """The island's, at its leader: nobody else is asked."""
        return self._life.host.settled_steps if isinstance(self._life, Leader) else 0

    @contextmanager
    def saving(self, *, is_exact: bool) -> Iterator[SavedIsland]:
        with self._life.saving(is_exact=is_exact) as saved:
            yield saved

    def count_from(self, progress: int) -> None:
        """Count inner steps as the leader does, who has made so many in all lives."""
        if isinstance(self._life, Follower):
            made = int(self._life.metrics()["atoll/inner_steps"])
            self._life.tally.inner_steps = made
            self._before_steps = progress - made


def keeping_of_ranks(
    checkpoint: object, team: Team, optimizer: Optimizers, run: object
) -> Keeping | None:
    """Restore what `checkpoint=` holds on every rank; None without one.

    Raises:
        UsageError: the island is not the whole world of torch.distributed, or not all
            of its ranks have a checkpoint.
    """
    world = dist.get_world_size()
    if len(team.ranks) != world:
        if checkpoint is None:
            return None
        raise UsageError(
            f"The island has {len(team.ranks)} ranks of {world}, and checkpoint= is "
            "for islands that are a world of their own. Save with atoll.checkpoint "
            "instead."
        )
    ranks = WorldRanks()
    policy = _agreed_policy(ranks, checkpoint)
    if policy is None:
        return None
    modules = [stage.module for stage in team.stages]
    several = list(optimizer) if isinstance(optimizer, Sequence) else optimizer
    objects = {
        "model": modules[0] if len(modules) == 1 else modules,
        "optimizer": several,
    }
    return Keeping(policy, objects, is_alone=is_alone(run), ranks=ranks)


def _agreed_policy(ranks: WorldRanks, checkpoint: object) -> Policy | None:
    """Return this rank's policy, if all ranks have one; None: none of them has.

    Who saves waits for the others, so that what is wrong is raised on all.
    """
    policies: list[Policy] = []

    def act() -> str:
        if checkpoint is not None:
            policies.append(as_policy(checkpoint))
        return "yes" if policies else ""

    said = together(ranks, act)
    without = [rank for rank, word in enumerate(said) if not word]
    if without and len(without) < len(said):
        raise UsageError(
            f"Ranks {without} of this island are given no checkpoint=, and the others "
            "are. Give it to all of them."
        )
    return policies[0] if policies else None


def go_on(keeping: Keeping, life: Leader | Follower) -> None:
    """Begin to keep checkpoints, on every rank, once the island is a member."""
    kept, ranks = RankKept(life), WorldRanks()
    host = life.host if isinstance(life, Leader) else None
    word = json.dumps([host.progress[0], keeping.counted_at(host)]) if host else ""
    progress, counted = json.loads(ranks.gather(word)[LEADER])
    kept.count_from(progress)
    has_cursors = keeping.keep_cursors(life.before_seal, counted=counted)
    cursor = None
    if counted is not None and has_cursors:
        moved = together(ranks, lambda: "yes" if keeping.put_cursor(counted) else "")
        cursor = all(moved)
    if host is not None:
        keeping.tell(host, cursor=cursor)
    keeping.go_on(kept, is_leader=host is not None)
