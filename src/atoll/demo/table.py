"""The demo's table: islands beside data parallel."""

from __future__ import annotations

import math
from typing import NamedTuple

from atoll.demo import figures
from atoll.demo.results import ParallelResults, Results

LINK_BITS_PER_S = 100e6
"""A link between two sites that many people have."""

ABSENT = "-"

NOTE = """\
Bytes of data parallel are worked out: 2(M - 1)/M gradients each way in every step, in
bf16, as in a ring of M. Those of islands are what they really encoded."""


class Row(NamedTuple):
    """One line of the table."""

    label: str
    islands: str
    parallel: str


def heading(results: Results) -> Row:
    """Return what the columns are."""
    return Row("", f"{len(results['islands'])} islands", "data parallel")


def rows(results: Results) -> list[Row]:
    """Return what is compared; what data parallel would send is worked out, in bf16."""
    ring, parallel = results["ring_bytes_bf16"], results["parallel"]
    return [
        *_learnt(results, parallel),
        Row("sent by each", _bytes(results["bytes_up"]), _bytes(ring)),
        Row("received by each", _bytes(results["bytes_down"]), _bytes(ring)),
        Row("bytes, times those of islands", "1", _times(results["ratio_bf16"])),
        Row("the same, gradients in fp32", "1", _times(results["ratio_fp32"])),
        Row("each way at 100 Mbit/s", _sent_s(_larger(results)), _sent_s(ring)),
        Row("stall", figures.of_share(results["stall_share"]), ABSENT),
        Row("training took", figures.of_seconds(results["seconds"]), _took(parallel)),
    ]


def text(results: Results) -> str:
    """Return the table for a terminal, with what must be known to read it."""
    lines = [heading(results), *rows(results)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    aligned = [
        f"{label:{widths[0]}}   {islands:>{widths[1]}}   {parallel:>{widths[2]}}"
        for label, islands, parallel in lines
    ]
    return "\n".join([*aligned, "", NOTE])


def _learnt(results: Results, parallel: ParallelResults | None) -> list[Row]:
    loss, tokens = results["loss"], results["tokens"]
    if parallel is None:
        other = (ABSENT, ABSENT, ABSENT)
    else:
        other_loss = parallel["loss"]
        other = (
            _loss(other_loss),
            _loss(math.exp(other_loss)),
            f"{parallel['tokens']:,}",
        )
    return [
        Row("loss on held-out text, nats per byte", _loss(loss), other[0]),
        Row("perplexity per byte", _loss(results["perplexity"]), other[1]),
        Row("tokens", f"{tokens:,}", other[2]),
    ]


def _larger(results: Results) -> float:
    return max(results["bytes_up"], results["bytes_down"])


def _loss(value: float) -> str:
    return f"{value:.3f}"


def _times(ratio: float) -> str:
    return f"{ratio:.0f}"


def _bytes(size_bytes: float) -> str:
    return figures.of_bytes(size_bytes)


def _sent_s(size_bytes: float) -> str:
    return figures.of_seconds(8 * size_bytes / LINK_BITS_PER_S)


def _took(parallel: ParallelResults | None) -> str:
    return ABSENT if parallel is None else figures.of_seconds(parallel["seconds"])
