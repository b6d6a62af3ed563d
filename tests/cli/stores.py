"""Runs in a store, and islands in threads that meet there, for tests of commands."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import atoll
from atoll import RunSettings
from atoll.island import join_run
from atoll.island.host import Host
from atoll.testing import VectorView, vector_model

SHAPES = {"h.0.w": (20, 35), "h.1.w": (500,), "head": (33,)}
MODEL = vector_model(SHAPES)


def settings(**run: Any) -> RunSettings:
    """Return two fragments and two islands."""
    return RunSettings.from_dict(
        {
            "run": {"name": "lagoon", "start_islands": 2, **run},
            "sync": {"sync_every": 4, "num_fragments": 2, "overlap_steps": 1},
            "outer": {"momentum": 0.5},
        }
    )


def made(place: Path, **run: Any) -> str:
    """Make a run in a directory, and return its URL."""
    atoll.init(str(place), settings(**run))
    return str(place)


class Trained:
    """Islands that train in threads of this process until the run ends."""

    def __init__(self, url: str, names: tuple[str, ...] = ("a", "b")) -> None:
        self.hosts: dict[str, Host] = {}
        self.anchors: dict[str, list[np.ndarray]] = {}
        self._url = url
        self._threads = [
            threading.Thread(target=self._train, args=(name,)) for name in names
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> Mapping[str, list[np.ndarray]]:
        """Return the anchors that each ended with, by fragment."""
        for thread in self._threads:
            thread.join(timeout=120)
        assert self.anchors.keys() == self.hosts.keys()
        return self.anchors

    def _train(self, name: str) -> None:
        view = VectorView()
        host = join_run(self._url, view, MODEL, island=name)
        self.hosts[name] = host
        noise = np.random.default_rng(host.joined.slot)
        while not host.has_ended:
            for local in view.local:
                local -= noise.normal(size=len(local)).astype(np.float32)
            host.stepped()
        host.leave()
        self.anchors[name] = [slot.state.anchor.copy() for slot in host.slots]
