"""An island of torchft as a process of its own.

    python -m tests.integrations.island_process URL NUMBER TOLD [options]

When it ends it tells, as JSON, the weights it holds and what became of each outer step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from atoll.integrations.torchft import Manager
from tests.integrations.trainings import Training

SYNC_EVERY = 4


def main() -> None:
    """Be one island, as the arguments say."""
    given = arguments()
    torch.set_num_threads(1)
    training = Training(given.number, fragments=given.fragments, seed=given.seed)
    steps: list[dict[str, Any]] = []
    with (
        training.manager(given.url, init_sync=given.seed != 0) as manager,
        training.diloco(manager, every=SYNC_EVERY, fragment_sync_delay=1),
    ):
        while not is_over(given, manager, steps):
            time.sleep(given.step_s)
            training.step()
            tell(manager, steps)
            if len(steps) == given.dies_after and training.inner_steps % 2:
                os.kill(os.getpid(), signal.SIGKILL)
    agreed = training.agreed().numpy().tobytes().hex()
    given.told.write_text(json.dumps({"agreed": agreed, "steps": steps}))


def arguments() -> argparse.Namespace:
    """Return what this process was told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("number", type=int)
    parser.add_argument("told", type=Path)
    parser.add_argument("--fragments", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--steps", type=int, help="outer steps to make")
    parser.add_argument("--together", type=int, help="outer steps of two, after one's")
    parser.add_argument("--dies-after", type=int, help="outer steps; then in a window")
    return parser.parse_args()


def is_over(
    given: argparse.Namespace, manager: Manager, steps: list[dict[str, Any]]
) -> bool:
    """Return whether all was done that was asked for."""
    if given.together is None:
        return bool(manager.current_step() == given.steps)
    counts = [each["participants"] for each in steps]
    if 1 not in counts:
        return False
    return bool(counts[counts.index(1) :].count(2) == given.together)


def tell(manager: Manager, steps: list[dict[str, Any]]) -> None:
    """Note what became of an outer step, if one was made."""
    last = steps[-1]["step"] if steps else 0
    if manager.current_step() != last:
        steps.append(
            {
                "step": manager.current_step(),
                "participants": manager.num_participants(),
                "counted": manager.is_participating(),
            }
        )


if __name__ == "__main__":
    main()
