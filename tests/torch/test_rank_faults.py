"""Every refusal and every failure is met by all ranks of an island alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.security import Role, token_file
from tests.coordinator.serving import serving
from tests.torch import rank_faults
from tests.torch.processes import Group, run_groups
from tests.torch.rank_loops import settings, train

# The first of them loads torch for all.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def said_alike(group: Group) -> list[str]:
    """Return the error that all ranks of a group say, soon."""
    (said,) = run_groups(group)
    assert said == [said[0]] * group.ranks
    assert said[0][2] == "soon"
    return said[0][:2]  # type: ignore[no-any-return] # strings, as they were sent


@pytest.mark.parametrize(
    ("fault", "kind", "match"),
    [
        (rank_faults.flat_parameters, "UsageError", r"FSDP1.*fully_shard"),
        (rank_faults.threads, "UsageError", r"DataParallel.*one process per device"),
        (rank_faults.on_meta, "UsageError", r"'layers.0.weight' is on the meta device"),
        (rank_faults.a_part_alone, "UsageError", r"Net holds DTensors.*fully_shard"),
        (
            rank_faults.one_rank_differs,
            "ModelError",
            r"'layers.1.weight' is a .* rank 1",
        ),
        (
            rank_faults.a_stage_twice,
            "ModelError",
            r"'layers.0.weight' is in stage 0 and",
        ),
        (rank_faults.a_stage_missing, "ModelError", r"No rank holds stage 1 of 2"),
        (rank_faults.a_tie_to_nothing, "ModelError", r"another one owns 'nowhere'"),
        (rank_faults.no_such_name, "UsageError", r"Stage 1 declares 'layer.weight'"),
        (
            rank_faults.other_numbers_of_stages,
            "UsageError",
            r"pipelines of \[2, 3\] stages",
        ),
        (rank_faults.dtensors_in_ddp, "UsageError", r"DistributedData.*DTensors.*HSDP"),
        (rank_faults.unshared, "ModelError", r"'layers.0.weight'.*P\(sum\).*Known are"),
        (rank_faults.replicated, "ModelError", r"'layers.0.weight'.*no dimension sha"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_cannot_be_joined_is_refused_on_all_ranks(
    fault: Callable[..., Any], kind: str, match: str
) -> None:
    """Every rank raises the same error, which names what is wrong."""
    error, words = said_alike(Group(fault, ranks=2))
    assert error == kind
    assert re.search(match, words), words


def test_a_mesh_of_three_dimensions_is_refused_by_its_name() -> None:
    """The error names the tensor, the mesh and what is known instead."""
    group = Group(rank_faults.refused_by_the_run, ("cube", settings(1)), ranks=2)
    error, words = said_alike(group)
    assert error == "ModelError"
    assert "(replicate=1, dp=2, tp=1)" in words
    assert "'layers.0.weight'" in words


def test_settings_that_the_run_refuses_are_refused_on_all_ranks() -> None:
    """What the leader learns when it joins is raised by the others as well."""
    run = settings(1, sync={"sync_every": 4, "num_fragments": 5})
    group = Group(rank_faults.refused_by_the_run, ("fsdp", run), ranks=2)
    error, words = said_alike(group)
    assert error == "UsageError"
    assert "5 fragments" in words


def test_a_run_that_nobody_serves_is_unreachable_on_all_ranks() -> None:
    """The leader gives up, and the others with it."""
    url = "http://127.0.0.1:9"
    error, words = said_alike(
        Group(rank_faults.refused_by_the_run, ("ddp", url), ranks=2)
    )
    assert error in ("Unreachable", "UsageError")
    assert "127.0.0.1:9" in words


def test_another_model_than_the_runs_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """The run says which tensor differs, and every rank says so."""
    with serving(tmp_path / "run", settings(1)) as coordinator:
        token = str(token_file(tmp_path / "run", Role.ISLAND))
        environment = {"ATOLL_TOKEN_FILE": token}
        url = coordinator.url
        run_groups(Group(train, ("alone", 1, 0, url, "a"), environment=environment))
        group = Group(
            rank_faults.another_model, (url,), ranks=2, environment=environment
        )
        error, words = said_alike(group)
    assert error == "ModelError"
    assert "'layers.0.weight'" in words


def test_ranks_that_call_different_things_are_told_so() -> None:
    """Nobody waits for a call that does not come: the error names both."""
    error, words = said_alike(Group(rank_faults.other_calls, ranks=2))
    assert error == "UsageError"
    assert "came to sync_now() after 0 inner steps" in words
    assert "to anchor() after 0" in words


def test_a_checkpoint_that_one_rank_lacks_is_refused_on_all(tmp_path: Path) -> None:
    """Who saves with others would wait for who does not."""
    group = Group(rank_faults.checkpoint_of_one_rank, (str(tmp_path),), ranks=2)
    error, words = said_alike(group)
    assert error == "UsageError"
    assert "Ranks [1] of this island have no checkpoint=" in words


def test_a_policy_that_one_rank_cannot_make_is_refused_on_all(tmp_path: Path) -> None:
    """Its own error is the one that is told."""
    (said,) = run_groups(Group(rank_faults.misspelt, (str(tmp_path),), ranks=2))
    for error, words, _ in said:
        assert error == "UsageError"
        assert "modle" in words


@pytest.mark.parametrize(
    ("kind", "is_same_run", "match"),
    [("fsdp", False, "The checkpoint is of run"), ("ddp", True, "sharded differently")],
)
def test_a_checkpoint_of_another_is_refused_on_all_ranks(
    kind: str, is_same_run: bool, match: str, tmp_path: Path
) -> None:
    """One of another run, and one of a model that lay otherwise on its ranks."""
    runs = [str(tmp_path / name) for name in ("one", "other")]
    for run in runs:
        atoll.init(run, settings(1))
    saved = str(tmp_path / "saved")
    run_groups(
        Group(rank_faults.saved, ("fsdp", runs[0], saved), ranks=2),
        Group(train, ("alone", 1, 0, runs[1], "b")),
    )
    where = runs[0] if is_same_run else runs[1]
    error, words = said_alike(
        Group(rank_faults.restored, (kind, where, saved), ranks=2)
    )
    assert error == "UsageError"
    assert match in words


def test_sigterm_at_one_rank_ends_all_of_them_at_one_step() -> None:
    """All ranks leave after the same inner step, and none of them fails."""
    run = settings(1, sync={"sync_every": 2**20})
    (ended,) = run_groups(Group(rank_faults.terminated, (run,), ranks=2))
    assert [each["error"] for each in ended] == ["", ""]
    assert ended[0]["inner_steps"] == ended[1]["inner_steps"] >= 5


def test_sigterm_ends_an_island_that_waits(tmp_path: Path) -> None:
    """Ranks that stand still for an outcome leave together, and none of them fails."""
    with serving(
        tmp_path / "run", settings(1, run={"start_islands": 2})
    ) as coordinator:
        token = str(token_file(tmp_path / "run", Role.ISLAND))
        environment = {"ATOLL_TOKEN_FILE": token}
        url = coordinator.url
        group = Group(
            rank_faults.terminated_waiting, (url,), ranks=2, environment=environment
        )
        (ended,) = run_groups(group)
    assert [each["error"] for each in ended] == ["", ""]
    assert [each["inner_steps"] for each in ended] == [3, 3]


@pytest.mark.parametrize("who", [0, 1])
def test_a_program_that_fails_at_one_rank_ends_the_island(who: int) -> None:
    """The rank that failed has its own error; the other learns that it has left."""
    run = settings(1, sync={"sync_every": 2**20})
    group = Group(rank_faults.failing, (run, who), ranks=2, timeout_s=10)
    (ended,) = run_groups(group)
    assert ended[who]["error"] == "ValueError"
    assert ended[1 - who]["error"]


def test_a_rank_that_is_killed_is_named() -> None:
    """Whoever is left learns it within seconds, though nothing is due for long."""
    run = settings(1, sync={"sync_every": 2**20})
    ((left, _),) = run_groups(Group(rank_faults.killed, (run,), ranks=2))
    assert left["error"] == "RemoteError"
    assert "Rank 1 of this island" in left["said"]
