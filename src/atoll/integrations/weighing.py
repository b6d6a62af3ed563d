"""How many tokens a batch holds, without asking a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

FIRST = ("input_ids", "inputs_embeds", "pixel_values", "input_features")
"""What the words of a batch are called, if they have names."""


def tokens_of(batch: Any) -> int:
    """Return the tokens of a batch: all elements of its first tensor of integers.

    Padding counts. A tensor of other numbers has one token per row, and one of
    embeddings one per vector.
    """
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.is_floating_point() else batch.numel()
    if isinstance(batch, Mapping):
        return _of_mapping(batch)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return next((n for n in map(tokens_of, batch) if n), 0)
    return 0


def _of_mapping(batch: Mapping[Any, Any]) -> int:
    for name in FIRST:
        value = batch.get(name)
        if isinstance(value, torch.Tensor):
            is_embedded = name == "inputs_embeds"
            return value.shape[:-1].numel() if is_embedded else tokens_of(value)
    return next((n for n in map(tokens_of, batch.values()) if n), 0)
