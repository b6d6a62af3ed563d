"""Compiled or not, a kernel gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.kernels import with_numba, with_numpy
from atoll.kernels.layouts import e3m0_bytes, int8_bytes, topk_bytes
from tests.kernels.vectors import F32, LENGTHS, SHAPES, same_bits, vectors

Size = Callable[[int], int]

PACKED: dict[str, tuple[Size, type[np.generic]]] = {
    "fp32": (lambda elements: elements, np.float32),
    "bf16": (lambda elements: elements, np.uint16),
    "int8": (int8_bytes, np.uint8),
    "e3m0": (e3m0_bytes, np.uint8),
    "topk": (topk_bytes, np.uint8),
}
STEPS: dict[str, tuple[int, tuple[float, ...]]] = {
    "accumulate": (2, ()),
    "accumulate_divided": (2, (3.0,)),
    "accumulate_scaled": (2, (0.3,)),
    "divide": (1, (3.0,)),
    "scale": (1, (0.3,)),
    "sgd": (2, (0.7,)),
    "heavy_ball": (3, (0.7, 0.9)),
    "nesterov": (3, (0.7, 0.9)),
    "adam": (4, (0.01, 0.9, 0.99, 1e-8, 0.1, 0.01)),
}
"""How many vectors each takes, then which scalars."""

lengths = pytest.mark.parametrize("elements", LENGTHS)
shapes = pytest.mark.parametrize("shape", SHAPES)


def hold_codec_equal(name: str, values: F32) -> None:
    """Encode and decode with both kinds, and hold every result equal."""
    size, dtype = PACKED[name]
    bodies, outs = [], []
    for module in (with_numpy, with_numba):
        body = np.full(size(values.size), 99, dtype)
        refused = getattr(module, f"{name}_encode")(values, body)
        bodies.append((refused, body.tobytes() if refused < 0 else b""))
    assert bodies[0] == bodies[1]
    if bodies[0][0] >= 0:
        return
    for module in (with_numpy, with_numba):
        out = np.full(values.size, 99, np.float32)
        assert getattr(module, f"{name}_decode")(body, out) == -1
        outs.append(out.tobytes())
    assert outs[0] == outs[1]


@shapes
@lengths
@pytest.mark.parametrize("name", PACKED)
def test_codecs_agree_on_awkward_vectors(name: str, elements: int, shape: str) -> None:
    """Body, decoded values and the first refused element are the same."""
    hold_codec_equal(name, SHAPES[shape](elements))


@pytest.mark.parametrize("name", PACKED)
@given(values=vectors)
def test_codecs_agree_on_any_vector(name: str, values: F32) -> None:
    """No finite vector tells the two kinds apart."""
    hold_codec_equal(name, values)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_both_refuse_the_same_element(name: str, bad: float) -> None:
    """Among several bad elements it is the first one that is reported."""
    size, dtype = PACKED[name]
    values = SHAPES["gaussian"](9000)
    values[[4200, 4201, 8999]] = bad

    for module in (with_numpy, with_numba):
        body = np.empty(size(values.size), dtype)
        assert getattr(module, f"{name}_encode")(values, body) == 4200


@given(values=vectors, seed=st.integers(0, 2**64 - 1), first=st.integers(0, 2**62))
def test_stochastic_rounding_agrees(values: F32, seed: int, first: int) -> None:
    """The random bits are those of (seed, element) alone, wherever that lies."""
    bodies = []
    for module in (with_numpy, with_numba):
        body = np.zeros(values.size, np.uint16)
        refused = module.bf16_stochastic(values, body, seed, first)
        bodies.append((refused, body.tobytes() if refused < 0 else b""))

    assert bodies[0] == bodies[1]


@pytest.mark.parametrize("name", PACKED)
@settings(max_examples=50)
@given(data=st.data())
def test_hostile_bytes_meet_the_same_verdict(name: str, data: st.DataObject) -> None:
    """Whatever the bytes, both kinds decode the same or refuse the same element."""
    size, dtype = PACKED[name]
    elements = data.draw(st.sampled_from([0, 1, 3, 64, 129, 300]))
    length = size(elements) * np.dtype(dtype).itemsize
    raw = data.draw(st.binary(min_size=length, max_size=length))
    body = np.frombuffer(raw, dtype)
    results = []
    for module in (with_numpy, with_numba):
        out = np.empty(elements, np.float32)
        refused = getattr(module, f"{name}_decode")(body, out)
        results.append((refused, out.tobytes() if refused < 0 else b""))

    assert results[0] == results[1]


@shapes
@pytest.mark.parametrize("elements", [0, 65, 20001])
@pytest.mark.parametrize("name", STEPS)
def test_steps_agree(name: str, elements: int, shape: str) -> None:
    """Sums and outer steps leave the same bits in every vector."""
    count, scalars = STEPS[name]
    makers = [SHAPES[shape], SHAPES["special"], SHAPES["sparse"], SHAPES["gaussian"]]
    one = [make(elements) for make in makers]
    one[2] = abs(one[2])  # Adam's second moment has no sign
    other = [vector.copy() for vector in one]

    getattr(with_numpy, name)(*one[:count], *scalars)
    getattr(with_numba, name)(*other[:count], *scalars)

    assert all(map(same_bits, one, other))


def test_every_nibble_of_every_block_decodes_the_same() -> None:
    """All pairs of nibbles, below every E that there is: 255 * 256 bytes."""
    pairs = np.tile(np.arange(256, dtype=np.uint8).reshape(8, 32), (255, 1))
    heads = np.repeat(np.arange(255, dtype=np.uint8), 8)[:, None]
    body = np.hstack([heads, pairs]).reshape(-1)
    outs = []
    for module in (with_numpy, with_numba):
        outs.append(np.full(64 * len(heads), 99, np.float32))
        assert module.e3m0_decode(body, outs[-1]) == -1

    assert outs[0].tobytes() == outs[1].tobytes()
    encoded = [np.empty_like(body), np.empty_like(body)]
    for module, out in zip((with_numpy, with_numba), encoded, strict=True):
        assert module.e3m0_encode(outs[0], out) == -1
    assert encoded[0].tobytes() == encoded[1].tobytes()


@shapes
@lengths
@np.errstate(over="ignore", invalid="ignore")
def test_what_is_sealed_and_left_over_agrees(elements: int, shape: str) -> None:
    """The difference, with and without a residual, and what the codec leaves of it."""
    loaded, local = SHAPES[shape](elements), SHAPES["special"](elements)
    residual = SHAPES["gaussian"](elements)
    found = []
    for module in (with_numpy, with_numba):
        plain, fed, left = np.full((3, elements), 99, np.float32)
        lanes = np.ones(64)
        module.difference(loaded, local, plain)
        module.difference_fed(loaded, local, residual, 0.95, fed)
        module.left_over(loaded, residual, left, lanes)
        found.append((plain, fed, left, lanes))

    assert same_bits(found[0][0], loaded - local)
    assert same_bits(found[0][1], (loaded - local) + residual * np.float32(0.95))
    assert same_bits(found[0][2], loaded - residual)
    assert all(map(same_bits, found[0][:3], found[1][:3]))
    assert found[0][3].tobytes() == found[1][3].tobytes()
    lanes = np.ones(64)
    with_numpy.sum_squares(residual, lanes)
    assert lanes.tobytes() == found[0][3].tobytes()


@shapes
@lengths
def test_rounding_and_norms_agree(elements: int, shape: str) -> None:
    """So do the cast to bf16 and back, and the lanes of a norm."""
    values = SHAPES[shape](elements)
    rounded, lanes = [], []
    for module in (with_numpy, with_numba):
        rounded.append(np.empty_like(values))
        lanes.append(np.ones(64))
        module.round_bf16(values, rounded[-1])
        module.sum_squares(values, lanes[-1])

    assert same_bits(*rounded)
    assert lanes[0].tobytes() == lanes[1].tobytes()


def test_rounding_to_bf16_keeps_nan_and_reaches_infinity() -> None:
    """A cast judges nothing: NaN stays NaN, and what is too large becomes infinite."""
    values = np.array([np.nan, -np.nan, np.inf, -np.inf, 3.4e38], np.float32)
    # A NaN whose payload lies below the cut must not become an infinity.
    values.view(np.uint32)[1] = 0xFF800001
    for module in (with_numpy, with_numba):
        out = np.empty_like(values)
        module.round_bf16(values, out)

        assert np.isnan(out[:2]).all()
        assert out[2:].tolist() == [np.inf, -np.inf, np.inf]


@pytest.mark.torch
@pytest.mark.parametrize("name", PACKED)
def test_flushing_processors_change_nothing(name: str) -> None:
    """A processor told to treat subnormals as zero writes the same bytes."""
    torch = pytest.importorskip("torch")
    before = [_encoded(name, SHAPES[shape](9001)) for shape in SHAPES]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush")
    try:
        after = [_encoded(name, SHAPES[shape](9001)) for shape in SHAPES]
    finally:
        torch.set_flush_denormal(False)

    assert before == after


def _encoded(name: str, values: F32) -> bytes:
    size, dtype = PACKED[name]
    body = np.zeros(size(values.size), dtype)
    out = np.zeros(values.size, np.float32)
    if getattr(with_numba, f"{name}_encode")(values, body) >= 0:
        return b"refused"
    getattr(with_numba, f"{name}_decode")(body, out)
    return body.tobytes() + out.tobytes()
