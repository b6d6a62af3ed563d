"""Owns the loops over flat buffers: codecs, sums and outer steps, block by block.

Does not know the meaning or the owner of a buffer.
Start reading at `with_numpy`, the reference; `with_numba` has the same functions,
compiled, with the same bytes. `active` returns the module in use.

numba compiles a kernel on its first call, or loads it from its cache. That takes
seconds. `warm` calls every kernel of a run once, with the argument types of the run,
so that the first update does not wait.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import numpy as np

from atoll.errors import UsageError
from atoll.kernels.blocks import Work, over_blocks, usable_threads
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

__all__ = ["Work", "active", "over_blocks", "usable_threads", "use", "warm"]

_KINDS = ("numba", "numpy")
_selected: list[ModuleType] = []


def active() -> ModuleType:
    """Return the module of kernels in use: compiled ones if numba can be imported."""
    if not _selected:
        try:
            use("numba")
        except UsageError:
            use("numpy")
    return _selected[0]


def use(kind: str) -> None:
    """Select the kernels of this process: "numpy" or "numba".

    Raises:
        UsageError: the kind is unknown, or numba cannot be imported.
    """
    if kind not in _KINDS:
        raise UsageError(f"kernels of kind {kind!r} do not exist. Use one of {_KINDS}.")
    try:
        module = importlib.import_module(f"atoll.kernels.with_{kind}")
    except ImportError as exc:
        raise UsageError(
            f"kernels of kind {kind!r} cannot be loaded: {exc}. "
            'Install them with: pip install "atoll[fast]"'
        ) from exc
    _selected[:] = [module]


def warm(*, up: str, down: str, optimizer: str) -> None:
    """Load or compile the kernels of a run with these settings before its first update.

    Takes seconds where numba's cache is empty. Safe to repeat, and from any thread.
    """
    warm_kernels(active(), up=up, down=down, optimizer=optimizer)


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
"""A full piece, hashed during the step, and a remainder, hashed after it."""

_OUTER = 0.5


def warm_kernels(active: ModuleType, *, up: str, down: str, optimizer: str) -> None:
    """Call each kernel once with a tiny vector, for a run's codecs and optimizer.

    The part of a codec's name before the first dash selects its kernel: bf16 has two
    ways of rounding.
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
    encode, decode = (
        getattr(active, f"{name}_{direction}") for direction in ("encode", "decode")
    )
    encode(values, typed)
    decode(typed, values)
    decode(_read_only(body).view(typed.dtype), values)
    squares = getattr(active, f"{name}_squares", None)
    if squares is not None:
        for readable in (body, _read_only(body)):
            squares(readable, ELEMENTS, np.zeros(LANES))


def _sums(active: ModuleType) -> None:
    total, values = _zeros(), _zeros()
    active.sum_squares(values, np.zeros(LANES))
    active.accumulate(total, values)
    active.accumulate_divided(total, values, np.float32(2.0))
    active.scale(total, _OUTER)


def _fused(active: ModuleType, down: str) -> None:
    """Step and hash, reading the body directly or after decoding it."""
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
