"""Who comes in, with which weights, and who is turned away."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import atoll.torch
from atoll.errors import LeaseLost, ModelError, UsageError
from atoll.protocol import Heartbeat
from tests.torch.runs import Weights, anchor_of, run_of, sgd, together, train

pytestmark = pytest.mark.torch


def test_the_first_island_founds_the_run_with_its_weights() -> None:
    """They are the anchor of round 0, and the next island starts from them."""
    founder, second, run = Weights(3.0, -1.5), Weights(0.0, 0.0), run_of()
    with atoll.torch.join(founder, sgd(founder), run, island="a") as a:
        assert a.anchor()["w"].tolist() == [3.0, -1.5]
        assert (a.round, a.run_steps, a.slot) == (0, 0, 0)
        with atoll.torch.join(second, sgd(second), run, island="b") as b:
            assert second.w.tolist() == [3.0, -1.5]
            assert b.slot == 1
            assert b.digest == a.digest


def test_a_late_island_takes_state_and_phase() -> None:
    """It receives weights and velocity, and ends its window when the others do."""
    nesterov = {"optimizer": "nesterov", "lr": 0.5, "momentum": 0.5}
    run = run_of(every=4, outer=nesterov)
    early, late = Weights(16.0), Weights(0.0)
    first, second = sgd(early), sgd(late)
    with atoll.torch.join(early, first, run, island="a") as a:
        train(early, first, steps=7)
        # Round 1: D = 4, b = 4, change -(4 + 4/2)/2 = -3: anchor 13, then 3 steps.
        assert (anchor_of(run), early.w.tolist()) == ([13.0], [10.0])
        with atoll.torch.join(late, second, run, island="b") as b:
            assert late.w.tolist() == [13.0]
            assert (b.round, b.run_steps, b.inner_steps) == (1, 7, 0)
            assert b.digest == a.digest
            together(partial(train, early, first), partial(train, late, second))
            # One inner step of b's own, and it stands where a does: after round 2.
            assert b.inner_steps == 1
            assert (b.run_steps, b.round) == (a.run_steps, a.round) == (8, 2)
            assert b.digest == a.digest


def test_every_fragment_is_taken_at_its_own_round() -> None:
    """With fragments of different ages the run's round is the lowest."""
    run = run_of(every=4, sync={"num_fragments": 2, "fragment_order": "by_size"})

    def make(fill: float) -> torch.nn.Linear:
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, fill)
        torch.nn.init.constant_(model.bias, fill)
        return model

    model, late = make(8.0), make(0.0)
    optimizer = sgd(model)
    with atoll.torch.join(model, optimizer, run, island="a"):
        for _ in range(3):
            # loss = w + b: each inner step moves both by 1.
            model(torch.ones(1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with atoll.torch.join(late, sgd(late), run, island="b") as b:
            # Fragment 0 (the weight) was sent after step 2, fragment 1 not yet.
            assert b.round == 0
            assert (late.weight.item(), late.bias.item()) == (6.0, 8.0)


def test_an_island_that_left_comes_back_as_its_next_incarnation() -> None:
    """It takes the run's weights, keeps its slot and seed, and fences its past."""
    run = run_of(every=2)
    stays, goes = Weights(8.0), Weights(0.0)
    stay = sgd(stays)
    with atoll.torch.join(stays, stay, run, island="a"):
        with atoll.torch.join(goes, sgd(goes), run, island="b") as first_life:
            pass
        train(stays, stay, steps=2)
        with atoll.torch.join(goes, sgd(goes), run, island="b") as second_life:
            assert goes.w.tolist() == [6.0]
            assert second_life.slot == first_life.slot == 1
            assert second_life.seed == first_life.seed
            assert second_life.inner_steps == 0
            with pytest.raises(LeaseLost, match="Incarnation 1"):
                run.heartbeat(Heartbeat(island="b", incarnation=1, step=3))
            run.heartbeat(Heartbeat(island="b", incarnation=2, step=3))


def test_a_life_that_was_replaced_is_told_at_its_next_step() -> None:
    """An island whose membership has ended cannot train on unnoticed."""
    run, model = run_of(every=9), Weights(8.0)
    optimizer = sgd(model)
    island = atoll.torch.join(model, optimizer, run, island="a")
    run.leave("a", 1)

    with (
        pytest.raises(LeaseLost, match=r"'a' has left.*Join again"),
        island,
    ):
        train(model, optimizer)


def test_names_and_seeds_differ_between_islands() -> None:
    """Islands without a name get one; seeds differ, and are the same every time."""
    run, models = run_of(), [Weights(1.0), Weights(1.0)]
    with (
        atoll.torch.join(models[0], sgd(models[0]), run) as a,
        atoll.torch.join(models[1], sgd(models[1]), run) as b,
    ):
        assert (a.name, b.name) == ("island-0", "island-1")
        assert a.seed != b.seed
        torch.Generator().manual_seed(a.seed)
    again = Weights(1.0)
    with atoll.torch.join(again, sgd(again), run_of()) as c:
        assert c.seed == a.seed


def test_another_model_is_refused_with_both_sides_named() -> None:
    """Shape, dtype and name each have their sentence, and nothing has changed."""
    run, founder = run_of(), Weights(1.0, 2.0)
    with atoll.torch.join(founder, sgd(founder), run, island="a"):
        for other, sentence in (
            (Weights(1.0), "'w' is a .*shape 2 .*in the run, and a .*shape 1 .*island"),
            (
                Weights(1.0, 2.0, dtype=torch.bfloat16),
                "dtype float32 in the run, and .* dtype bfloat16 in this island",
            ),
            (torch.nn.Linear(2, 1), "'w' is a .* in the run, and absent from this"),
        ):
            before = [p.clone() for p in other.parameters()]
            with pytest.raises(ModelError, match=sentence):
                atoll.torch.join(other, sgd(other), run, island="b")
            assert all(map(torch.equal, other.parameters(), before))
        rightful = Weights(0.0, 0.0)
        with atoll.torch.join(rightful, sgd(rightful), run, island="b") as b:
            assert b.slot == 1


def test_what_is_frozen_on_one_side_only_is_refused() -> None:
    """A parameter is carried by all islands or by none."""
    run, founder, frozen = run_of(), torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    frozen.weight.requires_grad_(False)
    with (
        atoll.torch.join(founder, sgd(founder), run),
        pytest.raises(ModelError, match=r"'weight' is a parameter.*and a constant"),
    ):
        atoll.torch.join(frozen, sgd(frozen), run)


def test_a_taken_name_is_refused() -> None:
    """A live island's name belongs to it."""
    run, models = run_of(), [Weights(1.0), Weights(1.0)]
    with (
        atoll.torch.join(models[0], sgd(models[0]), run, island="a"),
        pytest.raises(UsageError, match="'a' is live in this run"),
    ):
        atoll.torch.join(models[1], sgd(models[1]), run, island="a")


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 129, "new\nline"])
def test_a_name_that_no_frame_could_carry_is_refused(name: str) -> None:
    """At joining, by founder and follower alike, not at the first round."""
    run, founder, other = run_of(), Weights(1.0), Weights(1.0)
    for model in (founder, other):
        with pytest.raises(UsageError, match=r"island.*another name"):
            atoll.torch.join(model, sgd(model), run, island=name)
        atoll.torch.join(founder, sgd(founder), run).leave()


