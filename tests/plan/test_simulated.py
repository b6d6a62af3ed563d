"""The model beside the simulator, which runs the real protocol in virtual time."""

from __future__ import annotations

import pytest

from atoll.island.numpy_model import vector_model
from atoll.plan import IslandLink, Plan, Workload, judge
from atoll.settings import RunSettings
from atoll.simulate import Latency
from atoll.simulate.run import Conditions, simulate

COMPUTE_S = 120.0
"""So long that the founder's wait for the other islands, 1.5 s, weighs 1.2 %."""

POINTS = 0.02
ELEMENTS = 64_000
RATE_BITS = 3.2e6  # a fragment of a fourth takes 20.6 ms in e3m0, 40.6 ms in int8
DELAY_S = 0.04

# sync_every, fragments, overlap, codec up, codec down, islands, seconds of a step
SETTINGS = [
    (40, 4, 8, "e3m0", "int8", 2, 0.1),
    (40, 4, 0, "e3m0", "int8", 2, 0.1),
    (40, 4, 1, "e3m0", "int8", 2, 0.1),
    (20, 1, 0, "int8", "int8", 2, 0.1),
    (20, 1, 3, "int8", "int8", 2, 0.1),
    (20, 2, 2, "bf16", "bf16", 2, 0.1),
    (20, 2, 0, "bf16", "bf16", 2, 0.1),
    (50, 4, 0, "bf16", "int8", 2, 0.05),
    (50, 4, 6, "bf16", "int8", 2, 0.05),
    (30, 2, 1, "fp32", "bf16", 2, 0.2),
    (30, 4, 0, "e3m0", "int8", 4, 0.1),
    (30, 4, 4, "e3m0", "int8", 4, 0.1),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_model_agrees_with_the_simulator(
    setting: tuple[int, int, int, str, str, int, float],
) -> None:
    """Utilisation differs by at most two points."""
    sync_every, fragments, overlap, up, down, islands, step_s = setting
    rounds = round(COMPUTE_S / (sync_every * step_s))
    settings = RunSettings.from_dict(
        {
            "run": {"start_islands": islands, "end_rounds": rounds},
            "sync": {
                "sync_every": sync_every,
                "num_fragments": fragments,
                "overlap_steps": overlap,
            },
            "wire": {"up": up, "down": down},
        }
    )
    result = simulate(
        settings,
        islands=islands,
        conditions=Conditions(
            model=vector_model(
                {f"h.{n}.w": (ELEMENTS // fragments,) for n in range(fragments)}
            ),
            step_s=step_s,
            latency=Latency(base_s=DELAY_S, jitter_s=0.0, bytes_per_s=RATE_BITS / 8),
        ),
    )
    workload = Workload(
        parameters=ELEMENTS,
        steps_s=(step_s,) * islands,
        host_s=0.0,  # virtual hosts compute in no time
    )
    link = IslandLink(
        up_bits_per_s=RATE_BITS, down_bits_per_s=RATE_BITS, delay_s=DELAY_S
    )
    modelled = judge(workload, link, Plan.of(settings)).utilisation

    assert result.violations == []
    assert min(result.utilisation.values()) == pytest.approx(modelled, abs=POINTS)
