"""Compaction: the same state frame as from memory, a few pieces at a time."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.disk import SystemDisk
from atoll.simulate.world import SimDisk
from atoll.wire import MOMENTS, PIECE_ELEMENTS, OuterValues, pack
from tests.journal.runs import NESTEROV, RUN, Run, Tensors, an_agreed, bits

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
    OuterValues(optimizer="nesterov", lr=0.5, momentum=0.875, share=0.75, buffer=2),
    OuterValues(optimizer="sgd", lr=0.5, momentum=0.0, share=0.25, buffer=4),
]


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    "outer", OUTERS, ids=lambda outer: f"{outer.optimizer}-{outer.buffer}"
)
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


@pytest.mark.parametrize("size", [130, PIECE_ELEMENTS, 2 * PIECE_ELEMENTS + 4097])
@pytest.mark.parametrize(
    ("down", "islands", "gathered"),
    [
        *[("e3m0", 5, merge) for merge in ("mean", "radial", "trimmed")],
        *[("topk-2bit", 9, "mean"), ("int8", 3, "radial"), ("bf16", 1, "radial")],
    ],
)
def test_gathered_updates_are_replayed_from_the_disk(
    down: str, islands: int, gathered: str, size: int
) -> None:
    """Compaction, a restart and past anchors give the bits of the live weights.

    A radial mean needs the lengths of whole tensors, which end within pieces.
    """
    disk = SimDisk()
    tensors: Tensors = {"a": (77,), "b": (size - 77 - 3,), "c": (3,)}
    run = Run(disk, sizes=(size,), tensors=tensors).start()
    for value in (2.0**-19, -(2.0**-20), 2.0**-21):
        run.commit(0, value=value, down=down, islands=islands, gathered=gathered)
    run.commit(0, is_void=True)
    before = [piece.tobytes() for piece in run.journal.past.anchor(0, 2)]
    run.reopen().check()
    run.journal.compact(0)
    run.commit(0, value=2.0**-18, down=down, islands=islands, gathered=gathered)
    run.reopen().check()

    header, body = run.journal.body(0, 5), run.outcomes[0, 5][1]
    assert header is not None
    assert header.read().tobytes() == body.tobytes()
    assert b"".join(before) == run.after[0, 2][1]
    assert disk.names("states/") == ["states/0/0", "states/0/4"]


def test_the_parts_of_a_gathered_body_are_written_as_one() -> None:
    """A coordinator gives the updates where they are; the file has them in order."""
    run = Run(SimDisk(), sizes=(5, 17_000)).start()
    for fragment in (0, 1):  # one is small and shares a file, one has its own
        state = run.states[fragment]
        frame = an_agreed(state, fragment, down="bf16", islands=2, gathered="mean")
        parts = np.split(frame[1], 2)
        state.apply(*frame)
        run.journal.prepare(frame[0], parts)
        run.journal.commit(frame[0], parts, digest_after=state.digest, epoch=0)
        run.after[fragment, 1] = bits(state)
        run.outcomes[fragment, 1] = frame

    run.check()
    run.reopen().check()


def test_compacting_gathered_updates_needs_the_room_of_some_pieces(
    tmp_path: Path,
) -> None:
    """Seven updates of 3.1 million elements are read a piece of each at a time."""
    disk = SystemDisk(tmp_path)
    run = Run(disk, sizes=(12 * PIECE_ELEMENTS + 77,)).start()
    for _ in range(4):
        run.commit(0, value=2.0**-22, down="e3m0", islands=7, gathered="mean")

    tracemalloc.start()
    run.journal.compact(0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    # As above, and of each of the four means seven pieces of 135 kB, twice.
    assert peak_bytes < (12 + 8) * 2**20
    disk.close()


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


@pytest.mark.parametrize("elements", [5, PIECE_ELEMENTS + 333])
@settings(max_examples=20, deadline=None)
@given(
    rounds=st.lists(
        st.tuples(
            st.integers(1, 3),  # islands
            st.sampled_from([1, 2, 3, 5]),  # the buffer, which may change
            st.sampled_from(["fp32", "bf16", "int8"]),
            st.booleans(),  # void
            st.sampled_from(["", "compact", "reopen"]),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_rounds_of_a_buffer_replay_to_the_live_digest(
    elements: int, rounds: list[tuple[int, int, str, bool, str]]
) -> None:
    """Wherever a buffer stands when a state is written, a restart goes on from there.

    A state that lost the count would take the momentum in another round.
    """
    run = Run(SimDisk(), sizes=(elements,)).start()
    for number, (islands, buffer, down, is_void, then) in enumerate(rounds):
        share = min(1.0, float(np.float32(islands / buffer)))
        run.outer = replace(NESTEROV, share=share, buffer=buffer)
        run.commit(0, value=2.0**-20, down=down, is_void=is_void, islands=islands)
        live = run.states[0]
        if then == "compact":
            run.journal.compact(0)
        if then == "reopen":
            run.reopen().check()
            assert (live.count, live.digest) == (
                run.states[0].count,
                run.states[0].digest,
            )
        assert run.journal.recorded.fragment(0).digest == live.digest
        assert live.round == number + 1
    run.reopen().check()

    assert run.states[0].digest == run.journal.recorded.fragment(0).digest
