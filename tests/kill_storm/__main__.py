"""Runs one storm, and says whether everything counted exactly once.

    python -m tests.kill_storm --kills 500 --seed 7
    python -m tests.kill_storm --kills 200 --store file
    python -m tests.kill_storm --kills 200 --store s3
    python -m tests.kill_storm --kills 20 --mode async --victims server

Exit status 1 is a violation; the folder with everything that was written stays there.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.exchange.bucket.view import LEASE_S as STORE_LEASE_S
from atoll.protocol.membership import LEASE_S
from tests.e2e.stage import Settings
from tests.kill_storm.accounts import Books, closed_books
from tests.kill_storm.scene import (
    CoordinatorServer,
    Plan,
    Scene,
    at_coordinator,
    in_seaweed,
    in_store,
)
from tests.kill_storm.storm import Storm, Violation

NAMES = ("a", "b", "c", "d")
UNIT = math.lcm(*range(1, len(NAMES) + 1))
"""Every mean of at most so many updates of whole units is a whole number."""

SETTINGS: Settings = {
    "run": {"name": "storm", "start_islands": len(NAMES)},
    "sync": {"sync_every": 10, "num_fragments": 2, "overlap_steps": 2},
    "wire": {"up": "fp32", "down": "fp32"},
    "outer": {"optimizer": "sgd", "lr": 1.0},
    # Updates hold as many steps as an island had time for, and deadlines are short:
    # a process that is stopped is late within seconds.
    "limits": {"max_update_norm": 1e6, "deadline_min_s": 0.3, "deadline_max_s": 1.0},
}

ASYNC: Settings = {
    **SETTINGS,
    "sync": {**SETTINGS["sync"], "mode": "async"},
    # With one update per buffer every roster moves the anchor by its plain mean.
    "async": {"buffer": 1, "grace_s": 0.05},
}

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One storm: what is run, and what happens to it."""

    kills: int
    seed: int
    store: str | None = None
    mode: str = "sync"
    victims: str = ""

    @property
    def command(self) -> str:
        """The command that repeats it."""
        words = [f"python -m tests.kill_storm --kills {self.kills} --seed {self.seed}"]
        words += [f"--store {self.store}"] if self.store else []
        words += [f"--mode {self.mode}"] if self.mode != "sync" else []
        words += [f"--victims {self.victims}"] if self.victims else []
        return " ".join(words)


def storm(folder: Path, trial: Trial, *, tell: Tell) -> list[str]:
    """Run one storm in a folder, and return every difference that was found."""
    rng, kills, store = random.Random(trial.seed), trial.kills, trial.store
    plan = Plan(
        folder=folder,
        settings=ASYNC if trial.mode == "async" else SETTINGS,
        # Some strikes start two processes, and islands that left come back.
        elements=64 + 4 * kills,
        unit=UNIT,
        paces_s={name: rng.uniform(0.005, 0.02) for name in NAMES},
    )
    tell(f"{trial.command}  in {folder}")
    begun_s = time.monotonic()
    scene = _scene(plan, store)
    lease_s = LEASE_S if store is None else STORE_LEASE_S
    blowing = Storm(
        scene, rng, kills=kills, lease_s=lease_s, tell=tell, victims=trial.victims
    )
    try:
        blowing.blow()
        took_s = time.monotonic() - begun_s
        if isinstance(scene.server, CoordinatorServer):
            scene.server.end()
        books = closed_books(scene)
    except Violation as exc:
        return [str(exc)]
    finally:
        scene.close()
        for kind, number in sorted(blowing.kinds.items()):
            tell(f"  {number:4} {kind}")
    _summarise(scene, books, blowing.strikes, took_s, tell)
    return books.differences


def _scene(plan: Plan, store: str | None) -> Scene:
    match store:
        case None:
            return at_coordinator(plan)
        case "file":
            return in_store(plan, (plan.folder / "bucket").as_uri())
        case "s3":
            return in_seaweed(plan)
        case url:
            return in_store(plan, url)


def _summarise(
    scene: Scene, books: Books, strikes: int, took_s: float, tell: Tell
) -> None:
    made = sum(int(life.marks["made"][0]) for life in scene.lives)
    fragments = max(1, len(books.rounds))
    tell(
        f"  {strikes} kills in {took_s:.0f} s ({60 * strikes / took_s:.0f} a minute), "
        f"{len(scene.lives)} processes, rounds {books.rounds}"
    )
    tell(
        f"  inner steps per fragment: {made} made, "
        f"{sum(books.counted.values()) // fragments} counted, "
        f"{books.gone // fragments} gone with killed processes, "
        f"{books.given_up // fragments} given up and reported"
    )
    if books.overlooked:
        tell(
            f"  {books.overlooked} updates of killed processes came while their round "
            "was being closed, and are among what is gone"
        )


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kill_storm")
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--store", help="file, s3 (SeaweedFS) or the URL of a bucket")
    parser.add_argument("--mode", choices=["sync", "async"], default="sync")
    parser.add_argument("--victims", choices=["server", "island"], default="")
    said = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if said.seed is None else said.seed
    folder = Path(tempfile.mkdtemp(prefix="kill-storm-"))
    trial = Trial(
        kills=said.kills,
        seed=seed,
        store=said.store,
        mode=said.mode,
        victims=said.victims,
    )
    found = storm(folder, trial, tell=_say)
    if found:
        _say(f"VIOLATED, see {folder}")
        for line in found[:40]:
            _say(f"  {line}")
        return 1
    _say("every step counted exactly once, and all islands hold the same anchor")
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
