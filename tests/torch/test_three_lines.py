"""A plain loop, and the three lines that make it an island."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import atoll.torch
from atoll import RunEnded
from atoll.errors import UsageError
from tests.torch.runs import Weights, anchor_of, bits, run_of, sgd, together, train

pytestmark = pytest.mark.torch


def endless() -> Iterator[float]:
    while True:
        yield 1.0


def test_a_plain_loop_ends_by_itself_at_the_last_round() -> None:
    """`RunEnded` leaves the loop, and the `with` block swallows it."""
    model, run = Weights(8.0), run_of(every=2, run={"end_rounds": 3})
    optimizer = sgd(model)
    steps = 0
    with atoll.torch.join(model, optimizer, run) as island:
        for slope in endless():
            loss = model(slope)
            loss.backward()
            island.report(tokens=1, loss=loss)
            steps += 1
            optimizer.step()
            optimizer.zero_grad()

    # 3 rounds of 2 inner steps, each by 1: 8 - 6.
    assert (steps, island.inner_steps, island.round) == (6, 6, 3)
    assert model.w.tolist() == [2.0]
    assert island.ended


def test_without_the_three_lines_it_is_a_plain_loop() -> None:
    """An island alone whose outer step is the mean trains as if there were none."""
    with_island, without = Weights(8.0), Weights(8.0)
    optimizer, plain = sgd(with_island), sgd(without)
    run = run_of(every=2)
    with atoll.torch.join(with_island, optimizer, run):
        train(with_island, optimizer, steps=5)
    train(without, plain, steps=5)

    # Local 8 - 5; one island, lr 1: each sync puts back what is there.
    assert with_island.w.tolist() == without.w.tolist() == [3.0]


def test_the_flag_ends_the_loop_where_it_is_asked_for() -> None:
    """With on_end="flag" nothing is raised; later inner steps are not the run's."""
    model, run = Weights(8.0), run_of(every=2, run={"end_rounds": 1})
    optimizer = sgd(model)
    with atoll.torch.join(model, optimizer, run, on_end="flag") as island:
        train(model, optimizer, steps=1)
        assert not island.should_stop
        train(model, optimizer, steps=1)
        assert island.should_stop
        train(model, optimizer, steps=3)

    assert (island.inner_steps, island.round) == (2, 1)
    assert anchor_of(run) == [6.0]
    assert model.w.tolist() == [3.0]


def test_sync_now_after_the_end_says_so() -> None:
    """What cannot be done any more ends the loop too."""
    model, run = Weights(8.0), run_of(run={"end_rounds": 1})
    optimizer = sgd(model)
    island = atoll.torch.join(model, optimizer, run)
    with pytest.raises(RunEnded, match="last round, 1"):
        train(model, optimizer)
    with pytest.raises(RunEnded, match="last round, 1"):
        island.sync_now()
    island.leave()


def test_joining_a_run_that_is_over_ends_the_loop_at_once() -> None:
    """The first inner step ends it, and the weights before it are the run's."""
    run = run_of(run={"end_rounds": 1})
    first, late = Weights(8.0), Weights(0.0)
    with atoll.torch.join(first, optimizer := sgd(first), run, island="a"):
        train(first, optimizer)
    with atoll.torch.join(late, optimizer := sgd(late), run, island="b") as island:
        assert island.ended
        assert late.w.tolist() == [7.0]
        train(late, optimizer, steps=9)

    assert island.inner_steps == 0


def test_the_hook_is_gone_after_the_block() -> None:
    """Later steps of the same optimizer are nobody's inner steps."""
    model, run = Weights(8.0), run_of()
    optimizer = sgd(model)
    with atoll.torch.join(model, optimizer, run) as island:
        train(model, optimizer)
    train(model, optimizer, steps=3)

    assert (island.inner_steps, island.round) == (1, 1)
    assert model.w.tolist() == [4.0]


def test_leaving_is_safe_to_repeat() -> None:
    """`leave` inside the block, and again by the block's end, is one leaving."""
    model, run = Weights(8.0), run_of()
    with atoll.torch.join(model, sgd(model), run, island="a") as island:
        island.leave()
        island.leave()

    with atoll.torch.join(model, sgd(model), run, island="a"):
        pass


def test_an_error_in_a_loop_is_its_own_and_the_others_go_on() -> None:
    """It propagates; unsealed work is not sent, and nobody waits for the island."""
    run = run_of(2, every=2, run={"end_rounds": 2})
    has_failed = threading.Event()

    def fails() -> None:
        model = Weights(8.0)
        with atoll.torch.join(model, optimizer := sgd(model), run, island="b"):
            # One sealed round, then one step that nobody will see.
            train(model, optimizer, steps=3, slope=3.0)
            raise ZeroDivisionError("bad batch")

    def survives() -> None:
        model = Weights(8.0)
        with atoll.torch.join(model, optimizer := sgd(model), run, island="a"):
            train(model, optimizer, steps=2)
            assert has_failed.wait(timeout=30)
            train(model, optimizer, steps=9)

    def fails_alone() -> None:
        with pytest.raises(ZeroDivisionError, match="bad batch"):
            fails()
        has_failed.set()

    together(survives, fails_alone)

    # Round 1: pseudo-gradients 2 and 6, mean 4, so 8 - 4. Round 2: a alone, 4 - 2.
    assert anchor_of(run) == [2.0]


def test_the_optimizer_and_its_groups_are_as_before() -> None:
    """Joining changes nothing of the optimizer but one hook."""
    model, run = Weights(8.0), run_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    before = copy.deepcopy(optimizer.state_dict())
    with atoll.torch.join(model, optimizer, run):
        pass

    assert optimizer.state_dict() == before


def test_alone_means_bit_identical_to_a_plain_loop() -> None:
    """`run="none"` never touches the weights, whatever their bits."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([-0.0, 1e-40]))
    twin = copy.deepcopy(model)
    inputs = torch.randn(5, 3)

    def loop(linear: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(7):
            linear(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    with atoll.torch.join(model, optimizer, "none") as island:
        loop(model, optimizer)
    loop(twin, torch.optim.AdamW(twin.parameters(), weight_decay=0.0))

    assert island.inner_steps == 7
    for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert bits(mine) == bits(plain)


FORGETFUL = """
import atoll.torch
from tests.torch.runs import Weights, run_of, sgd, train

run, model = run_of(2, sync={"sync_every": 2, "overlap_steps": 1}), Weights(8.0)
island = atoll.torch.join(model, optimizer := sgd(model), run)
train(model, optimizer, steps=2)
while not island.metrics()["atoll/bytes_up"]:
    pass
raise SystemExit(7)
"""


def test_a_script_that_forgets_to_leave_ends_all_the_same() -> None:
    """No thread of an island keeps its process, though an outcome is awaited."""
    done = subprocess.run([sys.executable, "-c", FORGETFUL], timeout=100, check=False)

    assert done.returncode == 7


def test_counting_by_hand() -> None:
    """With count="manual" only `stepped()` counts, and with the hook it is refused."""
    model, run = Weights(8.0), run_of(every=2, run={"end_rounds": 1})
    optimizer = sgd(model)
    with atoll.torch.join(model, optimizer, run, count="manual") as island:
        train(model, optimizer, steps=3)
        assert island.inner_steps == 0
        island.stepped()
        island.stepped()

    # Two inner steps were counted after the three that moved the weights.
    assert anchor_of(run) == [5.0]

    with (
        atoll.torch.join(model, optimizer, run_of()) as island,
        pytest.raises(UsageError, match='count="manual"'),
    ):
        island.stepped()
