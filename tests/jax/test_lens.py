"""What `params_of` selects is found, and can be written back."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from atoll.errors import ModelError, UsageError
from atoll.jax import plan as lens

pytestmark = pytest.mark.jax


def state() -> dict[str, Any]:
    """Return a train state whose parameters are neither first nor all."""
    zeros = jax.numpy.zeros
    return {
        "count": zeros((), int),
        "model": {"b": zeros(3), "table": zeros(2, int), "w": zeros((3, 3))},
    }


def test_a_selection_is_found_by_identity() -> None:
    """Leaves are known wherever the function puts them, under the names it gives."""
    found = lens.find(lambda s: [{"x": s["model"]["w"]}, s["model"]["b"]], state())

    assert found.names == ("0.x", "1")
    assert found.get(jax.tree.leaves(state()))[0].shape == (3, 3)
    assert found.put(["count", "b", "table", "w"], ["W", "B"]) == [
        *("count", "B", "table", "W")
    ]


@pytest.mark.parametrize(
    ("select", "message"),
    [
        (lambda s: {"w": s["model"]["w"] * 1.0}, "for 'w' that is no leaf"),
        (lambda s: [s["model"]["w"]] * 2, "selects '0' 2 times"),
        (lambda s: {}, "selects nothing"),
    ],
)
def test_what_cannot_be_written_back_is_refused(select: Any, message: str) -> None:
    """A function that computes, repeats or selects nothing is an error by name."""
    with pytest.raises(UsageError, match=message):
        lens.find(select, state())


def test_a_dtype_that_cannot_be_carried_is_refused() -> None:
    """An integer among the parameters is an error with its path."""
    with pytest.raises(ModelError, match=r"'table' has dtype int\d+, and only float32"):
        lens.find(lambda s: s["model"], state())
