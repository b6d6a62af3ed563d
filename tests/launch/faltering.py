"""Engines that do not answer every second time they are asked, or end nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from atoll.errors import Unreachable
from atoll.launch.base import Handle, Launcher
from atoll.launch.registry import open_launcher as open_other

FALTERS = ("poll", "logs", "cancel")


class Faltering:
    """A launcher that has one: each of its methods answers, and then does not."""

    def __init__(self, inner: Launcher) -> None:
        self._inner = inner
        self._asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return partial(self._ask, name, found) if name in FALTERS else found

    def _ask(self, name: str, ask: Callable[..., Any], *given: Any, **more: Any) -> Any:
        self._asked[name] += 1
        if self._asked[name] % 2 == 0:
            raise Unreachable("It is away.")
        return ask(*given, **more)


class Deaf:
    """A launcher that has one, and to which `cancel` means nothing."""

    def __init__(self, inner: Launcher) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def cancel(self, handle: Handle, **how: Any) -> None:
        pass


def open_launcher(options: Mapping[str, str]) -> Faltering:
    return Faltering(open_other("local", options))
