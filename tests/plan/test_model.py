"""The closed form, and the walk over steps beside it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.plan import (
    ExchangeKind,
    IslandLink,
    Plan,
    Workload,
    data_parallel,
    judge,
    predict,
    walk,
)
from atoll.plan.model import bits_of, min_overlap, min_sync_every
from atoll.settings import RunSettings

FAST = IslandLink(up_bits_per_s=1e8, down_bits_per_s=1e8, delay_s=0.04)
BENCH = Workload(parameters=2_000_000, steps_s=(0.1, 0.1))
PLAN = Plan(up="e3m0", down="int8", sync_every=40, num_fragments=4, overlap_steps=8)

rates = st.floats(1e6, 1e11)
workloads = st.builds(
    lambda parameters, step_s, islands: Workload(
        parameters=parameters, steps_s=(step_s,) * islands
    ),
    st.integers(10**4, 10**10),
    st.floats(0.01, 10),
    st.integers(1, 16),
)
links = st.builds(
    lambda up, down, delay_s: IslandLink(
        up_bits_per_s=up, down_bits_per_s=down, delay_s=delay_s
    ),
    rates,
    rates,
    st.floats(0, 0.3),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    sync_every = draw(st.integers(2, 300))
    return Plan(
        up=draw(st.sampled_from(["fp32", "bf16", "int8", "e3m0"])),
        down=draw(st.sampled_from(["fp32", "bf16", "int8"])),
        sync_every=sync_every,
        num_fragments=draw(st.sampled_from([1, 2, 4, 8])),
        overlap_steps=draw(st.integers(0, sync_every // 2)),
    )


@pytest.mark.parametrize(
    ("codec", "bits"),
    [("fp32", 32), ("bf16", 16), ("int8", 8.125), ("e3m0", 4.125)],
)
def test_bits_include_scales(codec: str, bits: float) -> None:
    """A block of 256 values in int8 has 4 bytes of scale; one of 64 in e3m0 one."""
    assert bits_of(codec) == bits


def test_the_simulated_figures_of_the_bench() -> None:
    """99.5, 81.1 and 20.0 % of bench/utilisation are met within 1.5 points."""
    no_overlap = predict(BENCH, FAST, replace(PLAN, overlap_steps=0))

    # Half a million values: 20.6 ms up, 40.6 ms down, 160 ms of trips, 2.5 ms of hosts:
    # four stalls of 224 ms in a round of 4 s are 4 / 4.895.
    assert predict(BENCH, FAST, PLAN).utilisation == pytest.approx(0.995, abs=0.015)
    assert no_overlap.utilisation == pytest.approx(0.811, abs=0.015)
    assert data_parallel(BENCH, FAST) == pytest.approx(0.200, abs=0.015)
    assert no_overlap.bytes_up == pytest.approx(1_031_250)
    assert no_overlap.bytes_down == pytest.approx(2_031_250)


@pytest.mark.parametrize(
    ("sync_s", "share"), [(103, 0.957), (382, 0.856), (469, 0.829)]
)
def test_the_identity_of_intellect_1(sync_s: float, share: float) -> None:
    """38 minutes of compute and a sync that nothing hides: 2280 / (2280 + t)."""
    assert exposed(sync_s, 2280, 100) == pytest.approx(share, abs=0.001)


def test_the_round_of_covenant() -> None:
    """70 s of communication in a round of 20 minutes leave 94.5 %, rounded up."""
    assert exposed(70, 1200, 30) == pytest.approx(0.945, abs=0.001)


def exposed(sync_s: float, compute_s: float, sync_every: int) -> float:
    """Return the utilisation of a run whose exchange takes a time, all of it up."""
    workload = Workload(parameters=10**6, steps_s=(compute_s / sync_every,), host_s=0.0)
    link = IslandLink(
        up_bits_per_s=10**6 * 8.125 / sync_s, down_bits_per_s=1e18, delay_s=0.0
    )
    plan = Plan(up="int8", down="int8", sync_every=sync_every)
    return predict(workload, link, plan).utilisation


@given(workloads, links, plans())
def test_a_share_is_between_0_and_1(
    workload: Workload, link: IslandLink, plan: Plan
) -> None:
    """Of the closed form and of the walk."""
    for prediction in (predict(workload, link, plan), judge(workload, link, plan)):
        assert 0 < prediction.utilisation <= 1 + 1e-9


@given(workloads, links, plans())
def test_more_rate_overlap_and_interval_never_hurt(
    workload: Workload, link: IslandLink, plan: Plan
) -> None:
    """Utilisation never falls when W, H or tau grow, or when d, N or b shrink."""
    share = predict(workload, link, plan).utilisation - 1e-9
    longer = replace(plan, sync_every=plan.sync_every + 7)

    assert predict(workload, link.scaled(2), plan).utilisation >= share
    assert predict(workload, link, longer).utilisation >= share
    assert predict(workload, link, more_overlap(plan)).utilisation >= share
    closer = replace(link, delay_s=link.delay_s / 2)
    assert predict(workload, closer, plan).utilisation >= share
    smaller = replace(workload, parameters=workload.parameters // 2)
    assert predict(smaller, link, plan).utilisation >= share
    fewer_bits = replace(plan, up="e3m0", down="int8")
    if plan.down != "e3m0":
        assert predict(workload, link, fewer_bits).utilisation >= share


def more_overlap(plan: Plan) -> Plan:
    """Return the plan with one more step of overlap, if it fits."""
    return replace(plan, overlap_steps=min(plan.overlap_steps + 1, plan.sync_every - 1))


@given(workloads, links, plans())
def test_the_walk_is_the_closed_form_where_nothing_queues(
    workload: Workload, link: IslandLink, plan: Plan
) -> None:
    """They are equal while no exchange outlasts the interval to the next send."""
    modelled = predict(workload, link, plan)
    spacing_s = (plan.sync_every // plan.num_fragments) * workload.slowest_s
    longest_s = max(part.total_s for part in modelled.transfers)
    if longest_s < spacing_s:
        walked = judge(workload, link, plan).utilisation

        assert walked == pytest.approx(modelled.utilisation, abs=1e-6)


@given(workloads, links, plans())
def test_the_walk_never_beats_a_full_link(
    workload: Workload, link: IslandLink, plan: Plan
) -> None:
    """A round lasts at least as long as its bytes occupy the link."""
    modelled = predict(workload, link, plan)
    cycle_s = walk(workload, link, plan).cycle_s

    # The measured rounds begin and end with up to one window of transfers in flight.
    assert cycle_s >= modelled.link_s * (1 - 1 / 5)


def test_a_shared_medium_carries_both_directions() -> None:
    """The sum of both bounds the cycle; the larger one does otherwise."""
    workload = Workload(parameters=10**9, steps_s=(1.0,) * 2, host_s=0.0)
    plan = Plan(
        up="int8", down="int8", sync_every=60, num_fragments=8, overlap_steps=30
    )
    shared = replace(FAST, is_shared=True)

    # 8.125 Gbit at 100 Mbit/s: 81 s each way, 162 s together.
    assert predict(workload, FAST, plan).cycle_s == pytest.approx(81.25, abs=0.1)
    assert predict(workload, shared, plan).cycle_s == pytest.approx(162.5, abs=0.1)
    assert judge(workload, shared, plan).cycle_s == pytest.approx(162.5, rel=0.1)


def test_one_tcp_stream_does_not_fill_a_long_line() -> None:
    """1 Gbit/s and 60 ms each way carry 419 Mbit/s with 6 MiB in flight."""
    link = IslandLink(up_bits_per_s=1e9, down_bits_per_s=1e9, delay_s=0.06)

    assert link.stream_rate(1e9) == pytest.approx(419.4e6, rel=1e-3)


def test_a_slow_coordinator_bounds_all_islands() -> None:
    """The coordinator takes every island's update through its own link."""
    workload = Workload(parameters=10**6, steps_s=(1.0,) * 10, host_s=0.0)
    link = replace(FAST, coordinator_bits_per_s=1e8)
    plan = Plan(up="int8", down="int8", sync_every=10)

    # 8.125 Mbit for each of ten islands: 0.8125 s each way, and 0.16 s of trips.
    assert predict(workload, link, plan).stall_s == pytest.approx(1.785)


