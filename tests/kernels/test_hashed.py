"""The step that hashes on the way is the step, and the hash is XXH3-128."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from atoll.kernels import with_numba, with_numpy
from atoll.kernels.layouts import STATE_PIECE
from tests.kernels.vectors import F32, SHAPES, same_bits

ELEMENTS = (0, 1, 1024, STATE_PIECE - 1, STATE_PIECE, 2 * STATE_PIECE + 4099)

modules = pytest.mark.parametrize("module", [with_numpy, with_numba])


def hashes_for(elements: int) -> np.ndarray:
    return np.zeros((-(-elements // STATE_PIECE), 32), np.uint8)


def xxh3(array: F32, piece: int) -> bytes:
    part = array[piece * STATE_PIECE : (piece + 1) * STATE_PIECE]
    return xxhash.xxh3_128_digest(part.tobytes())


@modules
@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("shape", ["gaussian", "special"])
@pytest.mark.parametrize("is_half", [False, True])
def test_it_is_the_step_and_the_librarys_hash(
    module: object, elements: int, shape: str, is_half: bool
) -> None:
    """Anchor and velocity are those of `nesterov`; each piece has xxhash's digest."""
    anchor, velocity = SHAPES[shape](elements), SHAPES["gaussian"](elements)
    mean = SHAPES["special"](elements)
    half = np.empty(elements, np.uint16)
    with_numpy.bf16_encode(mean, half)
    if is_half:
        with_numpy.bf16_decode(half, mean)
    expected = anchor.copy(), velocity.copy()
    with_numpy.nesterov(*expected, mean, 0.7, 0.9)
    hashes = hashes_for(elements)

    taken = half if is_half else mean
    assert module.nesterov_hashed(anchor, velocity, taken, 0.7, 0.9, hashes) == -1  # type: ignore[attr-defined]

    assert same_bits(anchor, expected[0])
    assert same_bits(velocity, expected[1])
    for piece, hashed in enumerate(hashes):
        assert hashed.tobytes() == xxh3(anchor, piece) + xxh3(velocity, piece)


@modules
@pytest.mark.parametrize("at", [3, 1500, STATE_PIECE + 70000, 3 * STATE_PIECE + 5])
@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC1])
def test_a_mean_that_is_not_finite_is_found(module: object, at: int, bad: int) -> None:
    """The first bf16 number that is NaN or infinite is reported by its index."""
    elements = 3 * STATE_PIECE + 10
    state = SHAPES["zeros"](elements), SHAPES["zeros"](elements)
    half = np.zeros(elements, np.uint16)
    half[[at, -1]] = bad

    found = module.nesterov_hashed(*state, half, 0.7, 0.9, hashes_for(elements))  # type: ignore[attr-defined]

    assert found == at
