"""An island as a process that reports a loss, at a coordinator or in a store.

    python -m tests.e2e.past_island URL NAME --folder FOLDER

It joins as a training loop does, and writes its inner steps to FOLDER/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from atoll.island import join_run
from atoll.testing import VectorView, vector_model


def main() -> None:
    """Train until the run ends; the loss falls by a hundredth with each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("name")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--elements", type=int, default=64)
    parser.add_argument("--step-s", type=float, default=0.005)
    given = parser.parse_args()
    model = vector_model({"h.0.w": (given.elements,), "h.1.w": (given.elements,)})
    host = join_run(given.url, VectorView(), model, island=given.name)
    while not host.has_ended:
        loss = 100.0 - host.counters.inner_steps / 100
        host.counters.note_report(7, loss, {"lr": 0.5}, count="a number")
        host.count_tokens(7)
        time.sleep(given.step_s)
        host.stepped()
    host.leave()
    report = {"inner_steps": host.counters.inner_steps}
    (given.folder / f"{given.name}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
