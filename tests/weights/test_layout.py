"""Memory that is lent again."""

from __future__ import annotations

import numpy as np

from atoll.weights import BodyPool
from atoll.weights.layout import MAX_FREE_BODIES, SMALL_BYTES

SIZE = 2 * SMALL_BYTES


def address(body: np.ndarray) -> int:
    return int(body.ctypes.data)


def test_memory_that_nobody_looks_at_is_lent_again() -> None:
    """The next body of a size is where the last one was, and nobody has cleared it."""
    spare = BodyPool()
    body = spare.body(SIZE)
    body[:] = 7
    del body

    assert (spare.body(SIZE) == 7).all()


def test_a_view_keeps_its_memory() -> None:
    """Bytes that anybody can still read are never given to somebody else."""
    spare = BodyPool()
    body = spare.body(SIZE)
    body[:] = 7
    part = np.frombuffer(memoryview(body.data)[SIZE // 2 :], np.uint8)[1:].view(np.int8)
    first = address(body)
    del body
    other = spare.body(SIZE)
    other[:] = 9

    assert address(other) != first
    assert (part == 7).all()


def test_a_much_larger_memory_is_not_lent() -> None:
    """A body takes at most twice the memory that it needs, and never less."""
    spare = BodyPool()
    body = spare.body(3 * SIZE)
    first = address(body)
    del body
    smaller = spare.body(SIZE)

    assert address(smaller) != first
    assert len(smaller) == SIZE
    assert address(spare.body(2 * SIZE)) == first


def test_few_memories_are_kept() -> None:
    """However many bodies there were at once, the memory of a few stays."""
    spare = BodyPool()
    bodies = [spare.body(SIZE) for _ in range(MAX_FREE_BODIES + 2)]
    known = {address(body) for body in bodies}
    kept = {address(body) for body in bodies[2:]}
    while bodies:
        del bodies[0]
    again = [spare.body(SIZE) for _ in range(MAX_FREE_BODIES)]

    assert len(known) == MAX_FREE_BODIES + 2
    assert {address(body) for body in again} == kept
