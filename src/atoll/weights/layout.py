"""A fragment's layout in one flat fp32 vector, with codecs, outer values and buffers.

Parameters use the run's settings; buffers of the model are plainly averaged.

Buffer pools lend scratch vectors and the memory of bodies. A body comes with every
round and is as large as the last one. The first touch of fresh memory costs more than
the work on it afterwards, so a pool lends the same memory again instead of freeing it.

Rule 1: no two threads share a buffer.
Rule 2: the content of a lent buffer is undefined.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from atoll import kernels
from atoll.algorithm.fragments import split
from atoll.errors import ModelError
from atoll.protocol.model import ModelSpec, TensorSpec
from atoll.settings import OuterSection, RunSettings, WireSection
from atoll.wire import Codec, OuterValues, codec

F32 = NDArray[np.float32]

BLOCK = 65536
"""Elements per block: three blocks of fp32 fit a core's second cache."""

CARRIED_DTYPES = ("float32", "bfloat16", "float16")


def blocks(elements: int) -> Iterator[slice]:
    """Yield the blocks of a vector, first to last."""
    for first in range(0, elements, BLOCK):
        yield slice(first, min(first + BLOCK, elements))


def first_non_finite(values: F32) -> int | None:
    """Return where the first NaN or infinity is, or None."""
    for block in blocks(len(values)):
        is_finite = np.isfinite(values[block])
        if not is_finite.all():
            return int(block.start + is_finite.argmin())
    return None


@dataclass(frozen=True)
class FragmentLayout:
    """The tensors of one fragment, end to end."""

    tensors: tuple[TensorSpec, ...]
    is_buffers: bool = False
    """Averaged unchanged: fp32 both ways, outer SGD with lr 1."""

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(tensor.shape) for tensor in self.tensors)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        starts = [0]
        for size in self.sizes:
            starts.append(starts[-1] + size)
        return tuple(starts)

    @cached_property
    def elements(self) -> int:
        return self.offsets[-1]

    def name_at(self, index: int) -> str:
        """Return the name of the tensor that holds element `index`."""
        return self.tensors[bisect_right(self.offsets, index) - 1].name

    @cached_property
    def is_cast(self) -> bool:
        """Whether an anchor that is loaded may differ from itself."""
        return any([tensor.dtype != "float32" for tensor in self.tensors])

    def load(self, anchor: F32, out: F32, *, first: int = 0) -> None:
        """Write what `anchor` becomes once loaded: cast to each dtype, as fp32.

        `anchor` and `out` start at element `first` of the fragment.
        """
        if len(self._runs) == 1:
            _cast(self._runs[0][0], anchor, out)
            return
        last = first + len(anchor)
        for dtype, start, stop in self._runs:
            part = slice(max(start, first) - first, min(stop, last) - first)
            if part.start < part.stop:
                _cast(dtype, anchor[part], out[part])

    @cached_property
    def _runs(self) -> tuple[tuple[str, int, int], ...]:
        """Neighbours of one dtype, as (dtype, first, last)."""
        runs: list[tuple[str, int, int]] = []
        for index, tensor in enumerate(self.tensors):
            first, last = self.offsets[index : index + 2]
            if runs and runs[-1][0] == tensor.dtype:
                first = runs.pop()[1]
            runs.append((tensor.dtype, first, last))
        return tuple(runs)


def flat_layout(elements: int) -> FragmentLayout:
    """Return a layout of one tensor, where only the number of elements matters."""
    tensor = TensorSpec(
        name="elements", shape=(elements,), dtype="float32", role="parameter"
    )
    return FragmentLayout((tensor,))


Layout = tuple[FragmentLayout, ...]


def lay_out(model: ModelSpec, settings: RunSettings) -> Layout:
    """Return the fragments of a model; floating buffers, if any, are one more.

    Raises:
        ModelError: a tensor that is trained has a dtype that cannot be carried.
        UsageError: the model cannot be split as the settings ask.
    """
    parameters = model.with_role("parameter")
    buffers = model.with_role("buffer")
    _require_dtypes((*parameters, *buffers))
    parts = split(
        [(tensor.name, tensor.shape) for tensor in parameters],
        num_fragments=settings.sync.num_fragments,
        order=settings.sync.fragment_order,
        rest=settings.sync.rest,
    )
    by_name = {tensor.name: tensor for tensor in parameters}
    layout = [FragmentLayout(tuple(by_name[name] for name in part)) for part in parts]
    if buffers:
        layout.append(FragmentLayout(buffers, is_buffers=True))
    return tuple(layout)


