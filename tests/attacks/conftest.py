"""Fixtures for attacks: a coordinator process with the settings a test asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from atoll.testing.fixtures import plain_settings
from tests.coordinator.apart import Apart, serving_apart

Serve = Callable[..., Apart]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that serves a run of one fragment in a process of its own.

    Its keyword arguments are those of `plain_settings`.
    """
    with ExitStack() as stack:

        def start(**settings: Any) -> Apart:
            given = plain_settings(**settings).to_dict()
            return stack.enter_context(serving_apart(tmp_path / "run", given))

        yield start
