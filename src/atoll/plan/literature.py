"""Published figures: the bandwidth of Streaming DiLoCo's table 4, and losses.

Table 4 is about another program than Atoll: a fragment is a set of layers, each layer
is reduced after its backward pass and awaited before its next forward pass, and there
is one link for both directions. So it has a separate model here, which must not be
mixed with the law of `model`. It rebuilds the table to show that the inputs are read as
the paper means them.

Losses are never forecast: `published_losses` returns the rows of others' experiments
that are nearest to a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
GRID_GBITS = tuple(10 ** (-1 + 4 * index / 49) for index in range(50))
"""The paper's grid of bandwidths, from 0.1 to 1000 Gbit/s."""

FITTED_BITS = 13.4
"""Bits per value on the wire that rebuild the table; 16 would be bf16.

With these 67 of 75 cells are equal and 8 are one step of the grid apart. With 16 all
cells are equal or one step higher, and one is two steps higher.
"""

INTERVAL = 100
LAYERS_PER_FRAGMENT = 3


class Model(NamedTuple):
    """A model of table 4."""

    name: str
    parameters: float
    layers: int
    step_s: float


MODELS = (
    Model("1B", 1e9, 24, 0.1),
    Model("10B", 10e9, 48, 0.8),
    Model("100B", 100e9, 108, 4.9),
)


class Method(NamedTuple):
    """A column of table 4."""

    name: str
    is_streaming: bool
    overlap_steps: int
    bits_factor: float
    interval: int


METHODS = (
    Method("data parallel", False, 0, 1.0, 1),
    Method("DiLoCo", False, 0, 1.0, INTERVAL),
    Method("streaming", True, 0, 1.0, INTERVAL),
    Method("streaming, overlap", True, 1, 1.0, INTERVAL),
    Method("streaming, overlap, 4 bits", True, 1, 0.25, INTERVAL),
)

