"""Islands of torchft that come late, go, come back, or find nobody who knows."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from atoll.errors import UsageError
from atoll.exchange import MemoryRun
from atoll.integrations.torchft import Manager, run_settings
from tests.integrations.trainings import Training, Wrap, diloco, local_sgd
from tests.torch.runs import bits, together

pytestmark = pytest.mark.torch


def run_of(fragments: int = 1, *, islands: int = 1) -> MemoryRun:
    """Return an empty run that so many islands begin."""
    settings = run_settings(fragments)
    return MemoryRun(settings.with_values({"run.start_islands": islands}))


def train_until(
    training: Training,
    manager: Manager,
    wrap: Wrap,
    *,
    together: int,
    began: threading.Event | None = None,
) -> None:
    """Train until so many steps have counted two islands; both see the same ones."""
    seen = step = manager.current_step()
    with wrap(training, manager):
        while together:
            training.step()
            if manager.current_step() == step:
                continue
            step = manager.current_step()
            together -= manager.num_participants() == 2
            if began is not None and step == seen + 2:
                began.set()


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_late_island_takes_the_state_of_another(fragments: int, delay: int) -> None:
    """It begins with weights and optimizers of the donor, and stays equal to the bit.

    Its own weights were others, and what it trained before it had the state is nowhere.
    """
    run, began = run_of(fragments), threading.Event()
    first, late = Training(0, fragments=fragments), Training(1, fragments=fragments)
    late.model.load_state_dict(Training(9, seed=9).model.state_dict())
    wrap = diloco(4, fragment_sync_delay=delay)

    def found() -> None:
        with first.manager(run) as manager:
            train_until(first, manager, wrap, together=4, began=began)

    def follow() -> None:
        assert began.wait(60)
        with late.manager(run) as manager:
            train_until(late, manager, wrap, together=4)
            assert manager.current_step() > 4

    together(found, follow)

    assert bits(first.agreed()) == bits(late.agreed())
    for mine, its in zip(first.outer, late.outer, strict=True):
        for parameter, other in zip(
            mine.param_groups[0]["params"], its.param_groups[0]["params"], strict=True
        ):
            momentum = mine.state[parameter]["momentum_buffer"]
            assert bits(momentum) == bits(its.state[other]["momentum_buffer"])


def test_a_taken_state_is_not_counted_as_work() -> None:
    """The round in which an island takes the state counts its donor alone."""
    run, began = run_of(), threading.Event()
    first, late = Training(0), Training(1)
    rosters: list[int] = []

    def found() -> None:
        with first.manager(run) as manager:
            train_until(first, manager, diloco(2), together=1, began=began)

    def follow() -> None:
        assert began.wait(60)
        with late.manager(run) as manager, diloco(2)(late, manager):
            while not rosters or rosters[-1] != 2:
                late.step()
                late.step()
                rosters.append(manager.num_participants())

    together(found, follow)

    assert rosters == [1, 2]


def test_an_island_that_left_comes_back() -> None:
    """Another life of the same name, with empty memory, is given the state again."""
    run, gone = run_of(islands=2), threading.Event()
    stays, goes, again = Training(0), Training(1), Training(1, seed=5)

    def stay() -> None:
        with stays.manager(run, init_sync=False) as manager:
            train_until(stays, manager, diloco(3), together=6)

    def come_and_go() -> None:
        with goes.manager(run, init_sync=False) as manager:
            train_until(goes, manager, diloco(3), together=2)
        gone.set()
        with again.manager(run) as manager:
            train_until(again, manager, diloco(3), together=4)

    together(stay, come_and_go)

    assert bits(stays.weights()) == bits(again.weights())


def test_local_sgd_recovers_too() -> None:
    """What its user registers is enough: LocalSGD itself registers nothing."""
    run, began = run_of(), threading.Event()
    first, late = Training(0), Training(1)

    def found() -> None:
        with first.manager(run) as manager:
            train_until(first, manager, local_sgd(2), together=2, began=began)

    def follow() -> None:
        assert began.wait(60)
        with late.manager(run) as manager:
            train_until(late, manager, local_sgd(2), together=2)

    together(found, follow)

    assert bits(first.weights()) == bits(late.weights())


def test_the_first_weights_are_the_founders() -> None:
    """With init_sync, islands that begin with different weights begin with the same."""
    run = run_of(islands=2)
    trainings = [Training(0), Training(1, seed=7)]

    def live(training: Training) -> torch.Tensor:
        with training.manager(run) as manager:
            train_until(training, manager, diloco(2), together=2)
        return training.weights()

    first, second = together(*(partial(live, each) for each in trainings))

    assert bits(first) == bits(second)


def test_a_state_that_nobody_holds_is_not_made_up() -> None:
    """An island that comes alone to a run that has gone on is told what to do."""
    run, training, later = run_of(), Training(0), Training(1)
    with training.manager(run) as manager, diloco(1)(training, manager):
        training.step()

    with (
        later.manager(run) as manager,
        diloco(1)(later, manager),
        pytest.raises(UsageError, match="no island that is left holds its state"),
    ):
        later.step()


def test_a_checkpoint_stands_for_a_state_that_nobody_holds() -> None:
    """Islands that all restart from a checkpoint go on from it, at its step."""
    run, training = run_of(), Training(0)
    with training.manager(run) as manager, diloco(1)(training, manager):
        training.step()
        training.step()
        saved = manager.state_dict()

    with training.manager(run) as manager, diloco(1)(training, manager):
        manager.load_state_dict(saved)
        training.step()

        assert manager.current_step() == 3


def test_a_checkpoint_comes_before_the_first_step() -> None:
    """Who holds the run's state cannot be given another by the way."""
    run, training = run_of(), Training(0)
    with training.manager(run) as manager, diloco(1)(training, manager):
        training.step()

        with pytest.raises(UsageError, match="before the first step"):
            manager.load_state_dict(manager.state_dict())
