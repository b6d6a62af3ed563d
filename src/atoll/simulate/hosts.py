"""The real island and the real coordinator, as processes in virtual time.

Nothing of the protocol is written again here: islands run `island.Host` over
`exchange.CoordinatorExchange`, and the coordinator runs `coordinator.Service` on a
journal. Only time, threads, the wire and the disk are simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from atoll.coordinator import Questions, Service
from atoll.errors import DiskError, UsageError
from atoll.exchange import Call, OutcomeCall, Reply, size_of
from atoll.island.arrivals import Arrival
from atoll.settings import RunSettings
from atoll.simulate.herald import Herald, tell_arrival
from atoll.simulate.network import Reply as Answer
from atoll.simulate.process import Process
from atoll.simulate.promise import Promise
from atoll.simulate.storms import COORDINATOR
from atoll.simulate.world import World

TIMEOUT_S = 4.0
"""How long a call waits for its answer before it is repeated."""

LONGEST_NAP_S = 1.0


class Kept:
    """A promise with the names that islands use."""

    def __init__(self, promise: Promise[Any], process: Process) -> None:
        self._promise, self._process = promise, process
        self.set_exception = promise.set_error
        self.done, self.exception = promise.done, promise.exception

    def set_result(self, result: Any) -> None:
        if self._process.scheduler.trace is not None and isinstance(result, Arrival):
            tell_arrival(self._process, result)
        self._promise.set(result)

    def result(self) -> Any:
        return self._promise.result()


class Hand:
    """Does what it is given, one thing after the other, in a greenlet of its own."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._work: deque[Callable[[], object]] = deque()
        self._is_busy = False
        self._idle: list[Promise[None]] = []

    def submit(self, work: Callable[..., object], /, *arguments: Any) -> None:
        self._work.append(partial(work, *arguments))
        if not self._is_busy:
            self._is_busy = True
            self._process.spawn(self._work_off)

    def shutdown(self) -> None:
        if self._is_busy:
            idle = Promise[None](self._process.scheduler)
            self._idle.append(idle)
            idle.result()

    def _work_off(self) -> None:
        while self._work:
            self._work.popleft()()
        self._is_busy = False
        for idle in self._idle:
            idle.set(None)
        self._idle.clear()


class Greenlets:
    """The background of an island in virtual time. Implements `Background`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def hand(self, name: str) -> Hand:
        return Hand(self._process)

    def promise(self) -> Kept:
        return Kept(Promise(self._process.scheduler), self._process)


class Wire:
    """Calls over the simulated network. Implements `Line`."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process

    def call(self, call: Call) -> Reply:
        wait_s = call.wait_s if isinstance(call, OutcomeCall) else 0.0
        answer = self._world.network.call(
            self._process,
            COORDINATOR,
            call,
            size_bytes=size_of(call),
            timeout_s=TIMEOUT_S + wait_s,
        )
        return cast(Reply, answer)

    def pause(self, seconds: float) -> None:
        self._world.scheduler.sleep(seconds)

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        def again() -> None:
            while True:
                self._world.scheduler.sleep(seconds)
                act()

        self._process.spawn(again)


class CoordinatorHost:
    """Runs the coordinator's lives, one after another, on one disk."""

    def __init__(self, world: World, settings: RunSettings) -> None:
        self._world, self._settings = world, settings
        self._process = world.add(COORDINATOR)
        self._clock = world.clocks[COORDINATOR]
        self._questions: Questions | None = None
        self._herald = Herald(world.scheduler)
        self.service: Service | None = None

    def start(self) -> None:
        self._process.start(self._live)

    def _live(self) -> None:
        self.service = service = self._open()
        self._questions = questions = Questions(service)
        self._herald.opened(service, self._clock.now_s())
        self._world.network.listen(self._process, self._listen)
        while True:
            now_s = self._clock.now_s()
            nap_s = service.tick(now_s) - now_s
            questions.settle(now_s)
            self._herald.look(service.state, now_s)
            self._world.scheduler.sleep(min(max(nap_s, 0.01), LONGEST_NAP_S))

    def _open(self) -> Service:
        """Return the run on the disk, or a new one; a disk that is full is awaited."""
        while True:
            try:
                return self._open_or_create()
            except DiskError:
                self._world.scheduler.sleep(LONGEST_NAP_S)

    def _open_or_create(self) -> Service:
        disk, now_s = self._world.disks[COORDINATOR], self._clock.now_s()
        try:
            return Service.open(disk, now_s=now_s)
        except UsageError:
            return Service.create(disk, self._settings, run="run", now_s=now_s)

    def _listen(self, request: object, answer: Answer) -> None:
        assert self.service is not None
        assert self._questions is not None

        def send(reply: Reply | Exception) -> None:
            answer(reply, size_bytes=size_of(reply))

        now_s = self._clock.now_s()
        self._questions.put(cast(Call, request), send, now_s)
        self._questions.settle(now_s)
        self._herald.look(self.service.state, now_s)
