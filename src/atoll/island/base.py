"""The ports of an island's host: the training framework, and background threads.

`ParameterView` is the live model of a framework. `Runtime` makes worker threads and
futures; `ThreadRuntime` makes real ones, the simulator makes virtual ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from atoll.weights import Layout
from atoll.weights.layout import F32


class ParameterView(Protocol):
    """The live weights of a model, fragment by fragment.

    The host is the only caller, from the thread that trains, between inner steps.
    """

    def lay_out(self, layout: Layout) -> None:
        """Learn which tensors make up each fragment. Called once, before the rest."""
        ...

    def read(self, fragment: int, out: F32) -> None:
        """Copy the fragment's live weights into `out`, as fp32."""
        ...

    def write(self, fragment: int, values: F32) -> None:
        """Make `values` the fragment's live weights, each cast to its own dtype.

        The optimizer's state is not touched, and tensors keep their storage.
        """
        ...


T = TypeVar("T")


class Promise(Protocol[T]):
    """A future: a value or an error that another thread sets, once."""

    def set_result(self, value: T, /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...

    def result(self) -> T:
        """Wait for the value, or raise the error that was set instead."""
        ...

    def done(self) -> bool: ...

    def exception(self) -> BaseException | None: ...


class Hand(Protocol):
    """A worker that runs the submitted calls one after the other."""

    def submit(self, work: Callable[..., object], /, *arguments: Any) -> object: ...

    def shutdown(self) -> None:
        """Run the calls submitted before, then stop. No call may be submitted after."""
        ...


class Runtime(Protocol):
    """Makes workers and futures. The island's host is the only caller."""

    def hand(self, name: str) -> Hand: ...

    def promise(self) -> Promise[Any]: ...


class ThreadRuntime:
    """Threads of this process."""

    def hand(self, name: str) -> Hand:
        return DaemonThread(name)

    def promise(self) -> Promise[Any]:
        return Future()


class DaemonThread:
    """A daemon thread that runs submitted calls. Implements `Hand`.

    A script that ends without leaving its run must exit, although this thread still
    waits for an outcome. An executor of the standard library would keep it alive.
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
