"""Islands of several ranks: what they come to, and that all ranks come to the same."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.security import Role, token_file
from tests.coordinator.serving import serving
from tests.torch.processes import Group, run_groups
from tests.torch.rank_loops import (
    come_late,
    look,
    settings,
    train,
    train_by_tokens,
    train_pipeline,
    train_tied,
    train_tied_whole,
    wait_long,
)

# The first of them loads torch for all.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

STREAMED: dict[str, dict[str, Any]] = {
    "wire": {"up": "int8", "down": "int8"},
    "sync": {"sync_every": 4, "num_fragments": 2, "overlap_steps": 2},
}
"""Two fragments, overlap, and a codec that leaves something over."""


def same(*groups: Group) -> list[dict[str, Any]]:
    """Return what each group came to, of which all ranks say the same."""
    results = run_groups(*groups)
    for ranks in results:
        assert len({(each["digest"], each["round"]) for each in ranks}) == 1
    return [ranks[0] for ranks in results]


@pytest.mark.parametrize("tables", [{}, STREAMED], ids=["plain", "streamed"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_two_ranks_come_to_the_bits_of_one_process(
    kind: str, tables: dict[str, Any]
) -> None:
    """Two ranks, and one process with the same micro-batches in rank order, end alike.

    With two ranks a reduction has one order only.
    """
    run = settings(3, **tables)
    spread, alone = same(
        Group(train, (kind, 2, 0, run, "a"), ranks=2),
        Group(train, ("alone", 2, 0, run, "a")),
    )
    assert spread["round"] == 3
    assert spread["digest"] == alone["digest"]
    assert spread["tokens"] == alone["tokens"]


def test_ranks_have_one_learning_rate() -> None:
    """They know the tokens of all of them from the first step on: 4 and 6 make 10."""
    (rates,) = run_groups(Group(train_by_tokens, (settings(3), "a"), ranks=2))

    assert rates[0] == rates[1]
    assert rates[0] == pytest.approx([step / 10 for step in range(9)])


def test_a_pipeline_comes_to_the_bits_of_one_process() -> None:
    """Two stages, and the model that is not cut, end alike on the same rows."""
    run = settings(3, **STREAMED)
    piped, alone = same(
        Group(train_pipeline, (0, run, "a"), ranks=2),
        Group(train, ("alone", 1, 0, run, "a")),
    )
    assert piped["digest"] == alone["digest"]
    assert piped["tokens"] == alone["tokens"]


def test_tensor_parallel_comes_to_the_values_of_one_process() -> None:
    """Two tensor-parallel ranks train on the same rows, which count once.

    They multiply narrower matrices, for which a processor may have another order.
    """
    run = settings(3, sync=STREAMED["sync"], wire={"up": "fp32", "down": "fp32"})
    spread, alone = same(
        Group(train, ("tp", 2, 0, run, "a", 8), ranks=2),
        Group(train, ("alone", 1, 0, run, "a", 8)),
    )
    assert spread["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    assert spread["tokens"] == alone["tokens"]


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "tp"])
def test_four_ranks_hold_one_state(kind: str) -> None:
    """Four ranks on a mesh come to a digest that the run, which applies the same, has.

    A rank whose part differed would be refused: its base would not be the run's.
    """
    run = settings(3, **STREAMED)
    (spread,) = same(Group(train, (kind, 4, 0, run, "a", 8), ranks=4))
    assert spread["round"] == 3


UNEQUAL: dict[str, dict[str, Any]] = {
    **STREAMED,
    "sync": {**STREAMED["sync"], "mode": "async", "dynamic_local_updates": True},
}
"""Rounds that take what has arrived, and windows that follow the pace."""


def every_kind(url: str, **environment: str) -> list[dict[str, Any]]:
    """Train DDP, FSDP2, a pipeline and one process in one run, to its end."""
    return same(
        Group(train, ("ddp", 2, 1, url, "a"), ranks=2, environment=environment),
        Group(train, ("fsdp", 2, 2, url, "b"), ranks=2, environment=environment),
        Group(train_pipeline, (3, url, "c"), ranks=2, environment=environment),
        Group(train, ("alone", 1, 4, url, "d"), environment=environment),
    )


@pytest.mark.parametrize("tables", [STREAMED, UNEQUAL], ids=["in step", "asynchronous"])
def test_islands_of_every_kind_are_in_one_run(
    tmp_path: Path, tables: dict[str, dict[str, Any]]
) -> None:
    """DDP, FSDP2, a pipeline and one process end on the same anchor and velocity."""
    run = settings(3, **tables, run={"start_islands": 4})
    with serving(tmp_path / "run", run) as coordinator:
        token = str(token_file(tmp_path / "run", Role.ISLAND))
        ended = every_kind(coordinator.url, ATOLL_TOKEN_FILE=token)
    rounds = {each["round"] for each in ended}
    assert len(rounds) == 1
    assert min(rounds) >= 3
    assert len({each["digest"] for each in ended}) == 1
    assert len({each["seed"] for each in ended}) == 4


def test_asynchronous_islands_of_every_kind_meet_in_a_bucket(tmp_path: Path) -> None:
    """They end on the same anchor and velocity, and every rank of each has them."""
    url = str(tmp_path / "bucket")
    atoll.init(url, settings(3, **UNEQUAL, run={"start_islands": 4}))
    ended = every_kind(url, XDG_CONFIG_HOME=str(tmp_path / "user"))

    assert len({each["digest"] for each in ended}) == 1
    assert min(each["round"] for each in ended) >= 3


def test_a_run_with_others_ends_on_the_bits_of_one_process(tmp_path: Path) -> None:
    """A run is the same, whether one of its islands is DDP, FSDP2 or one process.

    That one accumulates the same micro-batches in rank order.
    """
    groups: list[Group] = []
    with ExitStack() as stack:
        for kind in ("ddp", "fsdp", "alone"):
            folder, tables = tmp_path / kind, {**STREAMED, "run": {"start_islands": 2}}
            url = stack.enter_context(serving(folder, settings(3, **tables))).url
            token = {"ATOLL_TOKEN_FILE": str(token_file(folder, Role.ISLAND))}
            ranks = 1 if kind == "alone" else 2
            first = Group(train, (kind, 2, 0, url, "a"), ranks=ranks, environment=token)
            second = Group(train, ("alone", 1, 0, url, "b"), environment=token)
            groups += [first, second]
        ended = same(*groups)
    assert [each["round"] for each in ended] == [3] * 6
    assert len({each["digest"] for each in ended}) == 1


def test_a_tied_weight_has_one_owner_and_all_copies_its_values() -> None:
    """Both stages of a tied pipeline end with the weights of the model in one piece."""
    run = settings(3)
    piped, (alone,) = run_groups(
        Group(train_tied, (run,), ranks=2), Group(train_tied_whole, (run,))
    )
    assert [each["digest"] for each in piped] == [alone["digest"]] * 2
    assert [each["weights"] for each in piped] == [alone["weights"]] * 2


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_the_anchor_can_be_looked_at_by_all_ranks(kind: str) -> None:
    """Evaluation shows every rank the same anchor and restores its weights.

    The whole anchor is at the leader alone, and each rank has rows of its own.
    """
    (ranks,) = run_groups(Group(look, (kind, 2), ranks=2))
    for each in ranks:
        assert each["round"] == 1
        assert each["is_restored"]
        assert each["differs"]
        assert each["synced"] == 2
    assert ranks[0]["loss"] == ranks[1]["loss"]
    assert set(ranks[0]["anchor"]) >= {"layers.0.weight", "layers.1.bias", "seen"}
    assert ranks[1]["anchor"] == {}
    assert [each["rows"] for each in ranks] == [[0, 4, 8, 12, 16], [2, 6, 10, 14, 18]]
    assert [each["dealt"] for each in ranks] == [each["rows"] for each in ranks]


def test_a_long_wait_at_the_leader_trips_no_timeout(tmp_path: Path) -> None:
    """The leader waits for the run thrice as long as any collective may take."""
    timeout_s = 3.0
    tables = {"run": {"start_islands": 2}}
    with serving(tmp_path / "run", settings(2, **tables)) as coordinator:
        token = str(token_file(tmp_path / "run", Role.ISLAND))
        environment = {"ATOLL_TOKEN_FILE": token}
        url, told_at = coordinator.url, str(tmp_path / "joined")
        a = Group(
            wait_long,
            (2, url, told_at),
            ranks=2,
            timeout_s=timeout_s,
            environment=environment,
        )
        b = Group(come_late, (url, told_at, 3 * timeout_s), environment=environment)
        waited, _ = run_groups(a, b)
    assert [each["round"] for each in waited] == [2, 2]
    assert waited[0]["wait_s"] > 2 * timeout_s
