"""All ranks of an island join a run together, with their checkpoints.

All ranks call `form`. They exchange descriptions of their tensors, agree that these
make a model, and the leader joins the run for all of them. An error of any rank is
raised on every rank.

Each rank saves its own parts: of the island's vectors its elements, and on the leader
also their descriptions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from atoll.checkpoint import Policy
from atoll.checkpoint.frameworks import together
from atoll.errors import AtollError, UsageError
from atoll.exchange import CollectiveRun, MemoryRun
from atoll.island import Host, join_run
from atoll.island.checkpoints import (
    CheckpointLike,
    IslandCheckpoints,
    as_policy,
    warn_fresh_optimizer,
)
from atoll.island.join import EarlierIncarnation, is_alone
from atoll.island.saved_state import SavedFragment, SavedIsland
from atoll.protocol import ModelSpec
from atoll.settings import RunSettings
from atoll.torch.checkpoint import WorldRanks
from atoll.torch.from_run import bundle_of
from atoll.torch.host import Life, Optimizers
from atoll.torch.model import Stage
from atoll.torch.ranks.channel import (
    LEADER,
    Line,
    Message,
    from_message,
    open_lines,
    to_message,
)
from atoll.torch.ranks.follower import Follower
from atoll.torch.ranks.leader import Leader
from atoll.torch.ranks.ownership import Holding, Shares, Shelves, Table, model_of
from atoll.torch.ranks.parallelism import Team, team_of
from atoll.torch.ranks.parts import Parts
from atoll.torch.ranks.sharded_memory import Spread
from atoll.torch.ranks.view import RankConstants, RankView, give, with_digests
from atoll.weights import lay_out, terms_of


def join_ranks(
    model: torch.nn.Module | Stage | Sequence[Stage],
    run: MemoryRun | CollectiveRun | str | None,
    *,
    island: str | None,
    checkpoint: CheckpointLike | None,
    check: Callable[[], None],
    optimizer: Optimizers,
    past: EarlierIncarnation | None = None,
) -> tuple[Life, list[torch.nn.Module], IslandCheckpoints | None] | None:
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
            warn_fresh_optimizer(host.joined, is_fresh=True)
        return host

    saved = keeping.saved.fragments if keeping and keeping.saved else ()
    returns = keeping is not None and keeping.is_exact
    life = form(team, enter, check, saved=saved, returns=returns)
    if keeping is not None:
        go_on(keeping, life)
    return life, [stage.module for stage in team.stages], keeping


Enter = Callable[[RankView, ModelSpec, Spread, RankConstants], Host]
"""Joins the run, at the leader."""


def form(
    team: Team,
    enter: Enter,
    check: Callable[[], None] = lambda: None,
    *,
    saved: Sequence[SavedFragment] = (),
    returns: bool = False,
) -> Leader | Follower:
    """Return this rank's life in the island that the team's ranks make.

    `check` is what each rank does first: whatever one of them raises, all do. `saved`
    are this rank's parts of a checkpoint; `returns` is whether rounds wait for the
    next life of an island that is broken off.

    Raises:
        AtollError: the same on every rank.
    """
    orders, works = open_lines(team.ranks, team.timeout, 2)
    shelves, told = _described(team, orders.rank, check)
    table, data_ranks, stages = _agreed(orders, told)
    assert shelves is not None, "else everybody has raised what is wrong here"
    spec = with_digests(orders, table, shelves, model_of(table, stages=stages))
    view = RankView(shelves, orders)

    def parts_of(settings: RunSettings) -> Parts:
        layout = lay_out(spec, settings)
        shares = Shares(table, layout)
        view.share(shares)
        terms = [terms_of(fragment, settings) for fragment in layout]
        return Parts(view, orders.rank, shares, terms)

    specs = {each.name: each for each in spec.tensors}

    def give_constant(name: str) -> None:
        give(orders, table, shelves, specs[name])

    known: dict[str, Any] = {
        "timeout_s": team.timeout.total_seconds(),
        "data_ranks": data_ranks,
    }
    if not orders.is_leader:
        follower = Follower(
            orders, works, view, parts_of, give_constant, saved=saved, **known
        )
        follower.join()
        return follower
    leader = Leader(orders, works, view, parts_of, returns=returns, **known)
    constants = RankConstants(orders, table, shelves, leader.order)
    leader.join(lambda: enter(view, spec, leader.memory, constants))
    return leader


def _described(
    team: Team, rank: int, check: Callable[[], None]
) -> tuple[Shelves | None, Message]:
    """Return what this rank holds, and what it tells the others of it, or its error."""
    try:
        check()
        shelves = Shelves(team)
    except AtollError as exc:
        return None, to_message(exc, rank)
    counts = {stage.num_stages for stage in team.stages}
    return shelves, {
        "stages": sorted(counts),
        "has_own_data": team.has_own_data,
        "holdings": [each.to_message() for each in shelves.holdings],
    }


def _agreed(line: Line, told: Message) -> tuple[Table, list[bool], int]:
    """Return what all ranks hold, who has data of its own, and how many stages."""
    said = _everybody(line, told)
    for each in said:
        if "error" in each:
            raise from_message(each)
    counts = sorted({count for each in said for count in each["stages"]})
    if len(counts) != 1:
        raise UsageError(
            f"The ranks of this island declare pipelines of {counts} stages. Give "
            "Stage(num_stages=...) the same number on all of them."
        )
    table = [[Holding.from_message(h) for h in each["holdings"]] for each in said]
    return table, [bool(each["has_own_data"]) for each in said], counts[0]


def _everybody(line: Line, told: Message) -> Sequence[Message]:
    """Return what every rank says, on every rank."""
    if not line.is_leader:
        line.say(LEADER, told)
        every: list[Message] = line.hear(LEADER)["every"]
        return every
    said = [told, *(line.hear(rank) for rank in line.others)]
    line.tell({"every": said})
    return said


class RankKept:
    """One rank's part of an island. Implements `CheckpointSubject`."""

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
    checkpoint: CheckpointLike | None, team: Team, optimizer: Optimizers, run: object
) -> IslandCheckpoints | None:
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
    return IslandCheckpoints(policy, objects, is_alone=is_alone(run), ranks=ranks)


def _agreed_policy(
    ranks: WorldRanks, checkpoint: CheckpointLike | None
) -> Policy | None:
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


def go_on(keeping: IslandCheckpoints, life: Leader | Follower) -> None:
    """Begin to keep checkpoints, on every rank, once the island is a member."""
    kept, ranks = RankKept(life), WorldRanks()
    host = life.host if isinstance(life, Leader) else None
    word = json.dumps([host.progress[0], keeping.counted_at(host)]) if host else ""
    progress, counted = json.loads(ranks.gather(word)[LEADER])
    kept.count_from(progress)
    has_cursors = keeping.keep_cursors(life.before_seal, counted=counted)
    cursor = None
    if counted is not None and has_cursors:
        moved = together(
            ranks, lambda: "yes" if keeping.restore_cursor(counted) else ""
        )
        cursor = all(moved)
    if host is not None:
        keeping.report_resume(host, cursor=cursor)
    keeping.attach(kept, is_leader=host is not None)
