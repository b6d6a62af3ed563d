"""The examples in docstrings."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["plan", "report", "scheduler", "storms", "story"])
def test_docstring_examples_run(name: str) -> None:
    """Every example of the package is there, and gives what it says."""
    module = importlib.import_module(f"atoll.simulate.{name}")
    result = doctest.testmod(module)

    assert result.attempted > 0
    assert result.failed == 0
