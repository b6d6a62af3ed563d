"""The example of the documents, on one device and on four."""

from __future__ import annotations

import pytest

from tests.jax.processes import ROOT, run

pytestmark = [pytest.mark.jax, pytest.mark.timeout(900)]


def test_the_example_trains_alike_on_one_device_and_on_four() -> None:
    """Losses of the first round agree within 1e-5, of the last within 1e-3."""
    assert len((ROOT / "examples" / "jax_minimal.py").read_text().splitlines()) < 80

    alone, spread, apart = run("examples/jax_minimal.py", devices=4).splitlines()

    first, last = map(float, apart.split()[1:])
    assert first < 1e-5
    assert last < 1e-3
    for line in (alone, spread):
        before, after = map(float, line.split()[-2:])
        assert after < before / 2
