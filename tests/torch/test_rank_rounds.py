"""Rounds that do not go as planned are the same for many ranks and for one process."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import atoll.torch
from atoll.security import Role, token_file
from tests.coordinator.serving import serving
from tests.torch import rank_rounds
from tests.torch.processes import Group, run_groups
from tests.torch.rank_loops import net, settings

# The first of them loads torch for all.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

LOSSY: dict[str, dict[str, Any]] = {
    "wire": {"up": "e3m0", "down": "bf16"},
    "sync": {"sync_every": 4, "num_fragments": 2, "overlap_steps": 2},
}
"""A codec that leaves much over, and updates in flight."""


@pytest.mark.parametrize("steps", [5, 7, 9])
def test_what_is_left_when_ranks_leave_is_what_one_process_leaves(steps: int) -> None:
    """With updates in flight and work since, the run ends with the same bits."""
    run = settings(99, **LOSSY)
    spread, (alone,) = run_groups(
        Group(rank_rounds.leave_early, ("fsdp", run, steps), ranks=2),
        Group(rank_rounds.leave_early, ("alone", run, steps)),
    )
    assert spread[0] == alone


@pytest.mark.parametrize("script", ["cm", "mmc", "cp", "mmmc"])
def test_missed_rounds_are_carried_alike(script: str) -> None:
    """Counted, missed and passed rounds leave the bits of one process behind."""
    run = settings(8, wire=LOSSY["wire"], sync={"sync_every": 4, "overlap_steps": 2})
    spread, (alone,) = run_groups(
        Group(rank_rounds.live_through, ("fsdp", run, script), ranks=2),
        Group(rank_rounds.live_through, ("alone", run, script)),
    )
    assert spread == [alone, alone]
    assert alone["carried"] or "m" not in script


ASYNC: dict[str, Any] = {
    "wire": {"up": "e3m0", "down": "bf16"},
    "sync": {"mode": "async", "sync_every": 4, "overlap_steps": 3},
}


@pytest.mark.parametrize("script", ["cm", "mmpc", "ct"])
def test_asynchronous_updates_are_taken_alike(script: str) -> None:
    """Rounds pass before and after those that list the updates: nothing is carried.

    After three of them the first outcome has no body, and the state is fetched.
    """
    run = settings(12, **ASYNC)
    spread, (alone,) = run_groups(
        Group(rank_rounds.live_through, ("fsdp", run, script), ranks=2),
        Group(rank_rounds.live_through, ("alone", run, script)),
    )
    assert spread == [alone, alone]
    assert alone["carried"] == 0
    assert alone["counted"] >= 5


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_rejoin_with_an_update_that_the_anchor_has_passed(kind: str) -> None:
    """Each rank gets its part of the update's values: the bits of one process."""
    run = settings(12, **ASYNC)
    (spread, _), (alone,) = run_groups(
        Group(rank_rounds.rejoin_behind, (kind, run), ranks=2),
        Group(rank_rounds.rejoin_behind, ("alone", run)),
    )
    assert spread == alone


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "pipeline"])
def test_windows_that_change_are_alike_on_all_ranks(kind: str) -> None:
    """Ranks with shorter windows end on the bits of one process, in the same steps.

    Between two synchronisations a follower knows the schedule step only by the stride.
    """
    run = settings(8, **LOSSY).with_values({"sync.dynamic_local_updates": True})
    whole = "whole" if kind == "pipeline" else "alone"
    windows = (3, 1, 2, 0)
    ranks, (alone,) = run_groups(
        Group(rank_rounds.train_windows, (kind, run, windows), ranks=2),
        Group(rank_rounds.train_windows, (whole, run, windows)),
    )
    assert ranks == [alone, alone]
    # Of 4 schedule steps, windows have 4 inner steps at first, and then 3, 1, 2 or 4.
    assert {b - a for a, b in pairwise(alone["run_steps"])} == {1, 2, 4}


def test_an_error_between_two_synchronisations_is_raised_by_all() -> None:
    """What the leader meets while all train is raised where all of them stop."""
    ((first, second),) = run_groups(Group(rank_rounds.lose_the_lease, ranks=2))
    assert first == second
    assert first == ("LeaseLost", "Another incarnation holds the name.")


def test_a_frozen_layer_that_is_sharded_is_the_same_constant(tmp_path: Path) -> None:
    """An FSDP2 island and one process agree on the digest of what neither trains."""
    tables = {"run": {"start_islands": 2}}
    with serving(tmp_path / "run", settings(2, **tables)) as coordinator:
        token = str(token_file(tmp_path / "run", Role.ISLAND))
        environment = {"ATOLL_TOKEN_FILE": token}
        url = coordinator.url
        spread, alone = run_groups(
            Group(
                rank_rounds.train_frozen,
                ("fsdp", url, "a"),
                ranks=2,
                environment=environment,
            ),
            Group(
                rank_rounds.train_frozen, ("alone", url, "b"), environment=environment
            ),
        )
    assert {*spread, *alone} == {alone[0]}


def test_a_frozen_layer_that_is_sharded_is_brought_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader gathers the constants of a run that its ranks found."""
    with serving(tmp_path / "run", settings(1)) as coordinator:
        token = str(token_file(tmp_path / "run", Role.ISLAND))
        monkeypatch.setenv("ATOLL_TOKEN_FILE", token)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
        run_groups(
            Group(
                rank_rounds.train_frozen,
                ("fsdp", coordinator.url, "a"),
                ranks=2,
                environment={"ATOLL_TOKEN_FILE": token},
            )
        )
        built = atoll.torch.build(lambda: rank_rounds.frozen(net(1)), coordinator.url)
    founded = net(0).layers[0].state_dict()
    for name, values in built.layers[0].state_dict().items():
        assert torch.equal(values, founded[name]), name


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_world_of_one_rank_is_an_island_of_one_process(kind: str) -> None:
    """A script that is started with one rank comes to the same bits."""
    run = settings(2, **LOSSY)
    (spread,), (alone,) = run_groups(
        Group(rank_rounds.train_world_of_one, (kind, run)),
        Group(rank_rounds.train_world_of_one, ("alone", run)),
    )
    assert spread == alone
