"""An island as a process of its own: vectors, and steps that are drawn by a seed.

    python -m tests.e2e.island_process URL NAME --folder FOLDER

It keeps every update before it is sent, so that a test can do all rounds again, and
writes what it did to FOLDER/NAME.json when it has left the run.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import numpy as np

from atoll import kernels
from atoll.errors import Unreachable
from atoll.exchange import Exchange, Frame, Outcome
from atoll.island import Host
from atoll.island.connection import CoordinatorConnection, connect
from atoll.island.environment import credentials_from_environment
from atoll.island.signals import Interrupted, Termination
from atoll.protocol import Heartbeat, JoinReply, JoinRequest, Position, Reception, Stats
from atoll.runtime import Clock, SystemClock
from atoll.testing import VectorView, vector_model
from atoll.wire import FrameKind, pack, update_digest

STEP = 1e-3
"""What an inner step takes from a weight, at most."""


class Kept:
    """An exchange that keeps a copy of what is published. Implements `Exchange`."""

    def __init__(self, inner: Exchange, folder: Path) -> None:
        self._inner, self._folder = inner, folder
        folder.mkdir(exist_ok=True)

    def join(self, request: JoinRequest) -> JoinReply:
        return self._inner.join(request)

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
        return self._inner.heartbeat(beat, at_once=at_once)

    def publish(self, frame: Frame) -> Reception:
        header = frame.header
        if header.kind is not FrameKind.STATE and header.kind is not FrameKind.AGREED:
            self._keep(update_digest(header).hex(), frame)
        elif header.round == 0:
            self._keep(f"founded-{header.fragment}", frame)
        return self._inner.publish(frame)

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        return self._inner.outcome(fragment, round, wait_s=wait_s, has_body=has_body)

    def state(self, fragment: int) -> Frame:
        return self._inner.state(fragment)

    def leave(self, island: str, incarnation: int) -> None:
        self._inner.leave(island, incarnation)

    def _keep(self, name: str, frame: Frame) -> None:
        path = self._folder / f"{name}.atoll"
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}.part")  # founders may be two
            part.write_bytes(pack(frame.header) + frame.body.tobytes())
            part.rename(path)


class Trains(Protocol):
    """What makes inner steps, and knows how far they went in each fragment."""

    work: list[float]

    def step(self) -> None: ...


class Training:
    """Steps that only go down, so that one lost or made twice shows in a sum."""

    def __init__(self, view: VectorView, seed: int) -> None:
        self._view = view
        self._numbers = np.random.default_rng(seed)
        self.work = [0.0 for _ in view.local]

    def step(self) -> None:
        for fragment, local in enumerate(self._view.local):
            before = local.sum(dtype=np.float64)
            local -= STEP * self._numbers.random(local.size, np.float32)
            self.work[fragment] += before - local.sum(dtype=np.float64)


def train(host: Host, training: Trains, said: argparse.Namespace) -> str:
    """Train to the end of the run, or of this island; say which it was."""
    with Termination() as termination:
        try:
            while not host.has_ended and host.counters.inner_steps < said.steps:
                training.step()
                time.sleep(said.step_s)  # what computing takes
                host.stepped()
                if termination.is_asked:
                    break
        except Interrupted:
            pass
        termination.heed()
        host.leave()
    if host.has_ended:
        return "ended"
    return "terminated" if termination.is_asked else "left"


def report(
    host: Host, view: VectorView, training: Trains, why: str
) -> dict[str, object]:
    """Return what a test is told of this life."""
    rest = [
        float(slot.state.anchor.sum(dtype=np.float64) - local.sum(dtype=np.float64))
        for slot, local in zip(host.slots, view.local, strict=True)
    ]
    return {
        "why": why,
        "incarnation": host.joined.incarnation,
        "digests": [slot.read_digest().hex() for slot in host.slots],
        "rounds": [slot.state.round for slot in host.slots],
        "work": training.work,
        "rest": rest,
        "before": [host.joined.inner_steps, host.joined.tokens],
        **{
            name.removeprefix("atoll/"): n
            for name, n in host.counters.metrics().items()
        },
    }


def reach_again(url: str, name: str, clock: Clock) -> CoordinatorConnection:
    """Return the way to the coordinator, once it is up: as a launcher would try."""
    surroundings = credentials_from_environment()
    while True:
        try:
            return connect(url, island=name, paths=surroundings, clock=clock)
        except Unreachable:
            time.sleep(0.1)


class Told(Exchange, Protocol):
    """An exchange that says of its island what people are told."""

    stats: Callable[[], Stats] | None


class Line(Protocol):
    """A way to a run: an exchange, and what bounds its farewell."""

    @property
    def exchange(self) -> Told: ...

    def leaving(self) -> AbstractContextManager[None]: ...


def arguments() -> argparse.ArgumentParser:
    """Return what every kind of island is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("name")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--elements", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.005)
    parser.add_argument("--steps", type=int, default=1_000_000)
    return parser


def live(way: Line, said: argparse.Namespace) -> None:
    """Take part in a run, and write what was done when it has been left."""
    view = VectorView(fill=1.0)
    model = vector_model({f"blocks.{n}.weight": (said.elements,) for n in range(2)})
    host = Host(
        Kept(way.exchange, said.folder / "updates"),
        view,
        JoinRequest(model=model, island=said.name),
        leaving=way.leaving(),
    )
    way.exchange.stats = host.stats
    training = Training(view, said.seed)
    why = train(host, training, said)
    written = said.folder / f"{said.name}.part"
    written.write_text(json.dumps(report(host, view, training, why)))
    written.rename(said.folder / f"{said.name}.json")


def main() -> None:
    said = arguments().parse_args()
    kernels.use("numpy")  # starts at once
    live(reach_again(said.url, said.name, SystemClock()), said)


if __name__ == "__main__":
    main()
