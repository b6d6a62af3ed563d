"""Constructing an empty model takes no memory; filling it takes the model's."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch

SCRIPT = """
import json, resource, torch, atoll.torch
from atoll.torch.construction import construct

WIDTH, LAYERS = 2048, 16                       # 64 M parameters, 256 MiB

def make():
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

construct(lambda: torch.nn.Linear(2, 2))          # whatever is loaded once
atoll.torch.build(lambda: torch.nn.Linear(2, 2), source=lambda name: torch.ones(
    (2, 2) if name == "weight" else 2))
before = peak()
construct(make)
constructed = peak() - before
atoll.torch.build(make, source=lambda name: torch.ones(
    (WIDTH, WIDTH) if "weight" in name else WIDTH))
print(json.dumps([constructed, peak() - before, 4 * LAYERS * WIDTH * (WIDTH + 1)]))
"""


def test_nothing_is_allocated_until_weights_arrive() -> None:
    """A construction is a fraction of the model, a build the model and one tensor."""
    said = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, check=True, timeout=300
    )
    constructed, built, model = json.loads(said.stdout)

    assert constructed < model / 20
    assert built < 1.25 * model
