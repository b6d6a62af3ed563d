"""The same seeds give the same bits, whatever the threads do."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch.optim import Optimizer

from atoll import RunSettings
from examples import minimal
from tests.training.speeches import Trained, streaming, train

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _one_thread_per_island() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _restless_interpreter() -> Iterator[None]:
    """Let Python change threads a thousand times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 1000)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def settings() -> RunSettings:
    """Return 3 islands, 4 fragments, overlap 2, 4 bits up and 8 bits down."""
    settings = streaming(islands=3, rounds=3)
    assert (settings.sync.num_fragments, settings.sync.overlap_steps) == (4, 2)
    assert (settings.wire.up, settings.wire.down) == ("e3m0", "int8")
    return settings


def dawdle(number: int, model: minimal.TinyGPT, optimizer: Optimizer) -> None:
    """Make each island but the first do useless work before it computes a loss."""

    def work(*arguments: object) -> None:
        for _ in range(number * 4):
            torch.ones(200, 200) @ torch.ones(200, 200)

    model.register_forward_pre_hook(work)


def digests(trained: Trained) -> set[str]:
    """Return the digests of anchor and velocity that the islands hold."""
    return {island.digest for island in trained.islands}


def test_all_islands_hold_the_same_bits_and_so_does_the_next_run(
    settings: RunSettings,
) -> None:
    """Two runs with the same seed end in one digest; another seed is another one."""
    first, again = train(settings, seed=1), train(settings, seed=1)
    other = train(settings, seed=2)

    assert len(digests(first)) == 1
    assert digests(first) == digests(again)
    assert first.loss == again.loss
    assert digests(other) != digests(first)


@pytest.mark.usefixtures("_restless_interpreter")
def test_neither_speed_nor_order_of_islands_matters(settings: RunSettings) -> None:
    """Islands that join in another order and at other speeds end in the same bits."""
    even = train(settings)
    uneven = train(settings, prepare=dawdle, last_first=True)

    assert digests(even) == digests(uneven)
    assert even.loss == uneven.loss
