"""The island's part of a checkpoint file that `lightning.Trainer` writes.

It is the callback's own state inside the file, which Lightning writes whole or not at
all. Arrays are tensors there, so that `weights_only=True` loads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.island.saved_state import SavedIsland, from_tree
from atoll.torch.trainer_hooks import Seat

SAVED_ON_DEMAND = "island.ckpt"
"""What an island was asked to save: the last word of a life that ends."""


def newest(directory: str | Path) -> str | None:
    """Return the checkpoint file that was written last; None if there is none.

    For `trainer.fit(model, ckpt_path=newest(directory))`.
    """
    files = [path for path in Path(directory).glob("**/*.ckpt") if path.is_file()]
    last = max(files, key=lambda path: path.stat().st_mtime_ns, default=None)
    return None if last is None else str(last)


def state_of(seat: Seat) -> dict[str, Any]:
    """Return the island as a checkpoint file holds it; the weights must be local."""
    with seat.part() as part:
        state = _as_tensors(part.tree)
    assert isinstance(state, dict)
    return state


def island_of(state: Mapping[str, Any]) -> SavedIsland | None:
    """Return the island that a checkpoint file holds; None if it holds none.

    Raises:
        CorruptError: it is not one that `state_of` made.
    """
    return from_tree(_as_arrays(state)) if state else None


def _as_tensors(value: Any) -> Any:
    """Return a tree with copies of its arrays, as tensors."""
    match value:
        case np.ndarray():
            return torch.from_numpy(value.copy())
        case dict():
            return {key: _as_tensors(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(_as_tensors(each) for each in value)
        case np.generic():
            return value.item()
        case _:
            return value


def _as_arrays(value: Any) -> Any:
    match value:
        case torch.Tensor():
            return value.detach().cpu().numpy()
        case Mapping():
            return {key: _as_arrays(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(_as_arrays(each) for each in value)
        case _:
            return value
