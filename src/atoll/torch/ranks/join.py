"""All ranks of an island join a run together, with their checkpoints.

All ranks call `form`. They exchange descriptions of their tensors, agree that these
make a model, and the leader joins the run for all of them. An error of any rank is
raised on every rank.

Each rank saves its elements of the island's vectors; the leader also saves their
descriptions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

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
from atoll.island.saved_state import SavedFragment
from atoll.protocol import ModelSpec
from atoll.settings import RunSettings
from atoll.torch.checkpoint import WorldRanks
from atoll.torch.from_run import bundle_of
from atoll.torch.model import Stage
from atoll.torch.ranks.channel import (
    LEADER,
    Message,
    RankChannel,
    from_message,
    open_channels,
    to_message,
)
from atoll.torch.ranks.dispatcher import RankDispatcher
from atoll.torch.ranks.follower import FollowerRank
from atoll.torch.ranks.leader import LeaderRank, RankSignals
from atoll.torch.ranks.ownership import (
    HeldTensor,
    Ownership,
    RankTensors,
    Table,
    model_of,
)
from atoll.torch.ranks.parallelism import RankGroup, rank_group_of
from atoll.torch.ranks.sharded_memory import ShardedMemory
from atoll.torch.ranks.view import RankConstants, RankView, with_digests
from atoll.weights import lay_out

RankHandle = LeaderRank | FollowerRank
"""An island's handle, and its weights, at any rank."""


def join_ranks(
    model: torch.nn.Module | Stage | Sequence[Stage],
    run: MemoryRun | CollectiveRun | str | None,
    *,
    island: str | None,
    checkpoint: CheckpointLike | None,
    check: Callable[[], None],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    past: EarlierIncarnation | None = None,
) -> tuple[RankHandle, list[torch.nn.Module], IslandCheckpoints | None] | None:
    """Return this rank's handle, modules and checkpoints; None: it trains alone.

    An error of `check` on one rank is raised on all. `past` is the island of a
    checkpoint that a trainer has written, instead of `checkpoint`.

    Raises:
        AtollError: the errors of joining, the same on every rank.
    """
    rank_group = rank_group_of(model)
    if rank_group is None:
        return None
    checkpointing = keeping_of_ranks(checkpoint, rank_group, optimizer, run)

    def enter(
        view: RankView, spec: ModelSpec, memory: ShardedMemory, constants: RankConstants
    ) -> Host:
        earlier = checkpointing if checkpointing is not None else past
        host = join_run(
            run,
            view,
            spec,
            island=island,
            memory=memory,
            checkpointing=earlier,
            constants=constants,
            bundle=bundle_of([stage.module for stage in rank_group.stages]),
        )
        if earlier is None:
            warn_fresh_optimizer(host.joined, is_fresh=True)
        return host

    saved = (
        checkpointing.saved.fragments if checkpointing and checkpointing.saved else ()
    )
    returns = checkpointing is not None and checkpointing.is_exact
    handle = form(rank_group, enter, check, saved=saved, returns=returns)
    if checkpointing is not None:
        begin_checkpoints(checkpointing, handle)
    return handle, [stage.module for stage in rank_group.stages], checkpointing


Enter = Callable[[RankView, ModelSpec, ShardedMemory, RankConstants], Host]
"""Joins the run, at the leader."""


def form(
    rank_group: RankGroup,
    enter: Enter,
    check: Callable[[], None] = lambda: None,
    *,
    saved: Sequence[SavedFragment] = (),
    returns: bool = False,
) -> RankHandle:
    """Return this rank's handle of the island that the group forms.

    Each rank calls `check` first: all raise the error of any. `saved` are this rank's
    parts of a checkpoint; `returns` is whether rounds wait for the next incarnation of
    an island that was interrupted.

    Raises:
        AtollError: the same on every rank.
    """
    orders, works = open_channels(rank_group.ranks, rank_group.timeout, 2)
    rank_tensors, message = _described(rank_group, orders.rank, check)
    table, data_ranks, stages = _agreed(orders, message)
    assert rank_tensors is not None, "else all ranks have raised this rank's error"
    spec = with_digests(orders, table, rank_tensors, model_of(table, stages=stages))
    view = RankView(rank_tensors, orders)

    def find_ownership(settings: RunSettings) -> Ownership:
        ownership = Ownership(table, lay_out(spec, settings))
        view.set_ownership(ownership)
        return ownership

    ranks = RankDispatcher(orders, works)
    memory = ShardedMemory(ranks, view, find_ownership, saved)
    constants = RankConstants(ranks, table, rank_tensors, spec)
    timeout_s = rank_group.timeout.total_seconds()
    signals = RankSignals(ranks, timeout_s)
    if not orders.is_leader:
        follower = FollowerRank(ranks, view, memory, signals, data_ranks=data_ranks)
        follower.join()
        return follower
    leader = LeaderRank(
        ranks,
        view,
        memory,
        signals,
        timeout_s=timeout_s,
        data_ranks=data_ranks,
        returns=returns,
    )
    leader.join(lambda: enter(view, spec, memory, constants))
    return leader


