"""Frames made by an attacker: refused as corrupt, within bounds, or read whole.

What 0.1.0 held as well; tests/wire/test_hostile.py has the cases one by one.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.attacks.frame_target import DECODERS, NUM_SIGNED, feed, is_read, seeds

SEEDS = seeds()
FUZZES_S = 30
MOST_BYTES = 8 * 2**20
"""What reading one input may take: the body that its reader allows, several times."""

NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Draw a golden input with a few changes of the kinds that fuzzers make."""
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(1, len(data)))
        match draw(st.integers(0, 4)):
            case 0 if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                size = draw(st.sampled_from((1, 2, 4, 8)))
                number = draw(st.sampled_from(NUMBERS)) % 2 ** (8 * size)
                data[at : at + size] = number.to_bytes(size, "little")
            case 2:
                del data[at : at + draw(st.integers(1, 40))]
            case 3:
                data[at:at] = draw(st.binary(min_size=1, max_size=40))
            case _:
                other = draw(st.sampled_from(SEEDS))
                first = draw(st.integers(0, len(other)))
                data[at:at] = other[first : first + draw(st.integers(1, 300))]
    return bytes(data)


@pytest.mark.parametrize("number", range(len(SEEDS)))
def test_every_seed_is_read_by_its_decoder(number: int) -> None:
    """What fuzzing starts from is right, so that changes reach every rule."""
    assert is_read(SEEDS[number])


@settings(
    max_examples=3000,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=mutated())
def test_mutated_frames_are_corrupt_or_canonical(data: bytes) -> None:
    """Every decoder raises CorruptError alone, or what it read packs to the input."""
    note(data.hex())
    feed(data)


@pytest.fixture(scope="module")
def compiled_kernels() -> None:
    """Read every seed, and decode by every codec: compiling takes memory once."""
    bodies = [bytes([3, code, 3, 0]) + bytes(64) for code in range(1, 7)]
    for data in [*SEEDS, *bodies]:
        feed(data)


@pytest.mark.usefixtures("compiled_kernels")
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=mutated())
def test_no_input_reserves_more_than_its_reader_allows(data: bytes) -> None:
    """Sizes that a frame promises are judged before anything depends on them."""
    tracemalloc.start()
    try:
        feed(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < MOST_BYTES


@settings(max_examples=500, deadline=None, derandomize=True)
@given(decoder=st.integers(0, NUM_SIGNED - 1), data=st.binary(max_size=2000))
def test_noise_is_refused(decoder: int, data: bytes) -> None:
    """No noise is a header or a frame, even with a digest that fits."""
    assert not is_read(bytes([decoder]) + data)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    decoder=st.integers(NUM_SIGNED, len(DECODERS) - 1), data=st.binary(max_size=2000)
)
def test_noise_is_corrupt_or_canonical(decoder: int, data: bytes) -> None:
    """Some noise is a roster or a body; `feed` holds that it is a whole and right."""
    feed(bytes([decoder]) + data)


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris is not installed. Try: make engines",
)
def test_half_a_minute_of_coverage_finds_nothing(tmp_path: Path) -> None:
    """No input crashes a decoder, hangs it for 10 s or takes it beyond 2 GB."""
    limits = ["-timeout=10", "-rss_limit_mb=0", "-max_len=4096", "-seed=1"]
    words = [str(tmp_path), f"-max_total_time={FUZZES_S}", *limits]
    done = subprocess.run(
        [sys.executable, "-m", "tests.attacks.frame_fuzzing", *words],
        capture_output=True,
        text=True,
        timeout=FUZZES_S + 80,
        cwd=Path(__file__).parents[2],
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert "DONE" in done.stderr
