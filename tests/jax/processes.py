"""Programs that need more devices than this process has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*words: str, devices: int = 8) -> str:
    """Run Python with as many host devices, and return what it printed."""
    flags = f"--xla_force_host_platform_device_count={devices}"
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
