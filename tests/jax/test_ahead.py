"""Programs of a large model, ahead of time and without its memory."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.jax.processes import run

pytestmark = [pytest.mark.jax, pytest.mark.timeout(900)]

PROGRAMS = ["inner", "inner 0 1", "inner 1 0", "land 0", "land 1", "seal 0", "seal 1"]


def test_a_model_of_two_billion_is_lowered_for_a_mesh() -> None:
    """Gemma 2 2B in fourteen fragments over 2 x 4 devices needs seven programs."""
    told = json.loads(run("-m", "tests.jax.lowered_gemma"))

    assert told == {"programs": PROGRAMS, "parameters": 2_614_341_888}


def test_a_tpu_exchanges_what_is_encoded() -> None:
    """Compiled for a slice of a TPU, a slice of a fragment travels in two bytes each.

    The compiler for TPUs comes with libtpu, which describes a slice that is not there.
    """
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed, so that no TPU can be described here")

    told = json.loads(run("-m", "tests.jax.lowered_gemma", "tpu"))

    assert told["programs"] == PROGRAMS
    # Two of 26 layers in five slices, a quarter of them here, from one other island.
    assert 0 < told["bytes"] < 2 * told["parameters"] // 13 // 5