def _require_dtypes(tensors: Sequence[TensorSpec]) -> None:
    for tensor in tensors:
        if tensor.dtype not in CARRIED_DTYPES:
            raise ModelError(
                f"{tensor.name!r} has dtype {tensor.dtype}, and only "
                f"{', '.join(CARRIED_DTYPES)} can be carried. "
                "Cast it, or freeze it with requires_grad_(False)."
            )


def _cast(dtype: str, values: F32, out: F32) -> None:
    if dtype == "bfloat16":
        kernels.active().round_bf16(values, out)
    elif dtype == "float16":
        with np.errstate(over="ignore"):  # an anchor beyond fp16 loads as infinity
            out[:] = values.astype(np.float16)
    else:
        out[:] = values


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Codecs both ways, the merge and the outer values of a fragment."""

    up: Codec
    down: Codec
    merge: str
    has_feedback: bool
    """Whether the island keeps its codec's residual."""

    is_weighted: bool
    """Whether an update's weight is its tokens; else it is 1."""

    staleness: str
    """How an update's age lowers its weight, as `algorithm.pace.factor` has it."""

    gathers: bool
    """Whether an outcome may be its updates' bodies; its mean is in fp32 then."""

    outer: OuterValues
    """The exact fp32 values of the open round."""


def terms_of(layout: FragmentLayout, settings: RunSettings) -> Terms:
    """Return the terms of one fragment of a run."""
    staleness = settings.asynchronous.staleness
    if layout.is_buffers:
        return _buffer_terms(settings.outer, staleness)
    return _parameter_terms(settings.outer, settings.wire, staleness)


# Every update is checked with them, and a run seldom changes them.
@lru_cache(maxsize=64)
def _buffer_terms(outer: OuterSection, staleness: str) -> Terms:
    return Terms(
        up=codec("fp32"),
        down=codec("fp32"),
        merge="mean",
        has_feedback=False,
        is_weighted=outer.weight == "tokens",
        staleness=staleness,
        gathers=False,
        outer=OuterValues(optimizer="sgd", lr=1.0, momentum=0.0),
    )


@lru_cache(maxsize=64)
def _parameter_terms(outer: OuterSection, wire: WireSection, staleness: str) -> Terms:
    return Terms(
        up=codec(wire.up),
        down=codec(wire.mean_codec),
        merge=outer.merge,
        has_feedback=wire.error_feedback,
        is_weighted=outer.weight == "tokens",
        staleness=staleness,
        gathers=wire.gathers,
        outer=OuterValues(
            optimizer=outer.optimizer, lr=outer.lr, momentum=outer.momentum
        ),
    )


class ScratchPool:
    """A pool of vectors: as many as all threads ever use at the same time."""

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._free: deque[F32] = deque()

    @contextmanager
    def vector(self, elements: int) -> Iterator[F32]:
        """Lend a vector of at most the pool's elements; its content is undefined.

        It must not be read after the `with` block.
        """
        try:
            vector = self._free.pop()
        except IndexError:  # all are in use
            vector = np.empty(self._elements, np.float32)
        try:
            yield vector[:elements]
        finally:
            self._free.append(vector)


U8 = NDArray[np.uint8]

MAX_FREE_BODIES = 2
"""The most free bodies in a pool; memory beyond that is freed."""

SMALL_BYTES = 2**20
"""Smaller bodies are allocated, not pooled."""


class BodyPool:
    """Lends memory, which returns when nothing refers to it. Thread-safe."""

    def __init__(self) -> None:
        # No lock: a finalizer may return memory while this very thread searches.
        self._free: deque[U8] = deque(maxlen=MAX_FREE_BODIES)

    def body(self, size_bytes: int) -> U8:
        """Return a byte vector with undefined content.

        Its memory is lent again when its last view is garbage.
        """
        if size_bytes < SMALL_BYTES:
            return np.empty(size_bytes, np.uint8)
        memory = self._fitting(size_bytes)
        lent = np.frombuffer(memory.data, np.uint8, size_bytes)
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return lent

    def _fitting(self, size_bytes: int) -> U8:
        for _ in range(len(self._free)):
            try:
                memory = self._free.popleft()
            except IndexError:  # another thread was faster
                break
            if size_bytes <= memory.size <= 2 * size_bytes:
                return memory
            self._free.append(memory)
        return np.empty(size_bytes, np.uint8)
