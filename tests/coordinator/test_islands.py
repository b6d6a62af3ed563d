"""Real islands at a coordinator: the same bits as a run in memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from atoll import RunSettings
from atoll.coordinator import Service
from atoll.exchange import Exchange, MemoryRun
from atoll.island import Host
from atoll.protocol import JoinRequest
from atoll.simulate import SimDisk
from atoll.testing import VectorView, vector_model
from tests.coordinator.direct import Desk, DirectExchange

MODEL = vector_model({"h.0.w": (700,), "h.1.w": (500,), "head": (33,)})
SETTINGS = RunSettings.from_dict(
    {
        "run": {"start_islands": 2, "end_rounds": 6},
        "sync": {"sync_every": 4, "num_fragments": 2, "overlap_steps": 1},
        "wire": {"up": "e3m0", "down": "int8"},
    }
)


def train(exchange: Exchange, name: str) -> str:
    """Train one island until the run ends, and return its digest."""
    view = VectorView()
    request = JoinRequest(model=MODEL, island=name)
    host = Host(exchange, view, request)
    rng = np.random.default_rng(len(name))
    while not host.has_ended:
        for local in view.local:
            local -= rng.normal(size=len(local)).astype(np.float32)
        host.stepped()
    host.leave()
    return host.digest


def digests(exchange_of: Callable[[str], Exchange]) -> set[str]:
    names = ["a", "bb"]
    with ThreadPoolExecutor(2) as threads:
        return set(threads.map(lambda name: train(exchange_of(name), name), names))


def test_a_coordinator_gives_the_bits_of_a_run_in_memory() -> None:
    """For the same rosters the exchange makes no difference, and a restart none."""
    run = MemoryRun(SETTINGS)
    in_memory = digests(lambda name: run)
    disk = SimDisk()
    service = Service.create(disk, SETTINGS, run=run.id, now_s=0.0)
    desk = Desk(service, lambda: 0.0)
    (agreed,) = digests(lambda name: DirectExchange(desk, name.encode()).expect(2))

    assert in_memory == {agreed}
    disk.crash()
    reopened = Service.open(disk, now_s=1.0)
    assert [state.digest for state in reopened.weights] == [
        state.digest for state in service.weights
    ]
