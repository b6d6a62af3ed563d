"""Programs that need more devices than this process has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PATIENT = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    "--xla_cpu_collective_timeout_seconds=600",
)
"""XLA ends a program whose devices do not meet within some seconds, and on few cores
that others use as well they may not."""


def run(*words: str, devices: int = 8) -> str:
    """Run Python with as many host devices, and return what it printed."""
    forced = f"--xla_force_host_platform_device_count={devices}"
    flags = " ".join((forced, *PATIENT))
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
