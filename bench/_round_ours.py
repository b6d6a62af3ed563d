"""Our side of `round.py`: a coordinator or one island, in a process of its own.

    _round_ours.py coordinator FOLDER ISLANDS UP DOWN TLS
    _round_ours.py island FOLDER URL NUMBER ELEMENTS

The phases of a round are the spans of `atoll.trace`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _round_crew import Said, attend
from _round_phases import Phases

from atoll import RunSettings, trace
from atoll.coordinator.app import Coordinator, ListenOptions
from atoll.island import Host
from atoll.island.connection import connect
from atoll.island.environment import CredentialPaths
from atoll.island.numpy_model import VectorView, vector_model
from atoll.protocol import JoinRequest, ModelSpec
from atoll.runtime import SystemClock
from atoll.security import Credentials, Role, token_file

TENSORS = 50
NOISE_ELEMENTS = 2**20


def main() -> None:
    """Be what the first argument says."""
    what, folder, *rest = sys.argv[1:]
    roles: dict[str, Callable[..., None]] = {
        "coordinator": coordinate,
        "island": take_part,
    }
    roles[what](Path(folder), *rest)


def coordinate(folder: Path, islands: str, up: str, down: str, tls: str) -> None:
    """Serve one run, and tell how long the parts of its rounds take."""
    settings = {
        "run": {"name": "bench", "start_islands": int(islands), "quorum": int(islands)},
        "sync": {"sync_every": 1},
        "wire": {"up": up, "down": down},
    }
    phases = Phases()
    trace.install(phases.collect)
    coordinator = Coordinator(
        folder / "run",
        RunSettings.from_dict(settings),
        listening=ListenOptions(has_tls=tls == "tls"),
    )
    coordinator.start()
    token = token_file(folder / "run", Role.ISLAND)
    Credentials(folder / "credentials").remember(
        coordinator.url, pin=coordinator.pin, tokens={Role.ISLAND: token}
    )
    attend({"spans": lambda: {"spans": phases.take()}}, url=coordinator.url)
    coordinator.close()


def take_part(folder: Path, url: str, number: str, elements: str) -> None:
    """Join the run with vectors for a model, and make a round when told to."""
    clock, name, view = SystemClock(), f"island-{number}", VectorView()
    places = CredentialPaths(credentials=folder / "credentials", keys=folder / "keys")
    way = connect(url, island=name, paths=places, clock=clock)
    host = Host(
        way.exchange,
        view,
        JoinRequest(model=model_of(int(elements)), island=name),
        leaving=way.leaving(),
    )
    phases = Phases()
    trace.install(phases.collect)
    noise = np.random.default_rng(int(number)).standard_normal(
        NOISE_ELEMENTS, np.float32
    )

    def train() -> None:
        for local in view.local:
            for first in range(0, len(local), NOISE_ELEMENTS):
                here = local[first : first + NOISE_ELEMENTS]
                here -= np.float32(1e-3) * noise[: len(here)]

    def make_round() -> Said:
        phases.take()
        counted = host.counters.counted
        host.stepped()
        return {"spans": phases.take(), "counted": host.counters.counted - counted}

    attend({"train": train, "round": make_round})
    host.leave(depart=False)


def model_of(elements: int) -> ModelSpec:
    """Return a model of equal tensors."""
    each = elements // TENSORS
    sizes = [each] * (TENSORS - 1) + [elements - each * (TENSORS - 1)]
    return vector_model({f"blocks.{n}.w": (size,) for n, size in enumerate(sizes)})


if __name__ == "__main__":
    main()
