"""Squares taken from bytes are those of the decoded elements, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from atoll.kernels import with_numba as compiled
from atoll.kernels import with_numpy
from atoll.kernels.layouts import E3M0_BLOCK, LANES, e3m0_bytes
from tests.kernels.vectors import LENGTHS, SHAPES

Size = Callable[[int], int]

CODECS: dict[str, tuple[type[np.generic], Size]] = {
    "fp32": (np.float32, lambda elements: 4 * elements),
    "bf16": (np.uint16, lambda elements: 2 * elements),
    "e3m0": (np.uint8, e3m0_bytes),
}

modules = pytest.mark.parametrize("module", [with_numpy, compiled])
codecs = pytest.mark.parametrize("name", CODECS)


def encoded(name: str, values: np.ndarray) -> np.ndarray:
    kind, size = CODECS[name]
    body = np.zeros(size(len(values)), np.uint8)
    assert getattr(with_numpy, f"{name}_encode")(values, body.view(kind)) == -1
    return body


def some_lanes() -> np.ndarray:
    return np.arange(LANES) * 1e-7


def expected(name: str, body: np.ndarray, elements: int) -> np.ndarray:
    values, lanes = np.empty(elements, np.float32), some_lanes()
    typed = body.view(CODECS[name][0])
    assert getattr(with_numpy, f"{name}_decode")(typed, values) == -1
    with_numpy.sum_squares(values, lanes)
    return lanes


def squares(module: ModuleType, name: str, body: np.ndarray, elements: int) -> int:
    refused = getattr(module, f"{name}_squares")(body, elements, np.zeros(LANES))
    return int(refused)


@modules
@codecs
@pytest.mark.parametrize("shape", ["gaussian", "special", "any_bits", "zeros"])
@pytest.mark.parametrize("elements", [*LENGTHS, 2**18])
def test_the_sums_are_those_of_the_decoded_elements(
    module: ModuleType, name: str, shape: str, elements: int
) -> None:
    """Lanes that hold something already get the same sums, tiny elements none."""
    body, lanes = encoded(name, SHAPES[shape](elements)), some_lanes()

    assert getattr(module, f"{name}_squares")(body, elements, lanes) == -1

    assert lanes.tobytes() == expected(name, body, elements).tobytes()


@modules
def test_a_body_may_lie_anywhere(module: ModuleType) -> None:
    """A body that starts at an odd byte, in memory that nobody may write, is taken."""
    body = encoded("fp32", SHAPES["gaussian"](1000))
    moved = np.frombuffer(b"x" + body.tobytes(), np.uint8)[1:]
    lanes = some_lanes()

    assert module.fp32_squares(moved, 1000, lanes) == -1

    assert lanes.tobytes() == expected("fp32", body, 1000).tobytes()


@modules
@pytest.mark.parametrize("at", [0, 63, 64, 20000, 20031])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_the_first_that_is_not_finite_is_found(
    module: ModuleType, name: str, bad: float, at: int
) -> None:
    """NaN and infinity are refused by their index, in whole rows and after them."""
    values = SHAPES["gaussian"](20032)
    values[[at, -1]] = bad
    body = values.view(np.uint8)
    if name == "bf16":
        body = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view("u1")

    assert squares(module, name, body, 20032) == at


@modules
@pytest.mark.parametrize("block", [0, 7, 99, 100])
def test_an_exponent_that_no_encoder_writes_is_found(
    module: ModuleType, block: int
) -> None:
    """E = 255 refuses the first element of its block, the short last one included."""
    elements = 100 * E3M0_BLOCK + 5
    body = encoded("e3m0", SHAPES["gaussian"](elements))
    body[block * (1 + E3M0_BLOCK // 2)] = 255

    assert squares(module, "e3m0", body, elements) == block * E3M0_BLOCK


@modules
def test_a_last_nibble_that_is_no_padding_is_found(module: ModuleType) -> None:
    """The upper half of the last byte of an odd body must be zero."""
    body = encoded("e3m0", SHAPES["gaussian"](65))
    body[-1] |= 0x10

    assert squares(module, "e3m0", body, 65) == 64
