"""Every kernel that a run's updates and rounds need, used once ahead of need.

Compiled kernels are loaded, or compiled on a machine's first run, when they are first
called: seconds, which the first update of a run would wait for. numba compiles for the
types that it meets, so each is called here as it is called then.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from atoll.kernels.layouts import (
    F32,
    HASH_BYTES,
    LANES,
    STATE_PIECE,
    U8,
    e3m0_bytes,
    int8_bytes,
    topk_bytes,
)

_SIZES = {
    "fp32": lambda elements: 4 * elements,
    "bf16": lambda elements: 2 * elements,
    "int8": int8_bytes,
    "e3m0": e3m0_bytes,
    "topk": topk_bytes,
}
_TYPES = {"fp32": np.float32, "bf16": np.uint16}
"""Of a body's elements, where they are not bytes."""

ELEMENTS = STATE_PIECE + 1
"""A piece, which is hashed as it steps, and a rest, which is hashed on its own."""

_OUTER = 0.5


def warm_kernels(active: ModuleType, *, up: str, down: str, optimizer: str) -> None:
    """Call each kernel once with a tiny vector, as the names of a run's settings say.

    Codecs go by the beginnings of their names: bf16 rounds stochastically or not.
    """
    _codec(active, _kernel_of(up))
    _sums(active)
    _codec(active, _kernel_of(down))
    if optimizer == "nesterov":
        _fused(active, _kernel_of(down))
    else:
        _step(active, optimizer)


def _kernel_of(codec: str) -> str:
    return codec.partition("-")[0]


def _codec(active: ModuleType, name: str) -> None:
    """Encode, decode from memory, and from a file that can only be read."""
    values, body = _zeros(), np.zeros(_SIZES[name](ELEMENTS), np.uint8)
    typed = body.view(_TYPES.get(name, np.uint8))
    encode, decode = (getattr(active, f"{name}_{way}") for way in ("encode", "decode"))
    encode(values, typed)
    decode(typed, values)
    decode(_read_only(body).view(typed.dtype), values)
    squares = getattr(active, f"{name}_squares", None)
    if squares is not None:
        for each in (body, _read_only(body)):
            squares(each, ELEMENTS, np.zeros(LANES))


def _sums(active: ModuleType) -> None:
    total, values = _zeros(), _zeros()
    active.sum_squares(values, np.zeros(LANES))
    active.accumulate(total, values)
    active.accumulate_divided(total, values, np.float32(2.0))
    active.scale(total, _OUTER)


def _fused(active: ModuleType, down: str) -> None:
    """Step and hash, by a body that is read as it is or by what it decodes to."""
    mean = np.zeros(ELEMENTS, _TYPES.get(down, np.float32))
    hashes = np.empty((-(-ELEMENTS // STATE_PIECE), 2 * HASH_BYTES), np.uint8)
    active.nesterov_hashed(_zeros(), _zeros(), mean, _OUTER, _OUTER, hashes)


def _step(active: ModuleType, optimizer: str) -> None:
    """Take an outer step, with scalars of the type that a state gives."""
    scalar = np.float32(_OUTER)
    if optimizer == "sgd":
        active.sgd(_zeros(), _zeros(), scalar)
    elif optimizer == "adam":
        vectors = [_zeros() for _ in range(4)]
        active.adam(*vectors, *[scalar] * 6)
    else:
        step = getattr(active, optimizer)
        step(_zeros(), _zeros(), _zeros(), scalar, scalar)


def _zeros() -> F32:
    return np.zeros(ELEMENTS, np.float32)


def _read_only(body: U8) -> U8:
    return np.frombuffer(body.tobytes(), np.uint8)