def test_unequal_islands_wait_for_the_slowest() -> None:
    """With steps of 1 and 2 s the fast one computes half of the time."""
    workload = Workload(parameters=1000, steps_s=(1.0, 2.0), host_s=0.0)
    link = IslandLink(up_bits_per_s=1e9, down_bits_per_s=1e9, delay_s=0.0)
    plan = Plan(up="bf16", down="bf16", sync_every=10, overlap_steps=2)
    dynamic = replace(workload, is_dynamic=True)

    assert predict(workload, link, plan).utilisations == pytest.approx((0.5, 1.0))
    assert predict(dynamic, link, plan).utilisations == pytest.approx((1.0, 1.0))


def test_islands_of_a_bucket_read_each_other() -> None:
    """Three read two updates each; eight share the reduction of each fragment."""
    three = Workload(parameters=800, steps_s=(1.0,) * 3, kind=ExchangeKind.STORE)
    eight = replace(three, steps_s=(1.0,) * 8)
    plan = Plan(up="bf16", down="bf16", sync_every=10)

    # 1,600 bytes an update. Eight: a seventh more up; 7/8 of updates and mean down.
    assert predict(three, FAST, plan).bytes_up == 1600
    assert predict(three, FAST, plan).bytes_down == 3200
    assert predict(eight, FAST, plan).bytes_up == 1800
    assert predict(eight, FAST, plan).bytes_down == 2800
    assert min_overlap(three, FAST, plan) == 1  # 16 requests of 30 ms


