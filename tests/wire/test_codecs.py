"""What each codec promises about the values it carries."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from atoll.algorithm.arithmetic import flush
from atoll.algorithm.compress import seal
from atoll.errors import NonFinite, UsageError
from atoll.kernels import over_blocks
from atoll.wire import Codec, codec, codec_by_code
from tests.kernels.vectors import F32, KINDS, LENGTHS, MAX, SHAPES, serving, vectors

NAMES = ("fp32", "bf16", "int8", "e3m0", "topk-2bit", "bf16-stochastic")
TINY = 2.0**-100

names = pytest.mark.parametrize("name", NAMES)
kinds = pytest.mark.parametrize("kind", KINDS)
lengths = pytest.mark.parametrize("elements", LENGTHS)

middling = st.floats(2.0**-60, 2.0**60, width=32) | st.just(0.0)
middling_vectors = arrays(np.float32, st.integers(0, 200), elements=middling)
"""Far from both ends of the exponents, so that nothing is flushed or clamped."""


def encoded(name: str, values: F32, *, seed: int = 0) -> np.ndarray:
    body = np.empty(codec(name).body_bytes(values.size), np.uint8)
    codec(name).encode(values, body, seed=seed)
    return body


def roundtrip(name: str, values: F32, *, seed: int = 0) -> F32:
    out = np.empty_like(values)
    codec(name).decode(encoded(name, values, seed=seed), out)
    return out


def doubles(values: F32) -> np.ndarray:
    return values.astype(np.float64)


@given(values=vectors)
def test_fp32_is_lossless_but_for_the_flush(values: F32) -> None:
    """What comes back is what went in, without magnitudes below 2**-100."""
    assert roundtrip("fp32", values).tobytes() == flush(values).tobytes()


@given(values=vectors.filter(lambda v: bool((abs(v) < 3.3e38).all())))
def test_bf16_is_within_half_a_step(values: F32) -> None:
    """A bf16 number has 8 significant bits, so the error is at most |x| / 256."""
    error = abs(doubles(roundtrip("bf16", values)) - values)

    # Below 2**-100 the result is 0, or 2**-100 by rounding up.
    assert (error <= np.maximum(abs(doubles(values)) / 256, TINY)).all()


@given(values=vectors)
def test_int8_is_within_half_a_scale(values: F32) -> None:
    """The error is half a scale, and what two roundings in fp32 add to it."""
    body = encoded("int8", values)
    error = abs(doubles(roundtrip("int8", values)) - values)
    for first in range(0, values.size, 256):
        at = codec("int8").offset(first)
        (scale,) = struct.unpack("<f", body[at : at + 4].tobytes())
        # Quotient and product, of at most 127 scales, are each off by 2**-24 of that.
        # A zero scale stands for magnitudes of less than 127 * 2**-100.
        limit = scale * (0.5 + 2 * 127.5 * 2.0**-24) if scale else 127 * TINY
        # The largest scale is clamped by one part in 2**23, so that 127 stays finite.
        limit = max(limit, float(MAX) * 2.0**-23) if scale > 2.0**120 else limit
        assert (error[first : first + 256] <= limit).all()


@given(values=vectors.filter(lambda v: bool((abs(v) < 1.5 * 2.0**127).all())))
def test_e3m0_keeps_values_within_a_third(values: F32) -> None:
    """A kept value is the nearest power of two: between 2/3 and 4/3 of it.

    From 1 the error grows to 1.5, where 2 becomes nearer: 1 / 1.5 and 2 / 1.5.
    """
    decoded = roundtrip("e3m0", values)
    kept = decoded != 0
    ratio = doubles(decoded)[kept] / values[kept]

    assert ((ratio >= 2 / 3) & (ratio <= 4 / 3)).all()
    for first in range(0, values.size, 64):
        block, here = abs(doubles(values[first : first + 64])), slice(first, first + 64)
        dropped = block[~kept[here]]
        # Dropped is what rounds to 2**-7 of the largest or less, or below 2**-100.
        nearest = abs(doubles(decoded[here])).max(initial=0.0)
        assert (dropped <= max(1.5 * nearest / 128, 1.5 * TINY / 2)).all()


@given(values=vectors)
@pytest.mark.parametrize("name", ["fp32", "bf16", "e3m0"])
def test_encoding_twice_is_encoding_once(name: str, values: F32) -> None:
    """What was decoded survives another round trip unchanged (identity 20)."""
    values = np.clip(values, -1e38, 1e38)
    once = roundtrip(name, values)

    assert roundtrip(name, once).tobytes() == once.tobytes()


@given(values=vectors)
@names
def test_codecs_are_odd(name: str, values: F32) -> None:
    """The negative of a vector decodes to the negative (identity 20)."""
    values = np.clip(values, -1e30, 1e30)

    assert np.array_equal(roundtrip(name, -values), -roundtrip(name, values))


@given(values=middling_vectors, exponent=st.integers(-20, 20))
@pytest.mark.parametrize("name", ["bf16", "e3m0", "int8", "topk-2bit"])
def test_powers_of_two_pass_through(name: str, values: F32, exponent: int) -> None:
    """Scaling by a power of two and encoding may change places (identity 20)."""
    # A mean of the largest and the smallest of these may round differently only if
    # something is flushed: 2**-60 * 2**-20 is far above 2**-100.
    factor = np.float32(2.0**exponent)

    assert np.array_equal(
        roundtrip(name, values * factor), roundtrip(name, values) * factor
    )


def test_e3m0_by_hand() -> None:
    """One block, worked out: E is that of 2.0, and codes count down from it."""
    # 1.5 is as near to 2 as to 1 and goes up: e = 128 = E. -1 is one below: code 1,
    # with the sign 9. 2**-5 is 6 below 2 and is kept; 2**-6 is 7 below and is not.
    values = np.array([1.5, -1.0, 2.0**-5, 2.0**-6, -0.0], np.float32)

    assert encoded("e3m0", values).tolist() == [128, 0x90, 0x76, 0x07]
    assert roundtrip("e3m0", values).tolist() == [2.0, -1.0, 2.0**-5, 0.0, 0.0]


def test_e3m0_clamps_at_the_top_and_vanishes_at_the_bottom() -> None:
    """The largest numbers become 2**127; a block of nothing but tiny ones is zero."""
    assert roundtrip("e3m0", np.array([MAX, -MAX], np.float32)).tolist() == [
        2.0**127,
        -(2.0**127),
    ]
    # 1.5 * 2**-101 rounds up to 2**-100, whose exponent field is 27; less does not.
    tiny = np.array([1.5 * 2.0**-101, 1.49 * 2.0**-101], np.float32)
    assert encoded("e3m0", tiny).tolist() == [27, 0x70]
    assert encoded("e3m0", tiny[1:]).tolist() == [0, 0x07]


def test_int8_by_hand() -> None:
    """One block, worked out: the largest is 127 scales."""
    # 254 / 127 = 2; -254 is -127 (0x81), 3 is a tie between 1 and 2 and goes to even.
    values = np.array([-254.0, 3.0, 5.0, 0.9], np.float32)

    body = encoded("int8", values)
    assert body.tobytes() == struct.pack("<f", 2.0) + bytes([0x81, 2, 2, 0])
    assert roundtrip("int8", values).tolist() == [-254.0, 4.0, 4.0, 0.0]


def test_int8_holds_the_largest_number() -> None:
    """Even there 127 scales are finite, within one part in 2**23."""
    decoded = roundtrip("int8", np.array([MAX, -MAX], np.float32))

    assert np.isfinite(decoded).all()
    assert abs(doubles(decoded) / float(MAX)) == pytest.approx(1.0, rel=2.0**-23)


@pytest.mark.torch
def test_bf16_is_torchs_cast() -> None:
    """For every upper half, and every way the lower half can round, the same bits."""
    torch = pytest.importorskip("torch")
    upper = np.arange(2**16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = (upper[:, None] | lower).reshape(-1)
    values = bits[(bits & 0x7FFFFFFF) < 0x7F7F8000].view(np.float32)

    cast = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()

    assert encoded("bf16", values).tobytes() == cast.tobytes()


@given(values=vectors, seed=st.integers(0, 2**64 - 1))
def test_stochastic_rounding_chooses_a_neighbour(values: F32, seed: int) -> None:
    """The result is one of the two bf16 numbers around a value, or the value."""
    values = np.clip(values, -1e38, 1e38)
    body = encoded("bf16-stochastic", values, seed=seed).view(np.uint16)
    below = values.view(np.uint32) >> 16

    steps = body.astype(np.int64) - below
    is_exact = (values.view(np.uint32) & 0xFFFF) == 0
    assert ((steps == 0) | ((steps == 1) & ~is_exact)).all()


def test_stochastic_rounding_has_no_bias() -> None:
    """A value 3/10 of the way up is rounded up 3 times in 10."""
    # 2**18 draws: the share has a standard deviation of sqrt(0.21 / 2**18) = 0.0009.
    values = np.full(2**18, 1.0 + 0.3 * 2.0**-7, np.float32)
    decoded = roundtrip("bf16-stochastic", values, seed=7)

    assert (decoded > 1).mean() == pytest.approx(0.3, abs=0.0045)


@kinds
def test_stochastic_rounding_depends_on_the_element_not_on_the_split(kind: str) -> None:
    """Encoded in parts, a vector has the bytes of the whole; other seeds have not."""
    values = SHAPES["gaussian"](5000)
    with serving(kind):
        whole = encoded("bf16-stochastic", values, seed=3)
        parts = np.empty_like(whole)
        for first in range(0, 5000, 123):
            part = slice(first, first + 123)
            codec("bf16-stochastic").encode(
                values[part], parts[2 * part.start : 2 * part.stop], seed=3, first=first
            )

    assert parts.tobytes() == whole.tobytes()
    assert encoded("bf16-stochastic", values, seed=4).tobytes() != whole.tobytes()


def slow_topk(values: list[np.float32]) -> bytes:
    """Return one topk-2bit block, by sorting and counting bit after bit."""
    bits = [struct.unpack("<I", struct.pack("<f", abs(v)))[0] for v in values]
    order = sorted(range(len(values)), key=lambda i: (-bits[i], i))
    kept = order[: -(-len(values) // 64)]
    high = set(kept[: -(-len(kept) // 2)])
    levels = {}
    for level in (False, True):
        total, count = np.float32(0), 0
        for i in sorted(kept):
            if (i in high) == level:
                total += abs(values[i]) if abs(values[i]) >= TINY else np.float32(0)
                count += 1
        mean = total / np.float32(max(count, 1))
        levels[level] = mean if mean >= TINY else np.float32(0)
    out = struct.pack("<ff", levels[False], levels[True])
    indices = sum(i << (12 * place) for place, i in enumerate(sorted(kept)))
    signs = {i: int(np.signbit(values[i])) for i in kept}
    numbers = sum(
        ((i in high) | signs[i] << 1) << (2 * place)
        for place, i in enumerate(sorted(kept))
    )
    out += indices.to_bytes(-(-12 * len(kept) // 8), "little")
    return out + numbers.to_bytes(-(-2 * len(kept) // 8), "little")


@kinds
@pytest.mark.parametrize("shape", ["gaussian", "ties", "special", "sparse", "zeros"])
@pytest.mark.parametrize("elements", [1, 64, 65, 193, 4095, 4096, 4097, 8200])
def test_topk_is_the_slow_reference(kind: str, shape: str, elements: int) -> None:
    """Selection, ties, levels and packing are those of the plain text."""
    values = SHAPES[shape](elements)
    with serving(kind):
        body = encoded("topk-2bit", values)

    starts = range(0, elements, 4096)
    blocks = [slow_topk(list(values[start : start + 4096])) for start in starts]
    assert body.tobytes() == b"".join(blocks)


def test_topk_by_hand() -> None:
    """Of 128 elements two are kept: the larger is `high`, the other `low`."""
    values = np.zeros(128, np.float32)
    values[5], values[100] = -3.0, 2.0
    # Indices 5 and 100: 0x005 and 0x064 pack to 05 40 06. Values: 5 is high (1) and
    # negative (2), so 3; 100 is low and positive, 0: 0b0011.
    expected = struct.pack("<ff", 2.0, 3.0) + bytes([0x05, 0x40, 0x06, 0x03])

    assert encoded("topk-2bit", values).tobytes() == expected
    assert roundtrip("topk-2bit", values).tobytes() == values.tobytes()


@names
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_by_index(name: str, bad: float) -> None:
    """The index counts from the start of the fragment, so that it names a parameter."""
    values = SHAPES["gaussian"](5000)
    values[[4500, 4501]] = bad
    body = np.empty(codec(name).body_bytes(5000), np.uint8)

    with pytest.raises(NonFinite, match=f"element {8192 + 4500} is .*{name}") as caught:
        codec(name).encode(values, body, first=8192)

    assert caught.value.index == 8192 + 4500


@pytest.mark.parametrize("name", ["bf16", "bf16-stochastic", "topk-2bit"])
def test_values_that_would_become_infinite_are_refused(name: str) -> None:
    """A finite number that a codec can only write as infinity is no better than one."""
    values = np.full(4096, MAX, np.float32)

    with pytest.raises(NonFinite, match="cannot hold"):
        roundtrip(name, values)


@names
@kinds
@lengths
def test_a_range_decodes_to_the_slice(name: str, kind: str, elements: int) -> None:
    """Any range of whole blocks, or one to the end, is that part of the whole."""
    kind_of = codec(name)
    values = SHAPES["gaussian"](elements)
    step = max(kind_of.block, 4096)
    with serving(kind):
        body = encoded(name, values)
        whole = roundtrip(name, values)
        for first in range(0, elements, step):
            for last in {min(first + step, elements), elements}:
                out = np.empty(last - first, np.float32)
                kind_of.decode(body, out, first=first)
                assert out.tobytes() == whole[first:last].tobytes()


@names
@kinds
@lengths
def test_sealing_in_parts_gives_the_same_body(
    name: str, kind: str, elements: int
) -> None:
    """Block by block, in any order and on any number of threads: the same bytes."""
    kind_of = codec(name)
    values = SHAPES["gaussian"](elements)
    body = np.empty(kind_of.body_bytes(elements), np.uint8)

    def encode(first: int, last: int) -> None:
        start = kind_of.offset(first)
        part = body[start : start + kind_of.body_bytes(last - first)]
        kind_of.encode(values[first:last], part, seed=5, first=first)

    with serving(kind):
        over_blocks(elements, encode, block=4096, threads=3)
        whole = encoded(name, values, seed=5)

    assert body.tobytes() == whole.tobytes()


@names
@kinds
@pytest.mark.parametrize("weight", [None, 0.25, float(np.float32(1 / 3))])
def test_decode_add_is_the_text(name: str, kind: str, weight: float | None) -> None:
    """The sum is flushed; with a weight, the product is flushed before it."""
    values, out = SHAPES["special"](9000), SHAPES["gaussian"](9000)
    decoded = roundtrip(name, values)
    term = decoded if weight is None else flush(decoded * np.float32(weight))
    expected = flush(out + term)
    parts = out.copy()
    with serving(kind):
        body = encoded(name, values)
        codec(name).decode_add(body, out, weight=weight)
        scratch = np.empty(5000, np.float32)
        codec(name).decode_add(body, parts[:4096], weight=weight, scratch=scratch)
        codec(name).decode_add(body, parts[4096:], weight=weight, first=4096)

    assert out.tobytes() == expected.tobytes()
    assert parts.tobytes() == expected.tobytes()


@names
@pytest.mark.parametrize("decay", [1.0, float(np.float32(0.95))])
def test_error_feedback_loses_nothing(name: str, decay: float) -> None:
    """Identity 19: sum b**(T-t) D_t = sum b**(T-t) q_t + e_T, to rounding."""
    generator = np.random.default_rng(19)
    rounds = 12
    residual = np.zeros(5000, np.float32)
    wanted, sent = np.zeros(5000), np.zeros(5000)
    for _ in range(rounds):
        pseudo = generator.standard_normal(5000, np.float32)
        decoded, residual = seal(
            pseudo, residual, lambda x: roundtrip(name, x), decay=decay
        )
        wanted = wanted * decay + pseudo
        sent = sent * decay + decoded

    # In each round a product, a sum and a difference are rounded, none of them larger
    # than the largest thing there is by more than a factor of two.
    largest = max(abs(wanted).max(), abs(sent).max(), abs(residual).max())
    assert abs(wanted - sent - residual).max() <= rounds * 3 * 2.0**-23 * largest


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp32", 32),
        ("bf16", 16),
        ("int8", 8.125),
        ("e3m0", 4.125),
        ("topk-2bit", 0.234),
    ],
)
def test_bits_per_element(name: str, bits: float) -> None:
    """A whole block costs what the format says: 120 bytes for 4096 in topk-2bit."""
    assert codec(name).body_bytes(4096) * 8 / 4096 == pytest.approx(bits, abs=0.001)


@names
@lengths
def test_sizes_add_up(name: str, elements: int) -> None:
    """The offset of a part plus the size of the rest is the size of the whole."""
    kind_of = codec(name)
    first = elements // 2 // kind_of.block * kind_of.block

    rest = kind_of.body_bytes(elements - first)
    assert kind_of.offset(first) + rest == kind_of.body_bytes(elements)


def test_codecs_are_found_by_name_and_by_id() -> None:
    """Both tables hold the same codecs, under the ids of docs/wire-format.md."""
    by_name = {name: codec(name).code for name in NAMES}

    assert by_name == {
        "fp32": 1,
        "bf16": 2,
        "int8": 3,
        "e3m0": 4,
        "topk-2bit": 5,
        "bf16-stochastic": 6,
    }
    assert [codec_by_code(code).name for code in by_name.values()] == list(NAMES)


def test_misuse_is_a_usage_error() -> None:
    """An unknown name, a body of the wrong size, a part within a block."""
    values = np.zeros(10, np.float32)
    int8: Codec = codec("int8")

    with pytest.raises(UsageError, match=r"'fp8' is unknown.*fp32, bf16"):
        codec("fp8")
    with pytest.raises(UsageError, match=r"10 bytes cannot take 10 .* needs 14 bytes"):
        int8.encode(values, np.empty(10, np.uint8))
    with pytest.raises(UsageError, match="first=128 must be a multiple of 256"):
        int8.encode(values, np.empty(14, np.uint8), first=128)
    with pytest.raises(UsageError, match="scratch of 4 elements is too short for 10"):
        int8.decode_add(np.zeros(14, np.uint8), values, scratch=np.empty(4, np.float32))
