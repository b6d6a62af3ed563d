"""Every block is worked on once, whatever the threads do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.kernels import over_blocks, usable_threads
from atoll.kernels.dispatch import MAX_THREADS


@given(
    elements=st.integers(0, 1000),
    block=st.integers(1, 300),
    threads=st.integers(1, 4),
)
def test_every_element_is_visited_once(elements: int, block: int, threads: int) -> None:
    """The blocks cover the vector without gap or overlap, each at most one block."""
    visits = np.zeros(elements, np.int64)

    def visit(first: int, last: int) -> None:
        assert 0 < last - first <= block
        visits[first:last] += 1

    over_blocks(elements, visit, block=block, threads=threads)

    assert (visits == 1).all()


def test_threads_work_at_the_same_time() -> None:
    """Two blocks that wait for each other both finish on two threads."""
    meeting = threading.Barrier(2, timeout=30)

    over_blocks(2, lambda first, last: void(meeting.wait()), block=1, threads=2)


def void(_: object) -> None:
    """Drop a result."""


@pytest.mark.parametrize("threads", [1, 3])
def test_the_lowest_failure_is_raised(threads: int) -> None:
    """Of all that goes wrong, the caller hears of the lowest block."""

    def fail(first: int, last: int) -> None:
        if first >= 30:
            raise ValueError(f"block at {first}")

    with pytest.raises(ValueError, match="block at 30"):
        over_blocks(1000, fail, block=10, threads=threads)


def test_a_call_inside_a_call_finishes() -> None:
    """Threads that are all busy with outer blocks do not starve the inner ones."""
    total = np.zeros(64, np.int64)

    def inner(first: int, last: int) -> None:
        def add(low: int, high: int) -> None:
            total[first] += high - low

        over_blocks(100, add, block=7, threads=1 + first % 4)

    over_blocks(64, inner, block=1, threads=8)

    assert (total == 100).all()


@pytest.mark.parametrize(("block", "threads"), [(0, 1), (1, 0)])
def test_no_block_and_no_thread_are_refused(block: int, threads: int) -> None:
    """The message names both values."""
    with pytest.raises(UsageError, match=f"block={block} and threads={threads}"):
        over_blocks(10, lambda first, last: None, block=block, threads=threads)


def test_as_many_threads_are_of_use_as_there_are_cores_up_to_a_few() -> None:
    """One core at least, and no more than a few however large the machine is."""
    assert 1 <= usable_threads() <= MAX_THREADS


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which cores")
def test_a_process_that_may_use_one_core_has_one_thread() -> None:
    """What counts are the cores that the process was given, not the machine's."""
    core = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{core}}});"
        "from atoll.kernels import usable_threads; print(usable_threads())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "1"
