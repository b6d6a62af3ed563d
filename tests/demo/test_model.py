"""The demo's model is a GPT of the promised size that sees only the past."""

from __future__ import annotations

import math

import pytest
import torch

from atoll.demo.train import CONTEXT, GPT, evaluate, write
from tests.demo.small import tiny

pytestmark = pytest.mark.torch


def test_it_has_almost_a_million_parameters() -> None:
    """The demo promises 0.8 to 1 million."""
    assert 800_000 <= sum(each.numel() for each in GPT().parameters()) <= 1_000_000


def test_the_same_seed_gives_the_same_weights() -> None:
    """Whoever founds the run, it begins with the same model."""
    pairs = zip(tiny().parameters(), tiny().parameters(), strict=True)

    assert all(torch.equal(first, second) for first, second in pairs)


def test_a_prediction_does_not_see_what_follows() -> None:
    """Changing the last byte changes no score before it."""
    text = torch.arange(10)[None]
    changed = text.clone()
    changed[0, -1] = 200
    before, after = tiny()(text), tiny()(changed)

    assert torch.allclose(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])


def test_an_untrained_model_guesses_evenly() -> None:
    """Among 256 bytes that costs log(256) nats, and a little for being unsure of it."""
    rows = torch.randint(
        256, (8, CONTEXT + 1), generator=torch.Generator().manual_seed(0)
    )

    assert evaluate(tiny(), rows) == pytest.approx(math.log(256), abs=0.3)


def test_it_writes_on_from_an_opening() -> None:
    """The opening stays, so many bytes follow, and the seed decides which."""
    written = write(tiny(), "Fellow ", length=CONTEXT + 5, seed=3)

    assert written.startswith("Fellow ")
    assert written == write(tiny(), "Fellow ", length=CONTEXT + 5, seed=3)
    assert written != write(tiny(), "Fellow ", length=CONTEXT + 5, seed=4)
