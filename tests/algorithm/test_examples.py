"""The examples in docstrings."""

from __future__ import annotations

import doctest
import importlib

import pytest

import atoll.algorithm


@pytest.mark.parametrize("name", atoll.algorithm.__all__)
def test_docstring_examples_run(name: str) -> None:
    """Every example of the package gives what it says."""
    module = importlib.import_module(f"atoll.algorithm.{name}")

    assert doctest.testmod(module).failed == 0
