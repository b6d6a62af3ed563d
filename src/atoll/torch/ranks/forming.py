"""How the processes that train one model become one island.

All ranks call `form`. They tell each other what they hold, agree that it makes a model,
and the leader joins the run for all of them. What any of them cannot accept is raised
on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atoll.errors import AtollError, UsageError
from atoll.island import Host
from atoll.island.saved import SavedFragment
from atoll.protocol import ModelSpec
from atoll.settings import RunSettings
from atoll.torch.ranks.constants import RankConstants, give, with_digests
from atoll.torch.ranks.faults import from_message, to_message
from atoll.torch.ranks.follower import Follower
from atoll.torch.ranks.holdings import Holding, Shelves
from atoll.torch.ranks.kinds import Team
from atoll.torch.ranks.leader import Leader
from atoll.torch.ranks.line import LEADER, Line, Message, open_lines
from atoll.torch.ranks.parts import Parts
from atoll.torch.ranks.shares import Shares, Table, model_of
from atoll.torch.ranks.spread import Spread
from atoll.torch.ranks.view import RankView
from atoll.weights import lay_out, terms_of

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
    counts = {stage.of for stage in team.stages}
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
            "Stage(of=...) the same number on all of them."
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
