"""The results of the demo as plain data, which the report and the table show.

Everything here can be written as JSON and read back.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TypedDict

from atoll.settings import RunSettings

Point = tuple[float, float]
"""A position and a value: tokens and a loss, or seconds and a round."""

BF16_BYTES, FP32_BYTES = 2, 4
MAX_POINTS = 160
"""Points of a curve in a report."""


class IslandResults(TypedDict):
    """The results of one island, written when the run has ended."""

    island: str
    shard: int
    num_parameters: int
    started_unix_s: float
    seconds: float
    """From its first inner step to the last round."""

    round: int
    inner_steps: int
    tokens: int
    wait_s: float
    bytes_up: int
    bytes_down: int
    lr: float
    digest: str
    losses: list[Point]
    """Own tokens, and the loss of the batch."""

    rounds: list[Point]
    """Seconds since its start, and the round that was reached."""

    waits: list[Point]
    """Start and end of each wait, in seconds since its start."""

    held_out: list[Point]
    """The run's tokens in an anchor, and its loss; the last one is on shard 0."""

    sample: str
    """Text sampled from the last anchor; on shard 0 only."""

    versions: dict[str, str]
    """Versions of atoll, torch and python."""


class ParallelResults(TypedDict):
    """The results of data parallel on as many tokens."""

    steps: int
    tokens: int
    lr: float
    seconds: float
    loss: float
    held_out: list[Point]


class CoordinatorResults(TypedDict):
    """Counts of the coordinator's last status."""

    run: str
    version: str
    bytes_in: int
    bytes_out: int
    counted: int
    late: int
    refused: int


class Results(TypedDict):
    """The results that the report and the table show."""

    islands: list[IslandResults]
    """By shard."""

    parallel: ParallelResults | None
    coordinator: CoordinatorResults | None
    settings: dict[str, dict[str, object]]
    rounds: int
    tokens: int
    seconds: float
    held_out: list[Point]
    """Of all islands: the run's tokens in an anchor, and its loss."""

    loss: float
    perplexity: float
    stall_share: float
    """Share of the islands' time that training waited."""

    bytes_up: float
    """Of one island, the mean."""

    bytes_down: float
    ring_bytes_bf16: float
    """Bytes that one participant of data parallel would send, and also receive."""

    ring_bytes_fp32: float
    ratio_bf16: float
    ratio_fp32: float


def summarise(
    islands: Sequence[IslandResults],
    settings: RunSettings,
    *,
    status: Mapping[str, object] | None = None,
    parallel: ParallelResults | None = None,
) -> Results:
    """Return the results of all islands together.

    Args:
        status: the coordinator's last status document, if there was a coordinator.
        parallel: None leaves the comparison of losses out; that of bytes needs none.
    """
    islands = sorted(islands, key=lambda island: island["shard"])
    first, steps = islands[0], max(island["inner_steps"] for island in islands)
    moved_bytes = _mean(islands, "bytes_up") + _mean(islands, "bytes_down")
    bf16, fp32 = (
        ring_bytes(first["num_parameters"], len(islands), steps, size)
        for size in (BF16_BYTES, FP32_BYTES)
    )
    held_out = sorted(point for island in islands for point in island["held_out"])
    loss = held_out[-1][1]
    return {
        "islands": list(islands),
        "parallel": parallel,
        "coordinator": None if status is None else _coordinator(status),
        "settings": settings.to_dict(),
        "rounds": first["round"],
        "tokens": sum(island["tokens"] for island in islands),
        "seconds": _last_s(islands) - _first_s(islands),
        "held_out": held_out,
        "loss": loss,
        "perplexity": math.exp(loss),
        "stall_share": _mean(islands, "wait_s") / _mean(islands, "seconds"),
        "bytes_up": _mean(islands, "bytes_up"),
        "bytes_down": _mean(islands, "bytes_down"),
        "ring_bytes_bf16": bf16,
        "ring_bytes_fp32": fp32,
        "ratio_bf16": 2 * bf16 / moved_bytes,
        "ratio_fp32": 2 * fp32 / moved_bytes,
    }


def ring_bytes(parameters: int, islands: int, steps: int, value_bytes: int) -> float:
    """Return the bytes that each member of a ring sends in `steps`, and also receives.

    An all-reduce over M members takes 2(M - 1)/M gradients each way; that is optimal.
    """
    return 2 * (islands - 1) / islands * parameters * value_bytes * steps


def thin(points: Sequence[Point], *, max_points: int = MAX_POINTS) -> list[Point]:
    """Return at most `max_points` points: means of consecutive parts of the curve."""
    size = max(1, math.ceil(len(points) / max_points))
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [
        (statistics.fmean(x for x, _ in part), statistics.fmean(y for _, y in part))
        for part in parts
    ]


def _mean(islands: Sequence[IslandResults], key: str) -> float:
    values: list[float] = [island[key] for island in islands]  # type: ignore[literal-required]
    return statistics.fmean(values)


def _first_s(islands: Sequence[IslandResults]) -> float:
    return min(island["started_unix_s"] for island in islands)


def _last_s(islands: Sequence[IslandResults]) -> float:
    return max(island["started_unix_s"] + island["seconds"] for island in islands)


def _coordinator(status: Mapping[str, object]) -> CoordinatorResults:
    islands = status["islands"]
    assert isinstance(islands, list)
    return {
        "run": str(status["run"]),
        "version": str(status["version"]),
        "bytes_in": int(str(status["bytes_in"])),
        "bytes_out": int(str(status["bytes_out"])),
        "counted": sum(island["counted"] for island in islands),
        "late": sum(island["late"] for island in islands),
        "refused": sum(island["refused"] for island in islands),
    }