def test_the_run_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without `run`, ATOLL_RUN is read; "none" trains alone, and unset is an error."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    model = Weights(1.0)
    monkeypatch.setenv("ATOLL_RUN", "none")
    with atoll.torch.join(model, optimizer := sgd(model)) as island:
        train(model, optimizer, steps=3)
    assert (island.inner_steps, island.round) == (3, 0)

    monkeypatch.setenv("ATOLL_RUN", "https://example.org:8443")
    with pytest.raises(UsageError, match=r"No token is known for .*example\.org"):
        atoll.torch.join(model, sgd(model))

    monkeypatch.delenv("ATOLL_RUN")
    with pytest.raises(UsageError, match=r'ATOLL_RUN is not set.*"none" trains alone'):
        atoll.torch.join(model, sgd(model))


@pytest.mark.parametrize(
    ("run", "remedy"), [("lagoon", "atoll init lagoon RUN.toml"), ("", "'none'")]
)
def test_where_no_run_is_the_way_out_is_named(
    run: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path without a run is refused with the command to type, and not made."""
    monkeypatch.chdir(tmp_path)
    model = Weights(1.0)
    with pytest.raises(UsageError) as caught:
        atoll.torch.join(model, sgd(model), run)

    assert remedy in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_values_is_refused() -> None:
    """On the meta device there is nothing to found a run with, frozen or not."""
    with torch.device("meta"):
        model, frozen = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    frozen.weight.requires_grad_(False)
    for each in (model, frozen):
        with pytest.raises(UsageError, match="'weight' is on the meta device"):
            atoll.torch.join(each, sgd(each), run_of())


def test_a_model_that_trains_nothing_is_refused() -> None:
    """No parameter requires a gradient: the remedy is in the message."""
    model = Weights(1.0)
    optimizer = sgd(model)
    model.requires_grad_(False)
    with pytest.raises(UsageError, match=r"nothing to train.*requires_grad_\(\)"):
        atoll.torch.join(model, optimizer, run_of())


def test_a_dtype_that_cannot_be_carried_is_refused_by_name() -> None:
    """fp64 would lose half its bits on the way."""
    model = Weights(1.0, dtype=torch.float64)
    with pytest.raises(ModelError, match=r"'w' has dtype float64.*Cast it, or freeze"):
        atoll.torch.join(model, sgd(model), run_of())


def test_more_fragments_than_the_model_has_is_refused() -> None:
    """The way out is named, and the run is still empty."""
    run = run_of(sync={"num_fragments": 2})
    model = Weights(1.0)
    with pytest.raises(UsageError, match="by_size"):
        atoll.torch.join(model, sgd(model), run)


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ({"on_end": "stop"}, "on_end='stop' is not one of raise, flag"),
        ({"count": "auto"}, "count='auto' is not one of hook, manual"),
        ({"checkpoint": 7}, "checkpoint=7 is neither a directory nor an"),
    ],
)
def test_impossible_arguments_are_refused(
    keyword: dict[str, object], message: str
) -> None:
    """Each by its name and value, before anything has been joined."""
    run, model = run_of(), Weights(1.0)
    with pytest.raises(UsageError, match=message):
        atoll.torch.join(model, sgd(model), run, **keyword)  # type: ignore[arg-type]
    with atoll.torch.join(model, sgd(model), run) as island:
        assert island.slot == 0


@pytest.mark.parametrize("optimizer", [[], "sgd", [None], 0.1])
def test_what_is_no_optimizer_is_refused_before_joining(optimizer: object) -> None:
    """The run does not learn of an island that could not count its steps."""
    run, model = run_of(), Weights(1.0)
    with pytest.raises(UsageError, match="optimizer"):
        atoll.torch.join(model, optimizer, run)  # type: ignore[arg-type]
    with atoll.torch.join(model, sgd(model), run) as island:
        assert island.slot == 0


PLAIN_JOIN = """
import sys
import torch
import atoll.torch
from atoll.exchange import MemoryRun

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)
assert "torch.distributed.tensor" in sys.modules, "an optimizer no longer loads DTensor"
with atoll.torch.join(model, optimizer, MemoryRun()):
    model(torch.ones(1)).sum().backward()
    optimizer.step()
print(*(name for name in sys.modules if name.startswith("atoll.")))
"""


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_plain_join_loads_nothing_of_sharded_ranks(optimizer: str) -> None:
    """The parameters decide, although every optimizer loads DTensor."""
    code = PLAIN_JOIN.format(optimizer=optimizer)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = done.stdout.split()

    assert "atoll.torch.join" in loaded
    assert [name for name in loaded if name.startswith("atoll.torch.ranks")] == []
