"""Small objects with a state, without any framework."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import atoll.checkpoint


class Weights:
    """A model of one array and a count."""

    def __init__(self, value: float = 0.0, size: int = 8) -> None:
        self.array: NDArray[np.float32] = np.full(size, value, np.float32)
        self.count = 0

    def state_dict(self) -> dict[object, object]:
        return {"array": self.array, "count": self.count, 7: (None, "x")}

    def load_state_dict(self, state: object, /) -> None:
        assert isinstance(state, dict)
        assert state[7] == (None, "x")
        self.array = state["array"]
        self.count = state["count"]

    @property
    def value(self) -> float:
        """The value that all of the array has."""
        first = float(self.array[0])
        assert (self.array == first).all()
        return first


def save_value(root: Path, value: float, *, keep: int = 10) -> Path:
    """Save a checkpoint whose weights are `value`, and return its directory."""
    objects = {"model": Weights(value)}
    return atoll.checkpoint.save(root, objects, components=["model"], keep=keep)


def newest_value(root: Path) -> float | None:
    """Return the weights of the newest valid checkpoint; None if there is none."""
    model = Weights(-1.0)
    loaded = atoll.checkpoint.load(root, {"model": model})
    return None if loaded is None else model.value