def test_a_gathered_outcome_grows_with_the_islands_up_to_fp32() -> None:
    """An outcome is the updates, and at most 4 bytes per value."""
    plan = Plan(up="e3m0", down="gather", sync_every=10)

    assert plan.bits(3) == (4.125, 12.375)
    assert plan.bits(50) == (4.125, 32)


def test_fragments_are_cut_as_the_run_cuts_them() -> None:
    """Two blocks and an embedding make two unequal fragments."""
    tensors = (("embed", (100,)), ("h.0.w", (10,)), ("h.1.w", (10,)))
    workload = Workload(parameters=120, tensors=tensors, steps_s=(1.0,))
    plan = Plan(up="fp32", down="fp32", sync_every=10, num_fragments=2)

    assert workload.most_fragments == 2
    assert sorted(workload.sizes(plan)) == [10, 110]


def test_the_least_interval_is_the_time_of_the_bytes() -> None:
    """1 billion values in bf16 take 160 steps of a second at 100 Mbit/s."""
    workload = Workload(parameters=10**9, steps_s=(1.0,) * 4)
    plan = Plan(up="bf16", down="bf16", sync_every=100)

    assert min_sync_every(workload, FAST, plan) == pytest.approx(160)


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_link_without_a_rate_is_refused(rate: float) -> None:
    """The message has the value."""
    with pytest.raises(UsageError, match=f"above 0, not {rate}"):
        IslandLink(up_bits_per_s=rate, down_bits_per_s=1e6, delay_s=0.0)


def test_a_link_without_end_is_refused() -> None:
    """A delay must be finite."""
    with pytest.raises(UsageError, match="delay_s=inf"):
        IslandLink(up_bits_per_s=1e6, down_bits_per_s=1e6, delay_s=math.inf)


@pytest.mark.parametrize("step_s", [0.0, math.inf])
def test_a_step_without_time_is_refused(step_s: float) -> None:
    """Nothing could be divided by it."""
    with pytest.raises(UsageError, match="seconds of an inner step"):
        Workload(parameters=1, steps_s=(step_s,))


def test_an_empty_model_is_refused() -> None:
    """A plan needs a parameter."""
    with pytest.raises(UsageError, match="at least one parameter"):
        Workload(parameters=0, steps_s=(1.0,))


def test_an_asynchronous_run_is_refused() -> None:
    """No island waits for a round there."""
    settings = RunSettings.from_dict({"sync": {"mode": "async", "overlap_steps": 2}})

    with pytest.raises(UsageError, match="mode='async'"):
        Plan.of(settings)
