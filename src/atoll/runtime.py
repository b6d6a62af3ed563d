"""The runtime port: time, waits and background work of a host.

`SystemRuntime` has the machine's time and threads; `simulate.hosts.SimRuntime` has the
virtual time and the greenlets of one process. Code that only reads the time takes a
`Clock`, which every runtime is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from atoll.errors import Unreachable

T = TypeVar("T")

MAX_CONCURRENT = 8
"""Most calls of one `gather` that run at the same time."""


class Clock(Protocol):
    """Tells the time. Hosts are the only callers."""

    def now_s(self) -> float:
        """Return seconds that only ever grow; the origin means nothing."""
        ...


class SystemClock:
    """The machine's own monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


GIVEN_UP = "The host has given up asking its run."


class Future(Protocol[T]):
    """A value or an error that another strand of execution sets, once."""

    def set_result(self, value: T, /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...

    def result(self) -> T:
        """Wait for the value, or raise the error that was set instead."""
        ...

    def done(self) -> bool: ...

    def exception(self) -> BaseException | None:
        """Return the error of a future that is done; None if it has a value."""
        ...


class Runtime(Clock, Protocol):
    """Time and background work. Islands, exchanges and retries are the callers."""

    def sleep(self, seconds: float) -> None:
        """Wait.

        Raises:
            Unreachable: the runtime is closed: the host gives up, and nothing waits.
        """
        ...

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` periodically in the background, until the runtime is closed."""
        ...

    def spawn(self, act: Callable[[], object], *, name: str) -> None:
        """Call `act` in the background; a process may end before it has returned."""
        ...

    def future(self) -> Future[Any]: ...

    def gather(self, acts: Sequence[Callable[[], T]]) -> list[T]:
        """Call all, concurrently if possible, and return their results in order.

        If some raise, the first of those errors is raised when all have ended.
        """
        ...


class SystemRuntime:
    """The machine's time and threads. Implements `Runtime`; close it after `gather`."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._closed = threading.Event()
        self._closes_at_s = float("inf")
        self._pool = futures.ThreadPoolExecutor(MAX_CONCURRENT, "atoll-gather")

    def now_s(self) -> float:
        return self._clock.now_s()

    def sleep(self, seconds: float) -> None:
        if self.now_s() + seconds >= self._closes_at_s or self._closed.wait(seconds):
            raise Unreachable(
                "The run did not answer in the remaining time. "
                "Work that it had not confirmed may be lost."
            )

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        def repeat() -> None:
            while not self._closed.wait(seconds):
                act()

        self.spawn(repeat, name="atoll-every")

    def spawn(self, act: Callable[[], object], *, name: str) -> None:
        threading.Thread(target=act, name=name, daemon=True).start()

    def future(self) -> Future[Any]:
        return futures.Future()

    def gather(self, acts: Sequence[Callable[[], T]]) -> list[T]:
        if len(acts) == 1:
            return [acts[0]()]
        try:
            results = [self._pool.submit(act) for act in acts]
        except RuntimeError as exc:  # the pool is shut down
            raise Unreachable(GIVEN_UP) from exc
        for result in results:
            # `futures.wait` never returns if `close` cancels a call.
            with suppress(futures.CancelledError):
                result.exception()
        try:
            return [result.result() for result in results]
        except futures.CancelledError as exc:
            raise Unreachable(GIVEN_UP) from exc

    def close_after(
        self, seconds: float, *, then: Callable[[], object] | None = None
    ) -> None:
        """Close this `seconds` from now; no sleep lasts longer from this call on.

        `then` is called afterwards, to end calls that receive no byte for long.
        """
        self._closes_at_s = self.now_s() + seconds

        def give_up() -> None:
            if not self._closed.wait(seconds):
                self.close()
                if then is not None:
                    then()

        self.spawn(give_up, name="atoll-farewell")

    def close(self) -> None:
        """End all sleeps and periodic calls. Safe to repeat."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)


class Worker:
    """Runs submitted calls in the background, one after the other.

    A script that ends without leaving its run must exit, although this worker still
    waits for an outcome: an executor of the standard library would keep it alive.
    """

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], object]] = deque()
        self._submitted = runtime.future()
        self._ended = runtime.future()
        self._stops = False
        runtime.spawn(self._run, name=name)

    def submit(self, call: Callable[..., object], /, *arguments: Any) -> None:
        with self._lock:
            self._calls.append(partial(call, *arguments))
            self._wake()

    def shutdown(self) -> None:
        """Run the calls submitted before, then stop. No call may be submitted after."""
        with self._lock:
            self._stops = True
            self._wake()
        self._ended.result()

    def _wake(self) -> None:
        if not self._submitted.done():
            self._submitted.set_result(None)

    def _run(self) -> None:
        try:
            while (call := self._next()) is not None:
                call()
        finally:  # an error ends the worker, and shutdown must not wait for it
            self._ended.set_result(None)

    def _next(self) -> Callable[[], object] | None:
        """Wait for the next call; None when the worker stops."""
        while not self._calls and not self._stops:
            self._submitted.result()
            with self._lock:
                if not self._calls and not self._stops:
                    self._submitted = self._runtime.future()
        return self._calls.popleft() if self._calls else None
