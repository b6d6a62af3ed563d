"""Code of a bundle, loaded from where it is staged: a package that nobody else meets.

Its modules have the bundle's digest in their names, and find each other by relative
imports. Nothing is put on `sys.path`, so that no file of a bundle takes the place of a
module of somebody else's.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from atoll.errors import UsageError


def load_factory(directory: Path, digest: str, factory: str) -> Callable[[], Any]:
    """Return what MODULE:FUNCTION names. The caller has made sure that it may run.

    Raises:
        UsageError: there is none, or its module cannot be imported.
    """
    package = _package(directory, f"atoll_bundle_{digest[:16]}")
    module, _, function = factory.partition(":")
    try:
        loaded = importlib.import_module(f"{package}.{module}")
    except ImportError as exc:
        raise UsageError(
            f"{module} of the bundle cannot be imported: {exc}. Files of a bundle "
            "import each other by a dot (from .layers import Block), and all else has "
            "to be installed here."
        ) from exc
    made = vars(loaded).get(function)
    if not callable(made):
        raise UsageError(
            f"{module} of the bundle has no function {function!r}, which its "
            "bundle.toml names. Name one that it has, and begin a run with that."
        )
    return made  # type: ignore[no-any-return]


def _package(directory: Path, name: str) -> str:
    """Have a package of that name whose modules lie in a directory."""
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(directory)]
        sys.modules[name] = package
    return name
