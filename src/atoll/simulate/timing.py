"""Time and greenlets for who meets others in a bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from atoll.simulate.process import Process
from atoll.simulate.promise import Promise
from atoll.simulate.world import World

T = TypeVar("T")


class GreenletTiming:
    """The clock and the greenlets of one process. Implements `Timing`.

    Pauses take true time, whatever the clock of the process says meanwhile.
    """

    def __init__(self, world: World, process: Process) -> None:
        self._scheduler, self._process = world.scheduler, process
        self.now_s = world.clocks[process.name].now_s
        self.pause = world.scheduler.sleep
        self.is_over = False
        """The island has left: nothing is done in the background any more."""

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        def again() -> None:
            self.pause(seconds)
            while not self.is_over:
                act()
                self.pause(seconds)

        self._process.spawn(again)

    def together(self, acts: Sequence[Callable[[], T]]) -> list[T]:
        if len(acts) == 1:
            return [acts[0]()]
        promises = [Promise[T](self._scheduler) for _ in acts]
        for act, promise in zip(acts, promises, strict=True):
            self._process.spawn(partial(_keep, act, promise))
        errors: list[Exception] = []
        for promise in promises:
            try:
                promise.result()
            except Exception as exc:  # all are to end before the first is told
                errors.append(exc)
        if errors:
            raise errors[0]
        return [promise.result() for promise in promises]


def _keep(act: Callable[[], T], promise: Promise[T]) -> None:
    try:
        promise.set(act())
    except Exception as exc:  # whoever waits for it is told
        promise.set_error(exc)
