"""The bandwidth model: how busy the devices of islands are on a link, by settings.

Symbols: n values of a fragment, H inner steps per window, T seconds per inner step,
M islands, d seconds of delay one way, u and v seconds of transfer up and down, and h
seconds of work on hosts. An exchange through a coordinator takes

    X = 4 d + u + v + h
    stall of a fragment = max(0, X - overlap_steps * T)
    cycle = max(H T + sum of stalls, sum of u, sum of v)
    utilisation = H T / cycle

because a full link bounds a cycle from below; a shared medium bounds it by the sum of
u + v. The law assumes that transfers of different fragments do not queue. `timeline`
walks the steps instead, and decides near a full link.

Synchronous rounds run at the pace of the slowest island: the cycle is the longest of
all islands, and each island's utilisation is its own time in inner steps over that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise

from atoll.algorithm.fragments import Named, blocks, split
from atoll.errors import UsageError
from atoll.settings import RunSettings
from atoll.wire import codec

SAMPLE = 2**20
"""Elements whose encoded size stands for any number: codecs round up to blocks."""

TCP_WINDOW_BYTES = 6 * 2**20
"""Default limit of the kernel for the receive buffer of one connection on Linux."""

SEAL_S = ADOPT_S = 1.5e-9
REDUCE_S = 1e-9
"""Seconds per value on hosts, until they are measured; the reduction per island."""

STORE_REQUESTS = 16
"""Requests in sequence of an exchange in a bucket (docs/object-store.md)."""

FP32_BITS = 32
BF16_BITS = 16
DAY_S = 86_400


class ExchangeKind(StrEnum):
    """The exchange of a run."""

    COORDINATOR = "coordinator"
    STORE = "store"
    COLLECTIVE = "collective"


@dataclass(frozen=True, kw_only=True)
class IslandLink:
    """The link of an island, and its other end."""

    up_bits_per_s: float
    down_bits_per_s: float
    delay_s: float
    """One way."""

    is_shared: bool = False
    """Whether both directions share one medium."""

    coordinator_bits_per_s: float = math.inf
    """Of the coordinator, each way; all islands share it."""

    request_s: float = 0.03
    """Time of a request to a bucket."""

    window_bytes: float = TCP_WINDOW_BYTES
    """Bytes in flight of one TCP connection."""

    def __post_init__(self) -> None:
        rates = (self.up_bits_per_s, self.down_bits_per_s, self.coordinator_bits_per_s)
        if not all(rate > 0 for rate in rates):
            raise UsageError(f"the rates of a link must be above 0, not {min(rates)}.")
        if not (0 <= self.delay_s < math.inf and 0 <= self.request_s < math.inf):
            raise UsageError(
                f"delay_s={self.delay_s} and request_s={self.request_s} must be finite "
                "and at least 0."
            )

    def scaled(self, factor: float) -> IslandLink:
        """Return the same link with other rates of the island."""
        return replace(
            self,
            up_bits_per_s=self.up_bits_per_s * factor,
            down_bits_per_s=self.down_bits_per_s * factor,
        )

    def stream_rate(self, bits_per_s: float) -> float:
        """Return the rate of one connection: W' = min(W, window / round trip)."""
        if self.delay_s == 0:
            return bits_per_s
        return min(bits_per_s, self.window_bytes * 8 / (2 * self.delay_s))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The model and the islands that train it."""

    parameters: int
    steps_s: tuple[float, ...]
    """Seconds of an inner step, for each island."""

    tensors: tuple[Named, ...] = ()
    """Names and shapes in model order; empty if only their number is known."""

    max_fragments: int = 8
    """Fragments to plan with at most, if `tensors` are not known."""

    is_dynamic: bool = False
    """Whether slower islands make shorter windows."""

    host_s: float | None = None
    """Measured seconds per value on hosts; None: the model's own figure."""

    kind: ExchangeKind = ExchangeKind.COORDINATOR

    def __post_init__(self) -> None:
        if self.parameters < 1 or not self.steps_s:
            raise UsageError("a plan needs at least one parameter and one island.")
        if not all(0 < step_s < math.inf for step_s in self.steps_s):
            raise UsageError(
                f"the seconds of an inner step must be above 0, not {self.steps_s}."
            )

    @property
    def islands(self) -> int:
        return len(self.steps_s)

    @property
    def slowest_s(self) -> float:
        return max(self.steps_s)

    @property
    def most_fragments(self) -> int:
        """Fragments into which the model can be cut, without cutting a block."""
        if not self.tensors:
            return min(self.max_fragments, self.parameters)
        numbers = blocks([name for name, _ in self.tensors]).values()
        return max(1, len(set(numbers)))

    def sizes(self, plan: Plan) -> tuple[int, ...]:
        """Return the values of each fragment, as the run would cut the model."""
        return _sizes(self, plan.num_fragments, plan.fragment_order, plan.rest)

    def windows(self, sync_every: int) -> tuple[int, ...]:
        """Return the inner steps of each island's window."""
        fastest_s = min(self.steps_s)
        if not self.is_dynamic:
            return (sync_every,) * self.islands
        return tuple(
            max(1, math.floor(sync_every * fastest_s / step_s))
            for step_s in self.steps_s
        )


