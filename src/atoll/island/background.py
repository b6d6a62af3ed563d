"""The port between an island and whatever runs things behind its back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Promise(Protocol[T]):
    """A value that somebody else will bring. Kept or broken once."""

    def set_result(self, value: T, /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...

    def result(self) -> T:
        """Wait for the value, or raise the error that came instead."""
        ...

    def done(self) -> bool: ...

    def exception(self) -> BaseException | None: ...


class Hand(Protocol):
    """Does what it is given, one thing after the other."""

    def submit(self, work: Callable[..., object], /, *arguments: Any) -> object: ...

    def shutdown(self) -> None:
        """Finish what was submitted, and take no more."""
        ...


class Background(Protocol):
    """Makes hands and promises. The island's host is the only caller."""

    def hand(self, name: str) -> Hand: ...

    def promise(self) -> Promise[Any]: ...


class Threads:
    """Threads of this process."""

    def hand(self, name: str) -> Hand:
        return DaemonHand(name)

    def promise(self) -> Promise[Any]:
        return Future()


class DaemonHand:
    """A thread that does not keep its process alive. Implements `Hand`.

    A script that ends without leaving must end, though its outcome is still awaited;
    an executor of the standard library would wait for it.
    """

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[..., object], /, *arguments: Any) -> None:
        self._work.put(partial(work, *arguments))

    def shutdown(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