TABLE_4: dict[tuple[str, str], tuple[float, ...]] = {
    ("1B", "data parallel"): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("1B", "DiLoCo"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "streaming"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1B", "streaming, overlap"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1B", "streaming, overlap, 4 bits"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("10B", "data parallel"): (104.8, 222.3, 222.3, 268.3, 471.5),
    ("10B", "DiLoCo"): (1.7, 7.5, 16.0, 33.9, 104.8),
    ("10B", "streaming"): (1.7, 5.2, 9.1, 13.3, 19.3),
    ("10B", "streaming, overlap"): (1.7, 3.6, 5.2, 6.2, 7.5),
    ("10B", "streaming, overlap, 4 bits"): (0.4, 0.9, 1.4, 1.4, 1.7),
    ("100B", "data parallel"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("100B", "DiLoCo"): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("100B", "streaming"): (2.4, 6.2, 9.1, 11.0, 19.3),
    ("100B", "streaming, overlap"): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("100B", "streaming, overlap, 4 bits"): (0.5, 0.9, 1.1, 1.1, 1.4),
}
"""Gbit/s for each of `TARGETS`, as printed in arXiv 2501.18512, table 4."""


def bandwidths(
    model: Model, method: Method, *, bits: float = FITTED_BITS
) -> list[int | None]:
    """Return the index in `GRID_GBITS` of the first rate that reaches each target."""
    indices: list[int | None] = []
    index = 0
    for target in TARGETS:
        while index < len(GRID_GBITS) and (
            utilisation(model, method, gbits=GRID_GBITS[index], bits=bits) < target
        ):
            index += 1
        indices.append(index if index < len(GRID_GBITS) else None)
    return indices


def utilisation(model: Model, method: Method, *, gbits: float, bits: float) -> float:
    """Return the share of compute in a steady period, layer by layer.

    A third of a step is the forward pass. Each due layer is reduced after its backward
    pass, one after the other on one link, and the forward pass of that layer waits for
    it: in the next step, or `overlap_steps` later.
    """
    reduce_s = bits * method.bits_factor * model.parameters
    reduce_s /= model.layers * gbits * 1e9
    forward_s = model.step_s / 3 / model.layers
    backward_s = 2 * forward_s
    arrivals: dict[tuple[int, int], float] = {}
    now_s = link_s = start_s = 0.0
    # Two intervals fill the queue of the link, and one is measured.
    first, last = 2 * method.interval, 3 * method.interval
    if method.interval == 1:
        first, last = 40, 60
    due = _due_layers(model.layers, method)
    for step in range(last):
        if step == first:
            start_s = now_s
        for layer in range(model.layers):
            now_s = max(now_s, arrivals.pop((step, layer), 0.0)) + forward_s
        for layer in reversed(range(model.layers)):
            now_s += backward_s
            if layer in due[step % method.interval]:
                link_s = max(link_s, now_s) + reduce_s
                arrivals[step + 1 + method.overlap_steps, layer] = link_s
    return (last - first) * model.step_s / (now_s - start_s)


def _due_layers(layers: int, method: Method) -> list[set[int]]:
    """Return the layers that are reduced in each step of an interval."""
    due: list[set[int]] = [set() for _ in range(method.interval)]
    if not method.is_streaming:
        due[-1] = set(range(layers))
        return due
    fragments = layers // LAYERS_PER_FRAGMENT
    for fragment in range(fragments):
        offset = fragment * method.interval // fragments
        due[offset] = set(range(fragment, layers, fragments))
    return due


@dataclass(frozen=True)
class RebuiltCell:
    """A cell of table 4: printed and rebuilt."""

    model: str
    method: str
    target: float
    printed_gbits: float
    rebuilt_gbits: float | None
    steps_apart: int | None
    """Steps of the grid from the printed to the rebuilt value."""


def rebuild(*, bits: float = FITTED_BITS) -> list[RebuiltCell]:
    """Return every cell of table 4 beside the model's value."""
    cells = []
    for model in MODELS:
        for method in METHODS:
            printed = TABLE_4[model.name, method.name]
            indices = bandwidths(model, method, bits=bits)
            for target, gbits, index in zip(TARGETS, printed, indices, strict=True):
                rebuilt = None if index is None else GRID_GBITS[index]
                apart = None if index is None else index - _index_of(gbits)
                cells.append(
                    RebuiltCell(model.name, method.name, target, gbits, rebuilt, apart)
                )
    return cells


def _index_of(gbits: float) -> int:
    """Return the step of the grid that the paper printed with one decimal."""
    return min(range(len(GRID_GBITS)), key=lambda i: abs(GRID_GBITS[i] - gbits))


class LossRow(NamedTuple):
    """Losses on C4 after the same number of tokens."""

    model: str
    data_parallel: float
    by_interval: tuple[float, float]
    """With a `sync_every` of 30 and of 100."""

    def percents(self) -> tuple[float, float]:
        """Return by how many percent the losses are above that of data parallel.

        >>> STREAMING_M4[0].percents()
        (2.6, 3.7)
        """
        short, long = (
            round(100 * (loss / self.data_parallel - 1), 1) for loss in self.by_interval
        )
        return short, long


STREAMING_M2 = (
    LossRow("35M", 3.51, (3.53, 3.56)),
    LossRow("100M", 3.19, (3.21, 3.22)),
    LossRow("300M", 2.80, (2.81, 2.83)),
    LossRow("1B", 2.49, (2.48, 2.50)),
)
STREAMING_M4 = (
    LossRow("35M", 3.51, (3.60, 3.64)),
    LossRow("100M", 3.19, (3.25, 3.29)),
    LossRow("300M", 2.80, (2.84, 2.87)),
    LossRow("1B", 2.49, (2.50, 2.53)),
)
"""Streaming DiLoCo with 4 bits and an overlap of 1, arXiv 2501.18512."""

MAX_PUBLISHED_INTERVAL, MAX_PUBLISHED_OVERLAP, MAX_PUBLISHED_ISLANDS = 100, 5, 4


def published_losses(*, islands: int, sync_every: int, overlap_steps: int) -> list[str]:
    """Return sentences: the losses of others beside which a plan stands."""
    rows = STREAMING_M2 if islands <= 2 else STREAMING_M4
    count = 2 if islands <= 2 else 4
    lines = [
        "Streaming DiLoCo, 4 bits, C4, compared with data parallel: "
        f"{count} islands at sync_every 30 / 100",
        _percent_line(rows),
    ]
    beyond = []
    if islands > MAX_PUBLISHED_ISLANDS:
        beyond.append(f"{islands} islands")
    if sync_every > MAX_PUBLISHED_INTERVAL:
        beyond.append(f"sync_every={sync_every}")
    if overlap_steps > MAX_PUBLISHED_OVERLAP:
        beyond.append(f"an overlap of {overlap_steps} in {sync_every}")
    lines.append(
        "Overlap: up to 5 steps without harm there; 10 of 30 cost 0.5 % in a miniature "
        "of 34,500 parameters."
    )
    if beyond:
        lines.append(f"Beyond these figures: {_joined(beyond)}.")
    return lines


def _percent_line(rows: Sequence[LossRow]) -> str:
    texts = []
    for row in rows:
        short, long = row.percents()
        texts.append(f"{row.model} {short:+.1f} / {long:+.1f} %")
    return "   ".join(texts)


def _joined(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)


def table_4_lines() -> list[str]:
    """Return table 4 of Streaming DiLoCo, printed and rebuilt."""
    head = "".join(f"{f'{100 * target:g} %':>16}" for target in TARGETS)
    lines = [
        "Gbit/s for a share of compute: printed in arXiv 2501.18512, table 4 / rebuilt "
        f"with {FITTED_BITS:g} bits per value",
        f"{'':34}{head}",
    ]
    cells = rebuild()
    for start in range(0, len(cells), len(TARGETS)):
        row = cells[start : start + len(TARGETS)]
        texts = "".join(f"{_cell_text(cell):>16}" for cell in row)
        lines.append(f"{row[0].model:<6}{row[0].method:<28}{texts}")
    equal = sum(cell.steps_apart == 0 for cell in cells)
    near = sum(cell.steps_apart in (-1, 1) for cell in cells)
    lines.append(
        f"{equal} of {len(cells)} cells are equal, {near} one step of the grid apart "
        f"(a factor of 1.21), {len(cells) - equal - near} further."
    )
    return lines


def _cell_text(cell: RebuiltCell) -> str:
    rebuilt = "-" if cell.rebuilt_gbits is None else f"{cell.rebuilt_gbits:.1f}"
    return f"{cell.printed_gbits:g} / {rebuilt}"
