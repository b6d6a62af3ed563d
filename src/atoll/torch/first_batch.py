"""A digest of the first batch that an island's loop is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from atoll.torch.island import Island, life_of
from atoll.wire import blake3_digest


def see_first(island: Island) -> Callable[[object], None]:
    """Return what takes note of the first batch it is shown, and of no other."""
    tally = life_of(island).tally

    def see(batch: object) -> None:
        if tally.first_batch is None and not tally.inner_steps:
            tally.first_batch = f"batch-{digest_of(batch)}"

    return see


def digest_of(batch: object) -> str:
    """Return a digest of a batch's values, whatever holds them."""
    return blake3_digest(b"".join(_parts(batch))).hex()[:16]


def _parts(value: object) -> Iterator[bytes]:
    match value:
        case torch.Tensor():
            plain = value.detach().cpu().contiguous()
            yield f"{plain.dtype}{tuple(plain.shape)}".encode()
            yield plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        case np.ndarray():
            yield f"{value.dtype}{value.shape}".encode()
            yield value.tobytes()
        case Mapping():
            for key, each in value.items():
                yield repr(key).encode()
                yield from _parts(each)
        case list() | tuple():
            yield f"({len(value)}".encode()
            for each in value:
                yield from _parts(each)
        case str() | bytes() | int() | float() | None:
            yield repr(value).encode()
        case _:
            # An object of the loop's own says nothing that is the same elsewhere.
            yield type(value).__qualname__.encode()
