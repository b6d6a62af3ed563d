"""Collectives of threads at a coordinator in the same process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count

import numpy as np

from atoll.coordinator import Service
from atoll.exchange import CollectiveRun, CoordinatorExchange, Exchange
from atoll.exchange.calls import AgreedCall, Call, Reply
from atoll.exchange.collective import CollectiveExchange, MemoryWorld
from atoll.exchange.collective.channel import SILENCE_S
from atoll.island import Host
from atoll.protocol import JoinRequest, ModelSpec
from atoll.protocol.events import Event
from atoll.runtime import SystemClock, SystemRuntime
from atoll.settings import RunSettings
from atoll.simulate import SimDisk
from atoll.testing import VectorView

URL = "http://coordinator.invalid"


class Bureau:
    """A coordinator that threads call, and that may die and come back."""

    def __init__(self, settings: RunSettings, *, run: str = "run") -> None:
        self._clock, self._lock = SystemClock(), threading.Lock()
        self.disk, self._nonces = SimDisk(), count()
        self.service = Service.create(
            self.disk, settings, run=run, now_s=self._clock.now_s()
        )
        self.calls: list[Call] = []
        self.before: Callable[[Call], None] = lambda call: None
        """Called before each call is handled; what it raises is what was met."""

    def call(self, call: Call) -> Reply:
        with self._lock:
            self.before(call)
            self.calls.append(call)
            return self.service.handle(call, self._clock.now_s())

    def now_s(self) -> float:
        """Return the coordinator's time."""
        return self._clock.now_s()

    def change(self, event: Event) -> None:
        """Carry out what an operator asks for."""
        with self._lock:
            self.service.change(event, self.now_s())

    def restart(self) -> None:
        """Lose what is not durable, as a coordinator does that was killed."""
        self.disk.crash(is_power_cut=True)
        self.service = Service.open(self.disk, now_s=self._clock.now_s())

    def exchange(self, key: bytes) -> CoordinatorExchange:
        """Return the ordinary way of one life of an island."""
        nonce = next(self._nonces).to_bytes(8, "little")
        return CoordinatorExchange(Line(self), key=key, nonce=nonce, heartbeat_s=0.2)

    def agreed(self) -> int:
        """Return how many outcomes were brought by a collective."""
        return sum(
            isinstance(call, AgreedCall) and call.agreed is not None
            for call in self.calls
        )


class Hasty(SystemRuntime):
    """Waits briefly between attempts, in tests whose coordinators come back at once."""

    def sleep(self, seconds: float) -> None:
        super().sleep(min(seconds, 0.05))

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        def act_safely() -> None:
            # A line that a test leaves open meets whatever a later one has planted.
            with suppress(Exception):
                act()

        super().every(seconds, act_safely)


class Line:
    """A line to a bureau. Implements `CoordinatorTransport`."""

    def __init__(self, bureau: Bureau) -> None:
        self._bureau, self.runtime = bureau, Hasty()

    def call(self, call: Call) -> Reply:
        return self._bureau.call(call)


def runs_of(size: int, *, silence_s: float = SILENCE_S) -> list[CollectiveRun]:
    """Return the runs of all ranks of a new collective."""
    worlds = MemoryWorld.of(size)
    return [CollectiveRun(URL, world, silence_s=silence_s) for world in worlds]


def collective(
    bureau: Bureau, size: int, *, silence_s: float = SILENCE_S
) -> dict[str, CollectiveExchange]:
    """Return the exchanges of all ranks of a new collective, by name."""
    runs = runs_of(size, silence_s=silence_s)
    return attached(bureau, runs)


def attached(
    bureau: Bureau, runs: list[CollectiveRun]
) -> dict[str, CollectiveExchange]:
    """Return the exchanges of ranks that go to one coordinator, by name."""
    names = [f"i{rank}" for rank in range(len(runs))]
    return {
        name: run.attach(bureau.exchange(name.encode()))
        for name, run in zip(names, runs, strict=True)
    }


def train(
    exchanges: Mapping[str, Exchange],
    model: ModelSpec,
    *,
    wait_s: float = 60.0,
    on_step: Callable[[str, Host], None] = lambda name, host: None,
    after: Mapping[str, threading.Event] | None = None,
) -> dict[str, tuple[bytes, ...]]:
    """Train every island in a thread until the run ends; return the digests of each."""
    found: dict[str, tuple[bytes, ...]] = {}

    def live(name: str, seed: int) -> None:
        if after and name in after:
            after[name].wait(wait_s)
        view, rng = VectorView(fill=0.5), np.random.default_rng(seed)
        request = JoinRequest(model=model, island=name)
        host = Host(exchanges[name], view, request)
        while not (host.has_ended or host.has_left):
            for local in view.local:
                local -= rng.standard_normal(local.size, np.float32) * np.float32(1e-3)
            host.counters.tokens += 10 + seed
            host.stepped()
            on_step(name, host)
        host.leave()
        found[name] = tuple(slot.read_digest() for slot in host.slots)

    threads = [
        threading.Thread(target=live, args=(name, seed), daemon=True)
        for seed, name in enumerate(sorted(exchanges))
    ]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + wait_s
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    return found
