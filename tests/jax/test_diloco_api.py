"""The names that users rely on: changing one is changing a promise."""

from __future__ import annotations

import inspect

import pytest

import atoll.jax
from atoll.jax import DilocoState, diloco

pytestmark = pytest.mark.jax


def test_the_package_lists_its_names() -> None:
    """What a user can import is what `__all__` says, `diloco` among it."""
    assert atoll.jax.__all__ == sorted(atoll.jax.__all__)
    assert {"DilocoState", "collective_bytes", "diloco"} <= set(atoll.jax.__all__)
    assert all(hasattr(atoll.jax, name) for name in atoll.jax.__all__)


def test_diloco_takes_what_was_promised() -> None:
    """A train step, what selects its parameters and settings; the rest by name."""
    told = inspect.signature(diloco).parameters.values()

    assert [p.name for p in told if p.kind is p.POSITIONAL_OR_KEYWORD] == [
        *("train_step", "params_of", "settings")
    ]
    assert {p.name: p.default for p in told if p.kind is p.KEYWORD_ONLY} == {
        "num_islands": inspect.Parameter.empty,
        "mesh": None,
        "axis": "island",
        "stacks": None,
        "spread_outer": False,
    }


def test_a_state_is_made_of_what_a_run_holds() -> None:
    """What a checkpoint of it has: inner, outer and in-flight state."""
    assert list(inspect.signature(DilocoState).parameters) == [
        *("inner_steps", "islands", "anchor", "velocity"),
        *("residual", "flights", "drift"),
    ]
