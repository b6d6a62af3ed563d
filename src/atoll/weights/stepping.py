"""The outer step of a fragment: decoded, taken and hashed, block by block.

Blocks touch only their own elements, so that any number of threads leaves the same
bits and the same hashes behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from atoll import kernels
from atoll.algorithm.outer import adam_corrections
from atoll.errors import CorruptError
from atoll.weights.layout import BLOCK, F32, blocks
from atoll.weights.scratch import Scratch
from atoll.wire import STATE_PIECE, Header, OuterValues, codec, state_piece

assert BLOCK == STATE_PIECE

U8 = NDArray[np.uint8]
Mean = F32 | NDArray[np.uint16]

READ_AS_THEY_ARE = {"fp32": np.float32, "bf16": np.uint16}
"""Codecs whose body Nesterov's kernel decodes on its way, and its elements' type."""

STEP_BLOCK = 4 * STATE_PIECE
"""Elements per call of that kernel: enough that the call costs nothing."""

HASH_BYTES = 16

Step = Callable[[slice, F32], None]


def step_and_hash(
    vectors: Sequence[F32],
    agreed: Header,
    body: np.ndarray,
    *,
    count: int,
    threads: int = 1,
) -> U8:
    """Move anchor and moments by an agreed mean; return a row of hashes per piece.

    Raises:
        CorruptError: the body does not decode. The vectors are then spoilt.
    """
    assert agreed.outer is not None
    _require_length(agreed, body)
    elements = len(vectors[0])
    hashes = np.empty(
        (-(-elements // STATE_PIECE), HASH_BYTES * len(vectors)), np.uint8
    )
    if agreed.outer.optimizer == "nesterov":
        work = _hashing(vectors, agreed, agreed.outer, body, hashes)
    else:
        work = _plain(
            vectors, agreed, kernel_of(vectors, agreed.outer, count), body, hashes
        )
    kernels.over_blocks(elements, work, block=STEP_BLOCK, threads=threads)
    return hashes


def _require_length(agreed: Header, body: np.ndarray) -> None:
    needed = codec(agreed.codec).body_bytes(agreed.elements)
    if body.nbytes != needed:
        raise CorruptError(
            f"The outcome of fragment {agreed.fragment} has a body of {body.nbytes} "
            f"bytes, and its {agreed.elements} elements in {agreed.codec} take "
            f"{needed}. Take the run's state again."
        )


def _hashing(
    vectors: Sequence[F32],
    agreed: Header,
    outer: OuterValues,
    body: np.ndarray,
    hashes: U8,
) -> kernels.Work:
    """Return Nesterov's step, whose kernel hashes what it has in the first cache."""
    anchor, velocity = vectors
    down, as_it_is = codec(agreed.codec), READ_AS_THEY_ARE.get(agreed.codec)
    scratch = Scratch(min(STEP_BLOCK, len(anchor)))

    def take(first: int, last: int, mean: Mean) -> None:
        refused = kernels.active().nesterov_hashed(
            anchor[first:last],
            velocity[first:last],
            mean,
            outer.lr,
            outer.momentum,
            hashes[first // STATE_PIECE : -(-last // STATE_PIECE)],
        )
        if refused >= 0:
            raise CorruptError(
                f"Element {first + refused} of the outcome of fragment "
                f"{agreed.fragment} is not finite. Take the run's state again."
            )

    def work(first: int, last: int) -> None:
        if as_it_is is not None:
            take(first, last, body.view(as_it_is)[first:last])
            return
        with scratch.vector(last - first) as mean:
            down.decode(body, mean, first=first)
            take(first, last, mean)

    return work


def _plain(
    vectors: Sequence[F32], agreed: Header, step: Step, body: np.ndarray, hashes: U8
) -> kernels.Work:
    """Return a step that is hashed afterwards, piece by piece."""
    down, scratch = codec(agreed.codec), Scratch(min(BLOCK, len(vectors[0])))

    def work(first: int, last: int) -> None:
        for block in blocks(last - first):
            here = slice(first + block.start, first + block.stop)
            with scratch.vector(here.stop - here.start) as mean:
                down.decode(body, mean, first=here.start)
                step(here, mean)
            row = state_piece([vector[here] for vector in vectors])
            hashes[here.start // STATE_PIECE] = np.frombuffer(row, np.uint8)

    return work


def kernel_of(vectors: Sequence[F32], outer: OuterValues, count: int) -> Step:
    """Return the kernel of an optimizer, bound to its fp32 settings."""
    active = kernels.active()
    lr, momentum = np.float32(outer.lr), np.float32(outer.momentum)
    anchor, *moments = vectors
    if outer.optimizer == "sgd":
        return lambda at, mean: active.sgd(anchor[at], mean, lr)
    if outer.optimizer == "adam":
        first, second = moments
        fixed = adam_corrections(momentum=outer.momentum, count=count)
        scalars = [np.float32(value) for value in fixed]
        return lambda at, mean: active.adam(
            anchor[at], first[at], second[at], mean, lr, momentum, *scalars
        )
    (velocity,) = moments
    if outer.optimizer == "nesterov":
        return lambda at, mean: active.nesterov(
            anchor[at], velocity[at], mean, lr, momentum
        )
    return lambda at, mean: active.heavy_ball(
        anchor[at], velocity[at], mean, lr, momentum
    )