@lru_cache(maxsize=256)
def _sizes(workload: Workload, count: int, order: str, rest: str) -> tuple[int, ...]:
    if workload.tensors:
        shapes = dict(workload.tensors)
        parts = split(workload.tensors, num_fragments=count, order=order, rest=rest)
        return tuple(sum(math.prod(shapes[name]) for name in part) for part in parts)
    total = workload.parameters
    bounds = [index * total // count for index in range(count + 1)]
    return tuple(end - start for start, end in pairwise(bounds))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings that the model knows."""

    up: str
    down: str
    sync_every: int
    num_fragments: int = 1
    overlap_steps: int = 0
    fragment_order: str = "strided"
    rest: str = "balanced"

    @classmethod
    def of(cls, settings: RunSettings) -> Plan:
        """Return the plan of a run's settings.

        Raises:
            UsageError: the run is asynchronous, and no island waits for a round.
        """
        sync, wire = settings.sync, settings.wire
        if sync.is_async:
            raise UsageError(
                "The model is of synchronous rounds, and sync.mode='async'. Compare "
                "`atoll simulate RUN.toml --faults none` with both modes."
            )
        return cls(
            up=wire.up,
            down=wire.down,
            sync_every=sync.sync_every,
            num_fragments=sync.num_fragments,
            overlap_steps=sync.overlap_steps,
            fragment_order=sync.fragment_order,
            rest=sync.rest,
        )

    @property
    def wire(self) -> str:
        return f"{self.up}/{self.down}"

    def bits(self, islands: int) -> tuple[float, float]:
        """Return the bits per value up and down, scales included."""
        up = bits_of(self.up)
        if self.down == "gather":
            return up, min(islands * up, FP32_BITS)
        return up, bits_of(self.down)

    def toml(self) -> str:
        """Return the tables of a run file."""
        return (
            "[sync]\n"
            f"sync_every = {self.sync_every}\n"
            f"num_fragments = {self.num_fragments}\n"
            f"overlap_steps = {self.overlap_steps}\n\n"
            "[wire]\n"
            f'up = "{self.up}"\n'
            f'down = "{self.down}"\n'
        )


def bits_of(name: str) -> float:
    """Return the bits that a codec needs for a value, with scales and indices.

    >>> bits_of("int8"), bits_of("e3m0")
    (8.125, 4.125)
    """
    return codec(name).body_bytes(SAMPLE) * 8 / SAMPLE


@dataclass(frozen=True)
class Transfer:
    """The seconds of one fragment's exchange."""

    up_s: float
    down_s: float
    trips_s: float
    """Of delays and requests."""

    host_s: float

    @property
    def total_s(self) -> float:
        return self.trips_s + self.up_s + self.down_s + self.host_s


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The result of the model for one plan."""

    cycle_s: float
    """Seconds of a round: of one window with its waits, at the slowest island."""

    utilisations: tuple[float, ...]
    """Share of its time that each island computes."""

    stall_s: float
    """Of a round, at the slowest island."""

    transfers: tuple[Transfer, ...]
    """By fragment."""

    bytes_up: float
    bytes_down: float
    """Of an island in a round."""

    link_s: float
    """Time for which the busiest direction of a link is in use in a round."""

    @property
    def utilisation(self) -> float:
        """Of the busiest island: the others wait for it, not for the link."""
        return max(self.utilisations)

    @property
    def is_full(self) -> bool:
        """Whether the link, not a wait of a fragment, bounds the cycle."""
        return self.link_s >= self.cycle_s * (1 - 1e-9)


def transfers_of(
    workload: Workload, link: IslandLink, plan: Plan
) -> tuple[Transfer, ...]:
    """Return the exchange of each fragment."""
    return tuple(_transfer(workload, link, plan, size) for size in workload.sizes(plan))


def _transfer(workload: Workload, link: IslandLink, plan: Plan, size: int) -> Transfer:
    up_bits, down_bits = (size * bits for bits in plan.bits(workload.islands))
    up_bits, down_bits = _carried(workload, up_bits, down_bits)
    islands = workload.islands
    per_value_s = workload.host_s
    if per_value_s is None:
        per_value_s = SEAL_S + ADOPT_S + REDUCE_S * islands
    up_s = up_bits / link.stream_rate(link.up_bits_per_s)
    down_s = down_bits / link.stream_rate(link.down_bits_per_s)
    trips_s = 4 * link.delay_s
    if workload.kind is ExchangeKind.COORDINATOR:
        up_s = max(up_s, islands * up_bits / link.coordinator_bits_per_s)
        down_s = max(down_s, islands * down_bits / link.coordinator_bits_per_s)
    elif workload.kind is ExchangeKind.STORE:
        trips_s = STORE_REQUESTS * link.request_s
    else:
        trips_s = 2 * (islands - 1) * link.delay_s
    return Transfer(up_s, down_s, trips_s, size * per_value_s)


def _carried(
    workload: Workload, up_bits: float, down_bits: float
) -> tuple[float, float]:
    """Return the bits that an island sends and receives for one fragment."""
    islands = workload.islands
    if workload.kind is ExchangeKind.COORDINATOR:
        return up_bits, down_bits
    if workload.kind is ExchangeKind.COLLECTIVE:
        share = (islands - 1) / islands  # of a reduce-scatter, then of an all-gather
        return share * (up_bits + down_bits), share * (up_bits + down_bits)
    if islands < 4:
        return up_bits, (islands - 1) * up_bits
    # Each island reduces a part of the fragment, and reads the other parts.
    return (
        up_bits + down_bits / islands,
        (islands - 1) / islands * (up_bits + down_bits),
    )


def predict(workload: Workload, link: IslandLink, plan: Plan) -> Prediction:
    """Return the utilisation of a plan by the closed form."""
    transfers = transfers_of(workload, link, plan)
    link_s = busy_link_s(link, transfers)
    cycle_s = stall_s = 0.0
    windows = workload.windows(plan.sync_every)
    for window, step_s in zip(windows, workload.steps_s, strict=True):
        # A shorter window takes longer strides, so the overlap shrinks with it.
        overlap_s = plan.overlap_steps * window / plan.sync_every * step_s
        stalls_s = sum(max(0.0, part.total_s - overlap_s) for part in transfers)
        island_s = max(window * step_s + stalls_s, link_s)
        if island_s > cycle_s:
            cycle_s, stall_s = island_s, island_s - window * step_s
    return _prediction(workload, plan, transfers, cycle_s, stall_s, link_s)


def _prediction(
    workload: Workload,
    plan: Plan,
    transfers: tuple[Transfer, ...],
    cycle_s: float,
    stall_s: float,
    link_s: float,
) -> Prediction:
    up_bits, down_bits = plan.bits(workload.islands)
    up_bits, down_bits = _carried(
        workload, workload.parameters * up_bits, workload.parameters * down_bits
    )
    windows = workload.windows(plan.sync_every)
    return Prediction(
        cycle_s=cycle_s,
        utilisations=tuple(
            window * step_s / cycle_s
            for window, step_s in zip(windows, workload.steps_s, strict=True)
        ),
        stall_s=stall_s,
        transfers=transfers,
        bytes_up=up_bits / 8,
        bytes_down=down_bits / 8,
        link_s=link_s,
    )


def with_cycle(
    workload: Workload, link: IslandLink, plan: Plan, *, cycle_s: float
) -> Prediction:
    """Return the prediction for a cycle that `timeline` found."""
    transfers = transfers_of(workload, link, plan)
    slowest_s = max(
        window * step_s
        for window, step_s in zip(
            workload.windows(plan.sync_every), workload.steps_s, strict=True
        )
    )
    return _prediction(
        workload,
        plan,
        transfers,
        cycle_s,
        cycle_s - slowest_s,
        busy_link_s(link, transfers),
    )


def busy_link_s(link: IslandLink, transfers: Sequence[Transfer]) -> float:
    """Return for how long a round occupies the busiest direction of a link."""
    up_s = sum(part.up_s for part in transfers)
    down_s = sum(part.down_s for part in transfers)
    return up_s + down_s if link.is_shared else max(up_s, down_s)


def min_sync_every(workload: Workload, link: IslandLink, plan: Plan) -> float:
    """Return the inner steps per round below which the link is full.

    H_min = N max(b_up / W_up, b_down / W_down) / T: no other setting helps below it.
    """
    return busy_link_s(link, transfers_of(workload, link, plan)) / workload.slowest_s


def min_overlap(workload: Workload, link: IslandLink, plan: Plan) -> int:
    """Return the overlap that hides an exchange of any fragment: ceil(X / T)."""
    longest_s = max(part.total_s for part in transfers_of(workload, link, plan))
    return math.ceil(longest_s / workload.slowest_s - 1e-9)


def data_parallel(workload: Workload, link: IslandLink) -> float:
    """Return the utilisation of data parallel, which reduces bf16 in every step.

    U = T / (T + 2 (M - 1) / M * 16 N / W' + 2 (M - 1) d), with a ring over the links.
    """
    islands, step_s = workload.islands, workload.slowest_s
    rate = min(
        link.stream_rate(link.up_bits_per_s), link.stream_rate(link.down_bits_per_s)
    )
    share = 2 * (islands - 1) / islands
    transfer_s = share * BF16_BITS * workload.parameters / rate
    return step_s / (step_s + transfer_s + 2 * (islands - 1) * link.delay_s)
