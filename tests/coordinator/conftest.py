"""A run with an open round, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.testing.fixtures import plain_settings
from tests.coordinator.scene import Scene, opened


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with opened(tmp_path / "run", plain_settings(start_islands=2), idle_s=0.3) as made:
        yield made
