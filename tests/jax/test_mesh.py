"""On eight devices: equal bits, and an exchange that stands beside the inner step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.jax.processes import run

pytestmark = [pytest.mark.jax, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def claims() -> dict[str, Any]:
    """Return what one process with eight devices has measured."""
    measured: dict[str, Any] = json.loads(run("-m", "tests.jax.eight_devices"))
    return measured


def test_many_devices_have_the_bits_of_one(claims: dict[str, Any]) -> None:
    """Islands apart, two at a place, or an outer state that is spread: equal bits."""
    assert claims["same bits"] == {
        "an island each": True,
        "two islands at a place": True,
        "outer state spread": True,
    }


def test_neither_the_inner_step_nor_the_exchange_waits_for_the_other(
    claims: dict[str, Any],
) -> None:
    """In the compiled program no inner output is behind an exchange, nor vice versa.

    Host devices run a program's operations without starting and ending a collective
    apart, so that this shows what may overlap, and not that it does.
    """
    found = claims["independence"]

    assert found["exchanges"] > 0
    assert found["inner outputs depend on"] == []
    # There is one slot, so that its number is not read.
    assert found["exchange reads"] == ["ages", "sealed"]
    assert found["reductions"] == ["ages", "reduced", "sealed"]


def test_only_the_steps_beside_a_flight_talk_to_other_islands(
    claims: dict[str, Any],
) -> None:
    """A bare inner step takes nothing from other islands; seals and landings, norms."""
    sizes = claims["bytes"]

    assert sizes["inner"] == 0
    assert sorted(name for name, size in sizes.items() if size > 16) == [
        *("inner 0 1", "inner 1 0")
    ]
    assert claims["inside an island"] > 0  # its own axis is used as before


def test_what_travels_is_encoded(claims: dict[str, Any]) -> None:
    """A slice of a fragment costs each device its share of the codec's bytes.

    The stack has 4 layers of w (16 x 16, half of it on each of two devices) and of b
    (16), reduced in two slices: 2 * (128 + 16) elements, from 3 other islands.
    """
    elements = 2 * (128 + 16) * 3
    by_codec = claims["bytes by codec"]

    assert by_codec["fp32"] == 4 * elements
    assert claims["bytes"]["inner 0 1"] == 2 * elements
    # Blocks lie whole on both devices of an island: w is 4 of 256 or 16 of 64 elements
    # and b, padded, 1 of either; an e3m0 block has 33 bytes, an int8 block 260.
    assert by_codec["e3m0"] == 3 * 33 * (8 + 1)
    assert by_codec["int8"] == 3 * 260 * (2 + 1)
