"""Codecs inside a program: the bytes of the wire."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

from atoll.errors import UsageError
from atoll.jax import outer_step as codecs
from atoll.wire import codec as wire_codec

pytestmark = pytest.mark.jax

SIZE = 64 * 4 * 5 + 37


def vectors() -> list[NDArray[np.float32]]:
    """Return values of all magnitudes, small ones with zeros, ties, and nothing."""
    rng = np.random.default_rng(0)
    wide = rng.standard_normal(SIZE) * np.exp2(rng.integers(-120, 126, SIZE))
    small = rng.standard_normal(SIZE) * 1e-3 * (rng.random(SIZE) < 0.8)
    ties = rng.integers(-300, 301, SIZE) / 2
    return [each.astype(np.float32) for each in (wide, small, ties, 0 * ties)]


def bytes_of(name: str, encoded: tuple[NDArray[np.generic], ...]) -> bytes:
    """Return encoded arrays as the wire lays them out: each block after its scale."""
    if len(encoded) == 1:
        return encoded[0].tobytes()
    heads, rows = encoded
    both = (
        head.tobytes() + row.tobytes() for head, row in zip(heads, rows, strict=True)
    )
    return b"".join(both)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "e3m0"])
def test_what_a_program_encodes_is_what_the_wire_carries(name: str) -> None:
    """Encoded arrays are the body of the wire's codec, and decode to the same bits."""
    wire, own = wire_codec(name), codecs.codec(name, key="wire.up")
    encode = jax.jit(lambda x: own.encode(own.fold(x, lead=0)))
    roundtrip = jax.jit(own.roundtrip)
    for x in vectors():
        body = np.empty(wire.body_bytes(SIZE), np.uint8)
        decoded = np.empty(SIZE, np.float32)
        wire.encode(x, body)
        wire.decode(body, decoded)

        padded = bytes_of(name, tuple(np.asarray(each) for each in encode(x)))
        whole = wire.body_bytes(SIZE // wire.block * wire.block)
        assert padded[:whole] == body.tobytes()[:whole]
        got = np.asarray(roundtrip(x))
        np.testing.assert_array_equal(got.view(np.uint32), decoded.view(np.uint32))


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "e3m0"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden(name: str, bad: float) -> None:
    """No codec makes a finite number of a NaN or an infinity."""
    x = np.ones(300, np.float32)
    x[7] = bad

    got = np.asarray(jax.jit(codecs.codec(name, key="wire.up").roundtrip)(x))

    assert not np.isfinite(got[7])
    assert np.isfinite(got[256:]).all()


def test_a_codec_without_a_program_is_refused_by_name() -> None:
    """A sparse update has no form inside a program, and the message says what has."""
    with pytest.raises(
        UsageError, match=r"wire\.up='topk-2bit' .* fp32, bf16, int8, e3m0"
    ):
        codecs.codec("topk-2bit", key="wire.up")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cast_is_never_left_out(dtype: str) -> None:
    """An anchor is what was loaded, although XLA would skip the way there and back."""
    x = np.float32(1) + np.arange(64, dtype=np.float32) / 2**14

    got = np.asarray(jax.jit(lambda x: codecs.cast(x, dtype))(x))

    np.testing.assert_array_equal(
        got, x.astype(jax.numpy.dtype(dtype)).astype(np.float32)
    )
    assert (got != x).any()
