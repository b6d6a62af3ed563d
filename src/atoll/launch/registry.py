"""The engines: the modules of `atoll.launch.engines`, by their names.

An engine's extra is called as its module, with hyphens: `hf_jobs` needs what
`pip install "atoll[hf-jobs]"` installs. Only its own module imports its SDK.

Every engine reads responses that another program has written: a number that is a word,
a field that is missing. The launchers that are opened here turn the exceptions that
follow from that into `Unreachable`, so that an engine reads plainly and need not expect
everything.
"""

from __future__ import annotations

import pkgutil
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from atoll.errors import Unreachable, UsageError
from atoll.fields import nearest
from atoll.launch import base

ENGINES = "atoll.launch.engines"
"""Loaded by name: an engine imports this package, not the reverse."""


class Engine(Protocol):
    """The interface of a module of `atoll.launch.engines`."""

    def open_launcher(self, options: Mapping[str, str]) -> base.Launcher:
        """Return a launcher, without contacting its engine.

        Raises:
            UsageError: an option is wrong.
        """
        ...


def engine_names() -> list[str]:
    """Return the values of `--on`, in alphabetical order."""
    names = (
        module.name for module in pkgutil.iter_modules(import_module(ENGINES).__path__)
    )
    return sorted(name for name in names if not name.startswith("_"))


def open_launcher(
    engine: str, options: Mapping[str, str] | None = None
) -> base.Launcher:
    """Return the launcher of an engine, wrapped by a `CheckedLauncher`.

    Raises:
        UsageError: there is no such engine, its SDK is not installed, or an option is
            wrong.
    """
    names = engine_names()
    name = engine.replace("-", "_")
    if name not in names:
        raise UsageError(
            f"There is no engine {engine[:80]!r}. Did you mean "
            f"{nearest(name, names)!r}? There are {', '.join(names)}."
        )
    return CheckedLauncher(name, _module(name).open_launcher(options or {}))


def _module(name: str) -> Engine:
    try:
        return cast(Engine, import_module(f"{ENGINES}.{name}"))
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.startswith("atoll."):
            raise  # a file of ours is missing, and no extra would bring it
        raise UsageError(
            f"The engine {name} needs {exc.name}, which is not installed. Try: "
            f'pip install "atoll[{name.replace("_", "-")}]"'
        ) from exc


PARSE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
MAX_DETAIL = 300


class CheckedLauncher:
    """Wraps a launcher, and reports responses that it could not parse."""

    def __init__(self, engine: str, inner: base.Launcher) -> None:
        self._engine, self._inner = engine, inner

    @property
    def traits(self) -> base.Traits:
        return self._inner.traits

    def plan(self, order: base.LaunchOrder) -> base.LaunchPlan:
        return self._inner.plan(order)

    def launch(self, order: base.LaunchOrder, *, keep: base.Keep) -> base.Handle:
        with self._parsing("launch"):
            return self._inner.launch(order, keep=keep)

    def poll(self, handle: base.Handle) -> tuple[base.Report, ...]:
        with self._parsing("poll"):
            return self._inner.poll(handle)

    def logs(self, handle: base.Handle, index: int, *, after: int = 0) -> list[str]:
        with self._parsing("logs"):
            return self._inner.logs(handle, index, after=after)

    def cancel(
        self,
        handle: base.Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = base.GRACE_S,
    ) -> None:
        with self._parsing("cancel"):
            self._inner.cancel(handle, indexes=indexes, grace_s=grace_s)

    @contextmanager
    def _parsing(self, method: str) -> Iterator[None]:
        """Translate exceptions of a malformed response into `Unreachable`.

        A retry may help: the response may have been truncated, or sent by a proxy.
        """
        try:
            yield
        except PARSE_ERRORS as exc:
            frame = traceback.extract_tb(exc.__traceback__)[-1]
            location = f"{Path(frame.filename).name}, line {frame.lineno}"
            raise Unreachable(
                f"The response of {self._engine} to {method!r} cannot be parsed: "
                f"{type(exc).__name__}: {str(exc)[:MAX_DETAIL]} ({location}). Is its "
                "version one that Atoll supports?"
            ) from exc
