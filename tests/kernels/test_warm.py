"""What a coordinator's first round needs is loaded before it comes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atoll import kernels
from tests.kernels.vectors import serving

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("up", "down", "optimizer", "mode"),
    [
        ("fp32", "fp32", "nesterov", "sync"),
        ("bf16-stochastic", "bf16", "nesterov", "sync"),
        ("e3m0", "int8", "nesterov", "sync"),
        ("topk-2bit", "int8", "heavy_ball", "sync"),
        ("int8", "bf16", "adam", "sync"),
        ("bf16", "fp32", "sgd", "sync"),
        ("bf16", "bf16", "nesterov", "async"),
        ("e3m0", "int8", "nesterov", "async"),
        ("bf16", "fp32", "sgd", "async"),
    ],
)
def test_a_round_after_it_loads_nothing(
    up: str, down: str, optimizer: str, mode: str
) -> None:
    """No kernel is compiled or loaded that was not there, for types that were not."""
    said = subprocess.run(
        [sys.executable, "-m", "tests.kernels.first_round", up, down, optimizer, mode],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    before, during = map(int, said.split())

    assert before > 0
    assert during == 0


def test_plain_kernels_are_warm_already() -> None:
    """Where numpy serves it costs next to nothing, and changes nothing."""
    with serving("numpy"):
        kernels.warm(up="e3m0", down="int8", optimizer="nesterov")

        assert kernels.active().__name__.endswith("with_numpy")
