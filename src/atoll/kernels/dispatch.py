"""Which kernels this process uses, and the threads that run them over blocks.

`active` returns the module in use. numba compiles a kernel on its first call, or loads
it from its cache. That takes seconds. `warm` calls every kernel of a run once, with the
argument types of the run, so that the first update does not wait.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from types import ModuleType

import numpy as np

from atoll.errors import UsageError
from atoll.kernels.layouts import (
    F32,
    LANES,
    STATE_PIECE,
    U8,
    e3m0_bytes,
    int8_bytes,
    topk_bytes,
)

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


def warm(*, up: str, down: str, optimizer: str, is_async: bool = False) -> None:
    """Load or compile the kernels of a run with these settings before its first update.

    Takes seconds where numba's cache is empty. Safe to repeat, and from any thread.
    """
    warm_kernels(active(), up=up, down=down, optimizer=optimizer, is_async=is_async)


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
"""A full piece of a state, and a remainder."""

_OUTER = 0.5


def warm_kernels(
    active: ModuleType, *, up: str, down: str, optimizer: str, is_async: bool
) -> None:
    """Call each kernel once with a tiny vector, for a run's codecs and optimizer.

    The part of a codec's name before the first dash selects its kernel: bf16 has two
    ways of rounding.
    """
    _codec(active, _kernel_of(up))
    _sums(active)
    _codec(active, _kernel_of(down))
    for share in (1.0, _OUTER) if is_async else (1.0,):
        _step(active, optimizer, _kernel_of(down), share)


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


def _step(active: ModuleType, optimizer: str, down: str, share: float) -> None:
    """Take an outer step, with scalars of the type that a state gives.

    Nesterov's takes a body of numbers or decoded elements. A share of 1 is compiled
    separately.
    """
    scalar = np.float32(_OUTER)
    if optimizer == "sgd":
        active.sgd(_zeros(), _zeros(), scalar, share)
    elif optimizer == "adam":
        vectors = [_zeros() for _ in range(4)]
        active.adam(*vectors, *[scalar] * 6)
    elif optimizer == "heavy_ball":
        active.heavy_ball(_zeros(), _zeros(), _zeros(), scalar, scalar)
    else:
        body = np.zeros(ELEMENTS, _TYPES.get(down, np.float32))
        for mean in (_zeros(), body):
            active.nesterov(_zeros(), _zeros(), mean, scalar, scalar, share)


def _zeros() -> F32:
    return np.zeros(ELEMENTS, np.float32)


def _read_only(body: U8) -> U8:
    return np.frombuffer(body.tobytes(), np.uint8)


BLOCK = 65536
"""Elements of a block: three such blocks of fp32 fit a core's second cache."""

MAX_THREADS = 4
"""More threads gain nothing: the loops then wait for memory."""

Work = Callable[[int, int], None]


def usable_threads() -> int:
    """Return the number of threads that speed up the loops of this process.

    One per core, at most MAX_THREADS. A container may have fewer than its machine.
    """
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min(cores, MAX_THREADS)


def over_blocks(
    elements: int, work: Work, *, block: int = BLOCK, threads: int = 1
) -> None:
    """Call `work(first, last)` for every block of a vector, each exactly once.

    With several threads blocks overlap in time, so `work` may touch only its own range;
    then the result does not depend on `threads`.

    Raises:
        UsageError: `block` or `threads` is below 1.
        Exception: the exception of `work` in the lowest block that failed. Blocks
            above it may or may not have been processed.
    """
    if block < 1 or threads < 1:
        raise UsageError(
            f"block={block} and threads={threads} must both be at least 1."
        )
    spans = _Spans(elements, block)
    helpers = _start_helpers(spans, work, min(threads, len(spans)) - 1)
    spans.work_through(work)
    # A helper that has not started is not waited for: this thread has done its share.
    # So a call made from inside another one cannot wait for itself.
    for helper in helpers:
        if not helper.cancel():
            helper.result()
    spans.raise_lowest()


class _Spans:
    """Hands out blocks in ascending order, and records failures.

    Every block below one that failed has been handed out before it, and is finished:
    so the lowest failure does not depend on the threads.
    """

    def __init__(self, elements: int, block: int) -> None:
        self._elements = elements
        self._block = block
        self._starts = iter(range(0, elements, block))
        self._failures: list[tuple[int, BaseException]] = []

    def __len__(self) -> int:
        return -(-self._elements // self._block)

    def __iter__(self) -> Iterator[int]:
        while not self._failures:
            # One call into C: two threads never get the same start.
            first = next(self._starts, None)
            if first is None:
                return
            yield first

    def work_through(self, work: Work) -> None:
        for first in self:
            try:
                work(first, min(first + self._block, self._elements))
            except BaseException as exc:  # raised again by the caller's own thread
                self._failures.append((first, exc))

    def raise_lowest(self) -> None:
        if self._failures:
            raise min(self._failures, key=lambda failure: failure[0])[1]


def _start_helpers(spans: _Spans, work: Work, count: int) -> list[Future[None]]:
    if count < 1:
        return []
    return [_pool().submit(spans.work_through, work) for _ in range(count)]


@cache
def _pool() -> ThreadPoolExecutor:
    """Return the threads that all calls of the process share."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="atoll-blocks")


# Threads do not survive a fork; the child makes its own when it needs them.
os.register_at_fork(after_in_child=_pool.cache_clear)
