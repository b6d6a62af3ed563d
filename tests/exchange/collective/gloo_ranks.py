"""Islands as processes of one torch.distributed world, over gloo."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from atoll.coordinator.app import Coordinator
from atoll.errors import AtollError
from atoll.exchange import CollectiveRun
from atoll.island import Host
from atoll.island.connection import CollectiveConnection
from atoll.island.environment import CredentialPaths
from atoll.protocol import JoinRequest
from atoll.runtime import SystemClock
from atoll.security import Role, token_file
from atoll.testing import VectorView, vector_model

MODEL = vector_model({"h.0.w": (600_000,), "h.1.w": (90_000,)})

PATIENT_S = 120.0
"""Nothing takes so long, unless something is wrong; the machine may be busy."""

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch.distributed", __name__])
"""Loading torch takes seconds of a core: it is loaded once."""


class Rank:
    """A process that trains, and tells what it has come to."""

    def __init__(self, said: Connection, process: BaseProcess) -> None:
        self._said, self.process = said, process

    def next(self, wait_s: float = PATIENT_S) -> Any:
        """Return the next thing that it tells."""
        assert self._said.poll(wait_s), "the rank says nothing"
        return self._said.recv()

    def until(self, what: str, wait_s: float = PATIENT_S) -> Any:
        """Return the next thing of this kind that it tells."""
        until_s = time.monotonic() + wait_s
        while True:
            said = self.next(until_s - time.monotonic())
            if said[0] == what:
                return said
            assert said[0] != "raised", said

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


@dataclass(frozen=True)
class Given:
    """What a rank must know."""

    rank: int
    size: int
    url: str
    meeting: Path
    token: Path
    silence_s: float


Say = Callable[[tuple[object, ...]], None]
Live = Callable[[Given, CollectiveRun, Say], None]


def start(
    size: int,
    directory: Path,
    coordinator: Coordinator,
    *,
    silence_s: float,
    live: Live,
) -> list[Rank]:
    """Start the ranks of a new world, each of which does `live`."""
    ranks = []
    for rank in range(size):
        given = Given(
            rank=rank,
            size=size,
            url=coordinator.url,
            meeting=directory / "meeting",
            token=token_file(coordinator.directory, Role.ISLAND),
            silence_s=silence_s,
        )
        here, there = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=_be, args=(given, there, live), daemon=True)
        process.start()
        ranks.append(Rank(here, process))
    return ranks


def _be(given: Given, said: Connection, live: Live) -> None:
    import torch.distributed as dist

    where = f"file://{given.meeting}"
    dist.init_process_group(
        "gloo", init_method=where, rank=given.rank, world_size=given.size
    )
    run = CollectiveRun(given.url, silence_s=given.silence_s)
    try:
        live(given, run, said.send)
    except AtollError as exc:
        said.send(("raised", time.monotonic(), type(exc).__name__, str(exc)))
    said.send(("done", given.rank))
    os._exit(0)  # a world with a dead rank cannot be taken down in order


def host_of(given: Given, run: CollectiveRun, view: VectorView) -> Host:
    """Join as a rank's island."""
    clock, name = SystemClock(), f"i{given.rank}"
    around = CredentialPaths(
        credentials=given.meeting.parent / "credentials",
        keys=given.meeting.parent / "keys",
        token_file=given.token,
        heartbeat_s=0.5,
    )
    way = CollectiveConnection(run, island=name, paths=around, clock=clock)
    request = JoinRequest(model=MODEL, island=name)
    return Host(way.exchange, view, request, leaving=way.leaving())


def train_to_the_end(given: Given, run: CollectiveRun, say: Say) -> None:
    """Train until the run ends, and tell the digests."""
    view, rng = VectorView(fill=0.5), np.random.default_rng(given.rank)
    host = host_of(given, run, view)
    while not host.has_ended:
        for local in view.local:
            local -= rng.standard_normal(local.size, np.float32) * np.float32(1e-3)
        host.counters.tokens += 10 + given.rank
        before = host.round
        host.stepped()
        if host.round > before:
            say(("round", host.round))
    host.leave()
    digests = tuple(slot.read_digest() for slot in host.slots)
    say(("digests", digests, run.costs()))
