"""Rows of text for a model: those that are trained on, and those that judge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from atoll.demo.eras import Era
from atoll.demo.model import CONTEXT

HELD_OUT_ROWS = 128
"""So many rows, over all eras, tell losses apart that differ by a percent."""


def batches(text: bytes, *, rows: int, seed: int) -> Iterator[Tensor]:
    """Yield rows of one context and a byte more from anywhere in the text, endlessly.

    The same text, number of rows and seed give the same batches.
    """
    generator, values = torch.Generator().manual_seed(seed), _values(text)
    while True:
        yield _rows(values, rows, generator)


def held_out_rows(eras: Sequence[Era], *, rows: int = HELD_OUT_ROWS) -> Tensor:
    """Return the rows that everyone is judged by, as many from each era."""
    generator = torch.Generator().manual_seed(0)
    each = -(-rows // len(eras))
    return torch.cat([_rows(_values(era.held_out), each, generator) for era in eras])


def _values(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _rows(values: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    first = torch.randint(len(values) - CONTEXT, (rows, 1), generator=generator)
    return values[first + torch.arange(CONTEXT + 1)].long()
