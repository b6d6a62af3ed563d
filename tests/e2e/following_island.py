"""An island that goes where its run goes, as a process of its own.

python -m tests.e2e.following_island URL NAME --folder FOLDER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from atoll import kernels
from atoll.clock import SystemClock
from atoll.island import Host
from atoll.island.environment import surroundings_from_environment
from atoll.island.trail import Trail
from atoll.protocol import JoinRequest
from atoll.testing import Vectors, vector_model
from tests.e2e.island_process import Kept, Training, report, train


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("name")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--elements", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.005)
    parser.add_argument("--steps", type=int, default=1_000_000)
    said = parser.parse_args()
    kernels.use("numpy")  # starts at once
    clock, around = SystemClock(), surroundings_from_environment()
    way = Trail(said.url, island=said.name, surroundings=around, clock=clock)
    view = Vectors(fill=1.0)
    model = vector_model({f"blocks.{n}.weight": (said.elements,) for n in range(2)})
    host = Host(
        Kept(way.exchange, said.folder / "updates"),
        view,
        JoinRequest(model=model, island=said.name),
        clock=clock,
        leaving=way.leaving(),
    )
    way.exchange.stats = host.stats
    training = Training(view, said.seed)
    why = train(host, training, said)
    written = said.folder / f"{said.name}.part"
    written.write_text(json.dumps(report(host, view, training, why)))
    written.rename(said.folder / f"{said.name}.json")


if __name__ == "__main__":
    main()