def _described(
    rank_group: RankGroup, rank: int, check: Callable[[], None]
) -> tuple[RankTensors | None, Message]:
    """Return this rank's tensors and their description, or None and its error."""
    try:
        check()
        rank_tensors = RankTensors(rank_group)
    except AtollError as exc:
        return None, to_message(exc, rank)
    counts = {stage.num_stages for stage in rank_group.stages}
    return rank_tensors, {
        "stages": sorted(counts),
        "has_own_data": rank_group.has_own_data,
        "holdings": [asdict(held_tensor) for held_tensor in rank_tensors.held_tensors],
    }


def _agreed(channel: RankChannel, message: Message) -> tuple[Table, list[bool], int]:
    """Return the tensors of all ranks, which have their own data, and the stages."""
    messages = _all_gather(channel, message)
    for received in messages:
        if "error" in received:
            raise from_message(received)
    counts = sorted({count for received in messages for count in received["stages"]})
    if len(counts) != 1:
        raise UsageError(
            f"The ranks of this island declare pipelines of {counts} stages. Give "
            "Stage(num_stages=...) the same number on all of them."
        )
    table = [
        [HeldTensor.from_message(fields) for fields in received["holdings"]]
        for received in messages
    ]
    has_own_data = [bool(received["has_own_data"]) for received in messages]
    return table, has_own_data, counts[0]


def _all_gather(channel: RankChannel, message: Message) -> Sequence[Message]:
    """Return the messages of all ranks, on every rank."""
    if not channel.is_leader:
        channel.send_message(LEADER, message)
        every: list[Message] = channel.receive_message(LEADER)["every"]
        return every
    messages = [message, *(channel.receive_message(rank) for rank in channel.others)]
    channel.send_to_all({"every": messages})
    return messages


def keeping_of_ranks(
    checkpoint: CheckpointLike | None,
    rank_group: RankGroup,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    run: object,
) -> IslandCheckpoints | None:
    """Restore the newest checkpoint on every rank; None without `checkpoint=`.

    Raises:
        UsageError: the island is not the whole world of torch.distributed, or not all
            of its ranks have a checkpoint.
    """
    world = dist.get_world_size()
    if len(rank_group.ranks) != world:
        if checkpoint is None:
            return None
        raise UsageError(
            f"The island has {len(rank_group.ranks)} ranks of {world}, and checkpoint= "
            "is for islands that are a whole world. Save with atoll.checkpoint instead."
        )
    ranks = WorldRanks()
    policy = _agreed_policy(ranks, checkpoint)
    if policy is None:
        return None
    modules = [stage.module for stage in rank_group.stages]
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

    All ranks wait for each other, so that an error is raised on all.
    """
    policies: list[Policy] = []

    def act() -> str:
        if checkpoint is not None:
            policies.append(as_policy(checkpoint))
        return "yes" if policies else ""

    answers = together(ranks, act)
    without = [rank for rank, answer in enumerate(answers) if not answer]
    if without and len(without) < len(answers):
        raise UsageError(
            f"Ranks {without} of this island have no checkpoint=, and the others have "
            "one. Give it to all of them."
        )
    return policies[0] if policies else None


def begin_checkpoints(checkpointing: IslandCheckpoints, handle: RankHandle) -> None:
    """Begin to save checkpoints, on every rank, once the island is a member."""
    ranks = WorldRanks()
    host = handle.host if isinstance(handle, LeaderRank) else None
    facts = (
        json.dumps([host.progress[0], checkpointing.counted_at(host)]) if host else ""
    )
    progress, counted = json.loads(ranks.gather(facts)[LEADER])
    if isinstance(handle, FollowerRank):
        handle.count_from(progress)
    has_cursors = checkpointing.keep_cursors(handle.before_seal, counted=counted)
    cursor = None
    if counted is not None and has_cursors:
        moved = together(
            ranks, lambda: "yes" if checkpointing.restore_cursor(counted) else ""
        )
        cursor = all(moved)
    if host is not None:
        checkpointing.report_resume(host, cursor=cursor)
    checkpointing.attach(handle, is_leader=host is not None)
