"""What the demo found out, as plain data: the report and the table show nothing else.

Everything here can be written as JSON and read back.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TypedDict

from atoll.settings import RunSettings

Point = tuple[float, float]
"""Where, then how much: tokens and a loss, seconds and a round."""

BF16_BYTES, FP32_BYTES = 2, 4
MAX_POINTS = 160
"""A curve of a report needs no more."""


class IslandResults(TypedDict):
    """What one island writes when the run has ended."""

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
    """Seconds since its start, from and to which training stood still."""

    held_out: list[Point]
    """The run's tokens in an anchor, and its loss; the last one is on shard 0."""

    sample: str
    """What the last anchor writes; on shard 0 only."""

    versions: dict[str, str]
    """Of what took part: atoll, torch, python."""


class ParallelResults(TypedDict):
    """What data parallel came to on as many tokens."""

    steps: int
    tokens: int
    lr: float
    seconds: float
    loss: float
    held_out: list[Point]


class CoordinatorResults(TypedDict):
    """What the coordinator's last status says."""

    run: str
    version: str
    bytes_in: int
    bytes_out: int
    counted: int
    late: int
    refused: int


class Results(TypedDict):
    """All that the report and the table show."""

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
    """Of the islands' time, the share that training stood still."""

    bytes_up: float
    """Of one island, the mean."""

    bytes_down: float
    ring_bytes_bf16: float
    """That one island of data parallel would have sent, and received as many."""

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
    """Put together what each part of the demo found out.

    Args:
        status: the coordinator's last status document, if there was a coordinator.
        parallel: None leaves the comparison of losses out; that of bytes needs none.
    """
    islands = sorted(islands, key=lambda each: each["shard"])
    first, steps = islands[0], max(each["inner_steps"] for each in islands)
    moved_bytes = _mean(islands, "bytes_up") + _mean(islands, "bytes_down")
    bf16, fp32 = (
        ring_bytes(first["num_parameters"], len(islands), steps, size)
        for size in (BF16_BYTES, FP32_BYTES)
    )
    held_out = sorted(point for each in islands for point in each["held_out"])
    loss = held_out[-1][1]
    return {
        "islands": list(islands),
        "parallel": parallel,
        "coordinator": None if status is None else _coordinator(status),
        "settings": settings.to_dict(),
        "rounds": first["round"],
        "tokens": sum(each["tokens"] for each in islands),
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
    """Return what each of a ring sends in so many steps, and receives as well.

    An all-reduce over M takes 2(M - 1)/M gradients each way, and none can do with less.
    """
    return 2 * (islands - 1) / islands * parameters * value_bytes * steps


def thin(points: Sequence[Point], *, most: int = MAX_POINTS) -> list[Point]:
    """Return at most so many points: the means of as many stretches of the curve."""
    size = max(1, math.ceil(len(points) / most))
    stretches = [points[at : at + size] for at in range(0, len(points), size)]
    return [
        (statistics.fmean(x for x, _ in each), statistics.fmean(y for _, y in each))
        for each in stretches
    ]


def _mean(islands: Sequence[IslandResults], key: str) -> float:
    values: list[float] = [each[key] for each in islands]  # type: ignore[literal-required]
    return statistics.fmean(values)


def _first_s(islands: Sequence[IslandResults]) -> float:
    return min(each["started_unix_s"] for each in islands)


def _last_s(islands: Sequence[IslandResults]) -> float:
    return max(each["started_unix_s"] + each["seconds"] for each in islands)


def _coordinator(status: Mapping[str, object]) -> CoordinatorResults:
    islands = status["islands"]
    assert isinstance(islands, list)
    return {
        "run": str(status["run"]),
        "version": str(status["version"]),
        "bytes_in": int(str(status["bytes_in"])),
        "bytes_out": int(str(status["bytes_out"])),
        "counted": sum(each["counted"] for each in islands),
        "late": sum(each["late"] for each in islands),
        "refused": sum(each["refused"] for each in islands),
    }
