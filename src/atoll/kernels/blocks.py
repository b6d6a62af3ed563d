"""Work over the blocks of a vector, on one thread or several."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

from atoll.errors import UsageError

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
