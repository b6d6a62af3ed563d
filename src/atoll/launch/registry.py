"""The engines there are: the modules of `atoll.launch.engines`, by their names.

An engine's extra is called as its module, with hyphens: `hf_jobs` needs what
`pip install "atoll[hf-jobs]"` installs. Only its own module imports its SDK.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Protocol, cast

from atoll.errors import UsageError
from atoll.launch import engines
from atoll.launch.base import Launcher
from atoll.launch.understanding import Understanding
from atoll.settings.rules import nearest


class Engine(Protocol):
    """What a module of `atoll.launch.engines` has."""

    def open_launcher(self, options: Mapping[str, str]) -> Launcher:
        """Return a launcher, for which everything that it needs is there.

        Raises:
            UsageError: an option is wrong, or a program or a credential is missing.
        """
        ...


def engine_names() -> list[str]:
    """Return what `--on` takes, in alphabetical order."""
    found = (each.name for each in pkgutil.iter_modules(engines.__path__))
    return sorted(name for name in found if not name.startswith("_"))


def open_launcher(engine: str, options: Mapping[str, str] | None = None) -> Launcher:
    """Return the launcher of an engine; what that does not understand is told.

    Raises:
        UsageError: there is no such engine, its SDK is not installed, an option is
            wrong, or what it needs of this machine is missing.
    """
    names = engine_names()
    name = engine.replace("-", "_")
    if name not in names:
        raise UsageError(
            f"There is no engine {engine[:80]!r}. Did you mean "
            f"{nearest(name, names)!r}? There are {', '.join(names)}."
        )
    return Understanding(name, _module(name).open_launcher(options or {}))


def _module(name: str) -> Engine:
    try:
        return cast(Engine, importlib.import_module(f"{engines.__name__}.{name}"))
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.startswith("atoll."):
            raise  # a file of ours is missing, and no extra would bring it
        raise UsageError(
            f"The engine {name} needs {exc.name}, which is not installed. Try: "
            f'pip install "atoll[{name.replace("_", "-")}]"'
        ) from exc
