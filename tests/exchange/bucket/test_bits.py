"""For the same rosters a bucket, a coordinator and memory give the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import count

import numpy as np
import pytest

from atoll.coordinator import Service
from atoll.exchange import Exchange, MemoryRun
from atoll.exchange.bucket import BucketReader, StoreExchange
from atoll.exchange.bucket.create import make_run
from atoll.island import Host
from atoll.protocol import JoinRequest
from atoll.runtime import SystemClock, SystemRuntime
from atoll.settings import RunSettings
from atoll.simulate import SimDisk
from atoll.store import MemoryStore
from atoll.testing import VectorView, vector_model
from tests.coordinator.direct import Desk, DirectExchange

MODEL = vector_model({"h.0.w": (600_000,), "h.1.w": (90_000,)})
ROUNDS = 3

Attach = Callable[[str], Exchange]


def settings(islands: int, up: str, down: str) -> RunSettings:
    """Return two fragments of three pieces and one; four islands make shards."""
    return RunSettings.from_dict(
        {
            "run": {"start_islands": islands, "end_rounds": ROUNDS, "quorum": islands},
            "sync": {"sync_every": 4, "num_fragments": 2, "overlap_steps": 1},
            "wire": {"up": up, "down": down},
            "outer": {"weight": "tokens"},
        }
    )


def in_memory(given: RunSettings) -> Attach:
    """Return what attaches islands to a run in memory."""
    run = MemoryRun(given)
    return lambda name: run


def in_bucket(runtimes: list[SystemRuntime], given: RunSettings) -> Attach:
    """Return what attaches islands to a run in a store; their runtimes are to close."""
    store, nonces = MemoryStore(), count()
    make_run(store, given, url="memory")

    def attach(name: str) -> Exchange:
        runtime = SystemRuntime(SystemClock())
        runtimes.append(runtime)
        reader = BucketReader.open(store, runtime, url="memory")
        nonce = next(nonces).to_bytes(16, "little")
        return StoreExchange(reader, key=name.encode(), nonce=nonce)

    return attach


def at_coordinator(given: RunSettings) -> Attach:
    """Return what attaches islands to a coordinator in this process."""
    clock = SystemClock()
    now_s = clock.now_s()
    service = Service.create(SimDisk(), given, run="run", now_s=now_s)
    desk = Desk(service, clock.now_s)
    return lambda name: DirectExchange(desk, name.encode()).expect(2)


def train(attach: Attach, islands: int) -> list[tuple[bytes, ...]]:
    """Train every island in a thread; return the digests that each ends with."""
    found: dict[str, tuple[bytes, ...]] = {}

    def live(name: str, seed: int) -> None:
        view, rng = VectorView(fill=0.5), np.random.default_rng(seed)
        request = JoinRequest(model=MODEL, island=name)
        host = Host(attach(name), view, request)
        while not host.has_ended:
            for local in view.local:
                local -= rng.standard_normal(local.size, np.float32) * np.float32(1e-3)
            host.counters.tokens += 10 + seed
            host.stepped()
        host.leave()
        found[name] = tuple(slot.read_digest() for slot in host.slots)

    threads = [
        threading.Thread(target=live, args=(f"i{seed}", seed), daemon=True)
        for seed in range(islands)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [found[name] for name in sorted(found)]


@pytest.mark.parametrize(
    ("up", "down"), [("fp32", "fp32"), ("e3m0", "int8"), ("e3m0", "gather")]
)
@pytest.mark.parametrize("islands", [2, 4])
def test_whichever_way_updates_take_the_anchor_is_the_same(
    islands: int, up: str, down: str
) -> None:
    """Read whole by two islands, in shards by four: bit for bit the coordinator's."""
    given = settings(islands, up, down)
    runtimes: list[SystemRuntime] = []
    try:
        memory, bucket, coordinator = (
            train(open_run(given), islands)
            for open_run in (in_memory, partial(in_bucket, runtimes), at_coordinator)
        )
    finally:
        for runtime in runtimes:
            runtime.close()

    assert len(set(bucket)) == 1
    assert len(bucket) == islands
    assert set(memory) == set(bucket) == set(coordinator)


@pytest.mark.parametrize("up", ["fp32", "e3m0"])
def test_gathered_outcomes_give_the_anchors_of_means_in_fp32(up: str) -> None:
    """Three updates in e3m0 are gathered, and three in fp32 larger than their mean."""
    means, gathered = (
        train(in_memory(settings(3, up, down)), 3) for down in ("fp32", "gather")
    )

    assert len(set(means)) == 1
    assert means == gathered
