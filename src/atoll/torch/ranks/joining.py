"""Joining a run by all ranks of an island."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from atoll.exchange import MemoryRun
from atoll.exchange.collective import CollectiveRun
from atoll.island import Host, join_run
from atoll.island.joining import Past
from atoll.island.keeping import Keeping
from atoll.island.resumed import tell_fresh
from atoll.protocol import ModelSpec
from atoll.torch.from_run import bundle_of
from atoll.torch.life import Life
from atoll.torch.ranks.constants import RankConstants
from atoll.torch.ranks.forming import form
from atoll.torch.ranks.kinds import team_of
from atoll.torch.ranks.spread import Spread
from atoll.torch.ranks.view import RankView
from atoll.torch.resuming import Optimizers
from atoll.torch.resuming_ranks import go_on, keeping_of_ranks
from atoll.torch.stage import Stage


def join_ranks(
    model: torch.nn.Module | Stage | Sequence[Stage],
    run: MemoryRun | CollectiveRun | str | None,
    *,
    island: str | None,
    checkpoint: object,
    check: Callable[[], None],
    optimizer: Optimizers,
    past: Past | None = None,
) -> tuple[Life, list[torch.nn.Module], Keeping | None] | None:
    """Return this rank's life, modules and checkpoints; None: it trains alone.

    What `check` raises on one rank, all of them raise. `past` is what somebody else's
    checkpoint knows of the island, in the place of `checkpoint`.

    Raises:
        AtollError: what joining raises, the same on every rank.
    """
    team = team_of(model)
    if team is None:
        return None
    keeping = keeping_of_ranks(checkpoint, team, optimizer, run)

    def enter(
        view: RankView, spec: ModelSpec, memory: Spread, constants: RankConstants
    ) -> Host:
        known = keeping if keeping is not None else past
        host = join_run(
            run,
            view,
            spec,
            island=island,
            memory=memory,
            keeping=known,
            constants=constants,
            bundle=bundle_of([stage.module for stage in team.stages]),
        )
        if known is None:
            tell_fresh(host.joined, is_fresh=True)
        return host

    saved = keeping.saved.fragments if keeping and keeping.saved else ()
    returns = keeping is not None and keeping.is_exact
    life = form(team, enter, check, saved=saved, returns=returns)
    if keeping is not None:
        go_on(keeping, life)
    return life, [stage.module for stage in team.stages], keeping
