"""Islands of different speeds in one run, in virtual time at a real coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from atoll import RunSettings
from atoll.testing import (
    VectorView,
    VirtualIsland,
    VirtualRun,
    vector_model,
    virtual_run,
)

ROUNDS, EVERY = 20, 20
MODEL = vector_model({f"layers.{n}.w": (30 + n,) for n in range(3)})


def settings(*, is_dynamic: bool, islands: int = 3, **sync: Any) -> RunSettings:
    """Return the settings of a run of 20 rounds."""
    return RunSettings.from_dict(
        {
            "run": {"start_islands": islands, "end_rounds": ROUNDS},
            "sync": {"sync_every": EVERY, "dynamic_local_updates": is_dynamic, **sync},
            "outer": {"weight": "tokens"},
        }
    )


@dataclass(frozen=True)
class Ended:
    """One island at the end of its run."""

    digest: str
    inner_steps: int
    windows: tuple[int, ...]
    """Inner steps per window, as they changed."""


def train(run: RunSettings, *paces_s: float) -> VirtualRun:
    """Train islands of these paces until the run ends; each returns an `Ended`."""

    def loop(island: VirtualIsland) -> Ended:
        view = VectorView()
        host = island.join(MODEL, view)
        number = int(island.name[1:])
        rng, windows = np.random.default_rng(number), [host.stride.window]
        while not host.has_ended:
            island.work(paces_s[number])
            for local in view.local:
                local += rng.normal(size=len(local)).astype(np.float32) - local / 8
            host.count_tokens(7)
            host.stepped()
            if host.stride.window != windows[-1]:
                windows.append(host.stride.window)
        host.leave()
        return Ended(host.digest, host.counters.inner_steps, tuple(windows))

    result = virtual_run(loop, run, islands=len(paces_s))
    assert result.failures == {}
    assert {island.digest for island in result.returned.values()} == {
        result.returned["i0"].digest
    }
    return result


SYNCS: dict[str, dict[str, Any]] = {
    "at once": {},
    "fragments in flight": {"num_fragments": 3, "overlap_steps": 4},
}


@pytest.mark.parametrize("sync", SYNCS.values(), ids=SYNCS)
def test_a_slow_island_costs_the_others_one_window(sync: dict[str, Any]) -> None:
    """With one island 2.5 times slower, 20 rounds take less than half of the time."""
    paces_s = (1.0, 1.0, 2.5)
    waits, strides = (
        train(settings(is_dynamic=is_dynamic, **sync), *paces_s)
        for is_dynamic in (False, True)
    )

    # 20 windows of 50 s, or one of them and 19 of 20 s: 430 / 1000.
    assert strides.seconds / waits.seconds <= 0.5
    assert waits.returned["i2"].windows == (EVERY,)
    assert strides.returned["i0"].windows == (EVERY,)
    assert strides.returned["i2"].windows == (EVERY, 8)  # 20 / 2.5
    assert sync or strides.returned["i2"].inner_steps == EVERY + 19 * 8


@pytest.mark.parametrize("paces_s", [(1.0, 1.05, 1.1), (1.0,)], ids=["all", "alone"])
@pytest.mark.parametrize("sync", SYNCS.values(), ids=SYNCS)
def test_islands_of_nearly_one_pace_train_as_without_windows(
    sync: dict[str, Any], paces_s: tuple[float, ...]
) -> None:
    """Within an eighth of each other, they end on the same anchor and velocity."""
    islands = len(paces_s)
    without, with_windows = (
        train(
            settings(is_dynamic=is_dynamic, islands=islands, **sync), *paces_s
        ).returned
        for is_dynamic in (False, True)
    )

    assert without == with_windows
