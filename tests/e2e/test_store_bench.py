"""What a round over a bucket costs keeps the limits that its bench states."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.engines import ROOT, engine

TAKES_S = 240.0
"""At most, on a machine that does ten things at once; ten seconds on a free one."""


@pytest.mark.timeout(TAKES_S + 30.0)
def test_the_bench_of_the_store_misses_no_limit() -> None:
    """Four islands over S3 move and ask what is stated, and have the naive mean."""
    engine("weed")
    words = [sys.executable, str(ROOT / "bench" / "store.py"), "--quick"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TAKES_S)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "MISSED" not in done.stdout
    assert "the mean of both" in done.stdout
    assert "bytes of the naive" in done.stdout
