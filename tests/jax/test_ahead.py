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


def test_on_a_tpu_the_exchange_is_hidden_behind_the_inner_step() -> None:
    """Compiled for a slice, computations lie between an exchange's start and its end.

    The compiler for TPUs comes with libtpu, which describes a slice that is not there.
    """
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed, so that no TPU can be described here")

    told = json.loads(run("-m", "tests.jax.lowered_gemma", "tpu"))

    assert told["programs"] == PROGRAMS
    assert told["bytes"] > 0
    assert max(told["between start and done"]) > 0
