"""The settings that keep devices busy, and their bounds.

The order of the search is the rule of quality: rounds as frequent as can be, then as
few bytes as can be, then as little overlap as can be, as long as devices are busy. The
model never trades loss for speed: it has no number for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from atoll.plan.model import (
    IslandLink,
    Plan,
    Prediction,
    Workload,
    min_overlap,
    min_sync_every,
    predict,
    transfers_of,
)
from atoll.plan.timeline import judge

WIRES = (("bf16", "bf16"), ("int8", "int8"), ("e3m0", "int8"))
"""In the order of their risk."""

SYNC_EVERY = (10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000)
FRAGMENTS = (1, 2, 4, 8, 16, 32)
TARGET = 0.97
GRID_SYNC_EVERY = (30, 50, 100, 200, 500)
GRID_RATES = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True)
class Advice:
    """The settings for one pair of codecs, with the least overlap that is enough."""

    plan: Plan
    advised_overlap: int
    """Twice that, for times when the link is busy, if it fits."""

    prediction: Prediction
    """Of the least overlap."""

    reaches_target: bool

    @property
    def has_room(self) -> bool:
        """Whether the advised overlap is twice the least."""
        return self.advised_overlap >= 2 * self.plan.overlap_steps

    @property
    def advised(self) -> Plan:
        return replace(self.plan, overlap_steps=self.advised_overlap)


def advise(
    workload: Workload,
    link: IslandLink,
    *,
    wires: Sequence[tuple[str, str]] = WIRES,
    target: float = TARGET,
    max_sync_every: int = SYNC_EVERY[-1],
) -> list[Advice]:
    """Return the best settings for each pair of codecs."""
    return [_best(workload, link, wire, target, max_sync_every) for wire in wires]


def marked(rows: Sequence[Advice]) -> Advice | None:
    """Return the row with the most frequent rounds, and the fewest bytes of those."""
    reached = [row for row in rows if row.reaches_target]
    return min(
        reached,
        key=lambda row: (
            row.plan.sync_every,
            row.prediction.bytes_up + row.prediction.bytes_down,
        ),
        default=None,
    )


def _best(
    workload: Workload,
    link: IslandLink,
    wire: tuple[str, str],
    target: float,
    max_sync_every: int,
) -> Advice:
    best: Advice | None = None
    for sync_every in _intervals(max_sync_every):
        for plan in _candidates(workload, link, wire, target, sync_every):
            prediction = judge(workload, link, plan)
            reaches = prediction.utilisation >= target
            if reaches or best is None or _is_better(prediction, best):
                best = Advice(plan, _advised(plan), prediction, reaches)
            if reaches:
                return best
    assert best is not None
    return best


def _is_better(prediction: Prediction, best: Advice) -> bool:
    return prediction.utilisation > best.prediction.utilisation + 1e-6


def _intervals(max_sync_every: int) -> list[int]:
    intervals = [value for value in SYNC_EVERY if value <= max_sync_every]
    return intervals or [max_sync_every]


def _advised(plan: Plan) -> int:
    """Return twice the overlap if that is below half of a round, else what fits."""
    half = max(plan.overlap_steps, (plan.sync_every - 1) // 2)
    return min(2 * plan.overlap_steps, half)


def _candidates(
    workload: Workload,
    link: IslandLink,
    wire: tuple[str, str],
    target: float,
    sync_every: int,
) -> Iterator[Plan]:
    """Yield plans that the closed form finds busy, those of the least overlap first.

    If it finds none, the one with the longest overlap and the most fragments.
    """
    limit = min(workload.most_fragments, sync_every)
    counts = [count for count in FRAGMENTS if count <= limit]
    plans = []
    longest = sync_every // 2
    for count in counts:
        plan = Plan(
            up=wire[0], down=wire[1], sync_every=sync_every, num_fragments=count
        )
        overlap = _least_overlap(workload, link, plan, target)
        if overlap <= longest:
            plans.append(replace(plan, overlap_steps=overlap))
    busy = [
        plan
        for plan in plans
        if predict(workload, link, plan).utilisation >= target - 1e-9
    ]
    if not busy:
        last = replace(plan, overlap_steps=longest)
        yield last
    yield from sorted(busy, key=lambda plan: (plan.overlap_steps, plan.num_fragments))


def _least_overlap(
    workload: Workload, link: IslandLink, plan: Plan, target: float
) -> int:
    """Return the least overlap whose stalls leave the target, as the law has it."""
    transfers = transfers_of(workload, link, plan)
    windows = workload.windows(plan.sync_every)
    overlap = 0
    for window, step_s in zip(windows, workload.steps_s, strict=True):
        allowed_s = window * step_s * (1 / target - 1) / len(transfers)
        longest_s = max(part.total_s for part in transfers) - allowed_s
        steps = longest_s / step_s * plan.sync_every / window
        overlap = max(overlap, math.ceil(steps - 1e-9))
    return overlap


def grid(
    workload: Workload, link: IslandLink, plan: Plan
) -> list[tuple[int, list[float]]]:
    """Return the utilisation by interval and by rate of the link.

    The overlap is the least that hides an exchange, up to a quarter of a round.
    """
    rows = []
    for sync_every in GRID_SYNC_EVERY:
        shares = []
        for factor in GRID_RATES:
            scaled = link.scaled(factor)
            trial = replace(plan, sync_every=sync_every, overlap_steps=0)
            hiding = min_overlap(workload, scaled, trial)
            trial = replace(trial, overlap_steps=min(hiding, sync_every // 4))
            shares.append(judge(workload, scaled, trial).utilisation)
        rows.append((sync_every, shares))
    return rows


def reasons(workload: Workload, link: IslandLink, rows: Sequence[Advice]) -> list[str]:
    """Return sentences: the bounds that no other setting moves."""
    bounds = [
        f"{math.ceil(min_sync_every(workload, link, row.plan))} in {row.plan.wire}"
        for row in rows
    ]
    sentences = [
        "Below these values of sync_every the link is full, regardless of the other "
        f"settings: {', '.join(bounds)}."
    ]
    best = marked(rows)
    if best is None:
        sentences.append(_remedy(workload, link, rows))
        return sentences
    sentences.append(
        f"An exchange of a fragment in {best.plan.wire} takes "
        f"{min_overlap(workload, link, best.plan)} inner steps; an overlap of that "
        "length hides it entirely."
    )
    fastest = max(link.up_bits_per_s, link.down_bits_per_s)
    if link.stream_rate(fastest) < fastest:
        sentences.append(
            "One TCP connection does not fill this link: it carries "
            f"{link.stream_rate(fastest) / 1e6:.0f} Mbit/s with "
            f"{link.window_bytes / 2**20:.0f} MiB in flight and a round trip of "
            f"{2e3 * link.delay_s:.0f} ms. Raise net.ipv4.tcp_rmem and "
            "net.ipv4.tcp_wmem on both ends."
        )
    return sentences


def _remedy(workload: Workload, link: IslandLink, rows: Sequence[Advice]) -> str:
    """Return which link, step or interval would reach the target."""
    best = max(rows, key=lambda row: row.prediction.utilisation)
    needed = min_sync_every(workload, link, best.plan)
    factor = needed / best.plan.sync_every
    if factor > 1:
        return (
            f"Nothing here reaches the target. {best.plan.wire} at sync_every="
            f"{best.plan.sync_every} needs a link {factor:.1f} times as fast, inner "
            f"steps {factor:.1f} times as long, or sync_every of at least "
            f"{math.ceil(needed)}."
        )
    return (
        f"Nothing here reaches the target: an exchange takes "
        f"{min_overlap(workload, link, best.plan)} inner steps, and half of a round "
        "is the longest overlap. Raise --max-sync-every."
    )
