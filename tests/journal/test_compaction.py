"""Compaction: the same state frame as from memory, a few pieces at a time."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from atoll.disk import SystemDisk
from atoll.simulate.world import SimDisk
from atoll.wire import MOMENTS, PIECE_ELEMENTS, OuterValues, pack
from tests.journal.runs import RUN, Run

SIZES = {
    "one element": 1,
    "below a piece": 70_000,
    "a piece": PIECE_ELEMENTS,
    "pieces and a bit": 2 * PIECE_ELEMENTS + 4097,
}
OUTERS = [
    OuterValues(optimizer="sgd", lr=0.5, momentum=0.0),
    OuterValues(optimizer="nesterov", lr=0.5, momentum=0.875),
    OuterValues(optimizer="heavy_ball", lr=0.5, momentum=0.875),
    OuterValues(optimizer="adam", lr=2.0**-7, momentum=0.875),
]


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("outer", OUTERS, ids=lambda outer: outer.optimizer)
def test_the_file_is_the_frame_that_live_weights_would_give(
    outer: OuterValues, size: int
) -> None:
    """A compacted state equals, byte for byte, the state frame made in memory."""
    disk = SimDisk()
    run = Run(disk, sizes=(size,), outer=outer).start()
    run.commit(0, value=2.0**-21)
    run.commit(0, is_void=True)
    run.commit(0, value=-(2.0**-20), down="bf16")
    run.journal.compact(0)
    run.commit(0, value=2.0**-22, down="int8")
    run.journal.compact(0)

    header, body = run.states[0].to_frame(run=RUN, fragment=0, outer=outer)

    assert disk.read("states/0/4") == pack(header) + body.tobytes()
    assert disk.names("states/") == ["states/0/3", "states/0/4"]
    run.reopen().check()


@pytest.mark.parametrize("down", ["e3m0", "int8", "bf16", "fp32"])
def test_every_codec_of_the_way_down_can_be_cut_into_pieces(down: str) -> None:
    """A piece of a body decodes to what the whole body decodes to there."""
    run = Run(SimDisk(), sizes=(PIECE_ELEMENTS + 333,)).start()
    for value in (2.0**-19, -(2.0**-20)):
        run.commit(0, value=value, down=down)
    run.journal.compact(0)

    run.reopen().check()


@pytest.mark.parametrize("means", [1, 8])
def test_memory_grows_neither_with_the_state_nor_with_the_means(
    means: int, tmp_path: Path
) -> None:
    """Compacting a large state needs the room of a few pieces."""
    disk = SystemDisk(tmp_path)
    run = Run(disk, sizes=(12 * PIECE_ELEMENTS + 77,)).start()
    for _ in range(means):
        run.commit(0, value=2.0**-22, down="bf16")

    tracemalloc.start()
    run.journal.compact(0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    # A piece is 1 MiB. Of each of two vectors: one that is read, one that is stepped,
    # one that is digested, one that straddles; and a mean, decoded and not.
    assert peak_bytes < 12 * 2**20
    # The state alone is 25 MB.
    assert peak_bytes < run.states[0].anchor.nbytes * 2 / 2
    disk.close()


def test_the_outer_values_of_each_round_are_used() -> None:
    """A learning rate that changed between rounds is replayed as it was."""
    run = Run(SimDisk()).start()
    run.commit(0, value=0.5)
    run.outer = OuterValues(optimizer="nesterov", lr=0.125, momentum=0.5)
    run.commit(0, value=0.25)
    run.reopen().check()
    run.journal.compact(0)
    run.reopen().check()

    assert MOMENTS[run.outer.optimizer] == len(run.states[0].moments)
    assert np.isfinite(run.states[0].anchor).all()
