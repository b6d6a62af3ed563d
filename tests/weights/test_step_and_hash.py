"""A step by a body is the step by its numbers, and its hashes are XXH3-128."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from atoll.errors import CorruptError
from atoll.kernels import with_numpy
from atoll.weights.state import STEP_BLOCK, OuterStep, step_and_hash
from atoll.wire import (
    STATE_PIECE,
    FrameKind,
    Header,
    OuterValues,
    Roster,
    RosterEntry,
    Verdict,
    codec,
    with_body,
)
from tests.kernels.vectors import F32, KINDS, SHAPES, same_bits, serving

ELEMENTS = (1, 1024, STATE_PIECE - 1, STATE_PIECE, STEP_BLOCK + STATE_PIECE + 4099)
LR, MOMENTUM = float(np.float32(0.7)), float(np.float32(0.9))

kinds = pytest.mark.parametrize("kind", KINDS)


def agreed(body: np.ndarray, elements: int, *, down: str) -> Header:
    counted = RosterEntry(
        island="a", incarnation=1, digest=bytes(32), weight=1, verdict=Verdict.COUNTED
    )
    header = Header(
        kind=FrameKind.AGREED,
        run="run",
        fragment=2,
        round=1,
        base=bytes(16),
        codec=down,
        elements=elements,
        weight=0,
        outer=OuterValues(optimizer="nesterov", lr=LR, momentum=MOMENTUM),
        roster=Roster((counted,)),
    )
    return with_body(header, body)


def xxh3(array: F32, piece: int) -> bytes:
    part = array[piece * STATE_PIECE : (piece + 1) * STATE_PIECE]
    return xxhash.xxh3_128_digest(part.tobytes())


@kinds
@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("shape", ["gaussian", "special"])
@pytest.mark.parametrize("down", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_the_step_and_the_librarys_hash(
    kind: str, elements: int, shape: str, down: str, threads: int
) -> None:
    """Anchor and velocity are those of `nesterov`; each piece has xxhash's digest."""
    anchor, velocity = SHAPES[shape](elements), SHAPES["gaussian"](elements)
    body = np.empty(codec(down).body_bytes(elements), np.uint8)
    codec(down).encode(SHAPES["special"](elements), body)
    mean = np.empty(elements, np.float32)
    codec(down).decode(body, mean)
    expected = anchor.copy(), velocity.copy()
    with_numpy.nesterov(*expected, mean, LR, MOMENTUM)

    with serving(kind):
        header = agreed(body, elements, down=down)
        hashes = step_and_hash(
            (anchor, velocity),
            header,
            body,
            step=OuterStep.of(header, 0),
            threads=threads,
        )

    assert same_bits(anchor, expected[0])
    assert same_bits(velocity, expected[1])
    for piece, hashed in enumerate(hashes):
        assert hashed.tobytes() == xxh3(anchor, piece) + xxh3(velocity, piece)


@kinds
@pytest.mark.parametrize("at", [3, 1500, STATE_PIECE + 7000, STEP_BLOCK + 5])
@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC1])
@pytest.mark.parametrize("down", ["fp32", "bf16"])
def test_a_mean_that_is_not_finite_is_found(
    kind: str, at: int, bad: int, down: str
) -> None:
    """The first number that is NaN or infinite is reported by its index."""
    elements = STEP_BLOCK + 10
    state = SHAPES["zeros"](elements), SHAPES["zeros"](elements)
    half = np.zeros(elements, np.uint16)
    half[[at, -1]] = bad
    numbers = half if down == "bf16" else half.astype(np.uint32) << np.uint32(16)
    body = numbers.view(np.uint8)
    header = agreed(body, elements, down=down)

    with (
        serving(kind),
        pytest.raises(CorruptError, match=f"Element {at} of the outcome of fragment 2"),
    ):
        step_and_hash(state, header, body, step=OuterStep.of(header, 0))
