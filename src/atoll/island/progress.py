"""The progress of an island: counters, pace, link, the work in each update, the clock.

Counters are for loggers and for the headers of updates. The step timer measures the
pace, by which the run sets the island's window. The ledger assigns inner steps and
tokens to updates, and settles them when outcomes arrive. The run clock is the last
position that the run has reported, between two synchronisations.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, SupportsFloat

from atoll import __version__
from atoll.errors import AtollWarning, UsageError
from atoll.island.deal import Deal
from atoll.island.fragment import IslandFragment, UpdateInFlight
from atoll.island.saved_state import AppliedOutcome
from atoll.protocol import JoinReply, Position, Stats, WorkDecision
from atoll.protocol.island import CARRIED_ROUNDS
from atoll.runtime import Clock
from atoll.settings import SyncSection
from atoll.wire import Verdict, blake3_digest

Number = float | int

FIRST_REPORTS = 3
"""Number of losses that identify the rows an island has begun with."""


@dataclass
class IslandCounters:
    """Counters of one island since it joined."""

    inner_steps: int = 0
    tokens: int = 0
    earlier_steps: int = 0
    earlier_tokens: int = 0
    """The part of the two above that was made before the run began, by the island
    whose checkpoint founded it. The run does not count it."""

    wait_s: float = 0.0
    """Time that training waited for outcomes."""

    bytes_up: int = 0
    bytes_down: int = 0
    counted: int = 0
    carried: int = 0
    refused: int = 0
    dropped: int = 0
    dropped_steps: int = 0
    """Inner steps in dropped updates, of the fragment that lost most."""

    not_counted_steps: int = 0
    """Inner steps that no round will have: after the last seal of an ended run, or not
    published when the island left."""

    reported: dict[str, SupportsFloat] = field(default_factory=dict)
    """The last arguments of `report`, not converted: that may cost a device sync."""

    first_batch: str | None = None
    """A digest of the first batch, if the front end has seen it."""

    first_losses: list[tuple[int, SupportsFloat | None]] = field(default_factory=list)
    """Tokens and loss of the first reports, not converted."""

    costs: Callable[[], Mapping[str, Number]] = dict
    """Returns the costs of the connection to the run and its link, as metrics."""

    exchanges: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By fragment: seconds of the last exchange, and of training meanwhile."""

    evaluated: tuple[int, dict[str, SupportsFloat]] | None = None
    """The last evaluated round, and the metrics of its anchor, not converted."""

    machine: str = ""
    """Devices and framework, as the front end describes them."""

    def stats(self, seconds: float) -> Stats:
        """Return the statistics for status displays, `seconds` after the join."""
        loss = self._loss()
        is_finite = None if loss is None else math.isfinite(loss)
        costs, exchanges = self.costs(), list(self.exchanges.values())
        anchor_round, measured = self.evaluated or (None, {})
        anchor_metrics = sent_metrics(measured, max_bytes=MAX_ANCHOR_METRICS_BYTES)
        return Stats(
            version=__version__,
            seconds=seconds,
            inner_steps=self.inner_steps,
            tokens=self.tokens,
            loss=loss if is_finite else None,
            loss_is_finite=is_finite,
            metrics=sent_metrics(self.reported) or None,
            wait_s=self.wait_s,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            first_batch=self.began_with(),
            dropped_steps=self.dropped_steps or None,
            anchor_metrics=anchor_metrics or None,
            anchor_round=anchor_round if anchor_metrics else None,
            exchange_s=_four(sum(row[0] for row in exchanges) if exchanges else None),
            hidden_s=_four(sum(row[1] for row in exchanges) if exchanges else None),
            up_bytes_per_s=_four(costs.get("atoll/up_bytes_per_s")),
            down_bytes_per_s=_four(costs.get("atoll/down_bytes_per_s")),
            rtt_s=_four(costs.get("atoll/rtt_s")),
            carried=self.carried or None,
            dropped=self.dropped or None,
            store_usd=_four(costs.get("atoll/store_usd")),
            machine=_short_machine(self.machine),
        )

    def note_exchange(self, fragment: int, seconds: float, *, waited_s: float) -> None:
        """Store how long an exchange took, and how long training waited for it."""
        self.exchanges[fragment] = seconds, max(0.0, seconds - waited_s)

    def note_anchor(self, round: int, loss: Any, metrics: Mapping[str, Any]) -> None:
        """Add to the metrics of the anchor of a round, not converted."""
        values: dict[str, SupportsFloat] = {}
        if self.evaluated is not None and self.evaluated[0] == round:
            values |= self.evaluated[1]
        if loss is not None:
            values["eval_loss"] = loss
        self.evaluated = round, {**values, **metrics}

    def note_report(
        self, tokens: int, loss: Any, metrics: Mapping[str, Any], *, count: str
    ) -> None:
        """Store the report of an inner step; of the first ones, tokens and loss too.

        Raises:
            UsageError: `tokens` is no count; the message suggests `count`.
        """
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise UsageError(
                f"tokens={tokens!r} must be a whole number of at least 0. Use {count}."
            )
        if len(self.first_losses) < FIRST_REPORTS:
            self.first_losses.append((tokens, loss))
        self.reported = dict(metrics if loss is None else {"loss": loss, **metrics})

    def began_with(self) -> str | None:
        """Return a digest of the first batch, or of the first losses on it.

        Islands that begin together have the same weights, so several bitwise equal
        losses mean equal rows. A single loss may be equal for any rows, for example
        that of a model whose last layer is zero.
        """
        if self.first_batch is not None or len(self.first_losses) < FIRST_REPORTS:
            return self.first_batch
        losses = [math.nan if x is None else float(x) for _, x in self.first_losses]
        if not all(map(math.isfinite, losses)) or len(set(losses)) == 1:
            return None
        counts = [str(tokens) for tokens, _ in self.first_losses]
        text = " ".join([*counts, *(loss.hex() for loss in losses)])
        self.first_batch = "losses-" + blake3_digest(text.encode()).hex()[:16]
        return self.first_batch

    def _loss(self) -> float | None:
        """Return the loss as last reported; this may wait for a device."""
        reported = self.reported.get("loss")
        return None if reported is None else float(reported)

    def summary(self) -> str:
        """Return one sentence about the outcome of the island's work."""
        return (
            f"{self.inner_steps} inner steps; updates: {self.counted} counted, "
            f"{self.carried} carried, {self.refused} refused, {self.dropped} dropped; "
            f"inner steps lost: {self.dropped_steps} dropped after missed rounds, "
            f"{self.not_counted_steps} not counted at the end"
        )

    def metrics(self) -> dict[str, Number]:
        """Return the counters under the names that loggers see."""
        return {
            "atoll/inner_steps": self.inner_steps,
            "atoll/tokens": self.tokens,
            "atoll/wait_s": self.wait_s,
            "atoll/bytes_up": self.bytes_up,
            "atoll/bytes_down": self.bytes_down,
            "atoll/updates_counted": self.counted,
            "atoll/updates_carried": self.carried,
            "atoll/updates_refused": self.refused,
            "atoll/updates_dropped": self.dropped,
            "atoll/dropped_steps": self.dropped_steps,
            "atoll/not_counted_steps": self.not_counted_steps,
            **self.costs(),
        }


MAX_METRICS, MAX_METRIC_NAME_BYTES = 16, 64
MAX_METRICS_BYTES, MAX_ANCHOR_METRICS_BYTES = 280, 100
"""Size of the metrics in a heartbeat, as JSON."""

MAX_MACHINE_BYTES = 64


def _four(value: Number | None) -> float | None:
    """Return a measured number with four digits, so that heartbeats are small."""
    return None if value is None else float(f"{value:.4g}")


def _short_machine(machine: str) -> str | None:
    # Names of devices are ASCII; anything else might not fit into the limit.
    plain = machine.encode("ascii", "replace").decode()
    return plain[:MAX_MACHINE_BYTES] or None


def sent_metrics(
    reported: Mapping[str, Any], *, max_bytes: int = MAX_METRICS_BYTES
) -> dict[str, float]:
    """Return the first finite metrics besides the loss, as many as a heartbeat takes.

    With six significant digits. This may wait for a device.
    """
    metrics: dict[str, float] = {}
    bytes_left = max_bytes
    for name, value in reported.items():
        number = _number_of(value)
        bytes_left -= len(json.dumps([name, number])) + 2
        is_short = len(name.encode(errors="replace")) <= MAX_METRIC_NAME_BYTES
        if name == "loss" or number is None or not is_short:
            continue
        if bytes_left < 0 or len(metrics) >= MAX_METRICS:
            break
        metrics[name] = number
    return metrics


def _number_of(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None  # a loop may report a text, or a tensor of several values
    return float(f"{number:.6g}") if math.isfinite(number) else None


TIMED_STEPS = 32
"""Inner steps whose median is the pace: it follows a change within half of them."""

FIRST_STEPS = 4
"""Inner steps before a pace is known: the first ones compile and fill caches."""

MEDIAN_EVERY_S = 0.1
"""A median costs some microseconds, and heartbeats leave seconds apart."""


class StepTimer:
    """Measures the pace of an island: the median seconds of its last inner steps.

    An inner step is the time from the end of one `stepped` to the begin of the next.
    So no wait for an outcome is in it, and an evaluation between two inner steps does
    not move the median.
    """

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=TIMED_STEPS)
        self._began_s: float | None = None
        self._next_median_s = -math.inf
        self.median_s: float | None = None
        """None before `FIRST_STEPS` inner steps, or if the clock shows no time."""

    def begin(self, now_s: float) -> None:
        """Note that an inner step begins."""
        self._began_s = now_s

    def end(self, now_s: float) -> None:
        """Note that the inner step has been made."""
        if self._began_s is None:
            return
        self._steps_s.append(now_s - self._began_s)
        if now_s >= self._next_median_s and len(self._steps_s) >= FIRST_STEPS:
            self._next_median_s = now_s + MEDIAN_EVERY_S
            median_s = statistics.median(self._steps_s)
            self.median_s = median_s if median_s > 0.0 else None


def window_of(window: int, sync: SyncSection) -> int:
    """Return the inner steps per window that a number of the run stands for.

    0 stands for those of the schedule, and no island makes more.
    """
    return min(window or sync.sync_every, sync.sync_every)


MIN_BYTES = 256 * 1024
"""In smaller bodies latency outweighs bandwidth."""

TRANSFERS = 16
"""Transfers whose median is the rate."""


class LinkMeter:
    """Measures the link to the run by its transfers. Thread-safe.

    The time of an upload includes the reply; that of a download begins with its first
    byte, so that a long poll is no slow link.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._by_name: dict[str, deque[float]] = {}

    def now_s(self) -> float:
        return self._clock.now_s()

    def sent(self, size_bytes: int, since_s: float) -> None:
        """Note an upload that began at `since_s` and is complete now."""
        self._note_rate("atoll/up_bytes_per_s", size_bytes, since_s)

    def received(self, size_bytes: int, since_s: float) -> None:
        """Note a download whose first byte came at `since_s`."""
        self._note_rate("atoll/down_bytes_per_s", size_bytes, since_s)

    def answered(self, since_s: float) -> None:
        """Note the reply to a small request that was sent at `since_s`."""
        self._note("atoll/rtt_s", self.now_s() - since_s)

    def metrics(self) -> dict[str, float]:
        """Return the medians that are known, under the names that loggers see."""
        with self._lock:
            return {
                name: statistics.median(values)
                for name, values in self._by_name.items()
            }

    def _note_rate(self, name: str, size_bytes: int, since_s: float) -> None:
        seconds = self.now_s() - since_s
        if size_bytes >= MIN_BYTES and seconds > 0.0:
            self._note(name, size_bytes / seconds)

    def _note(self, name: str, value: float) -> None:
        with self._lock:
            self._by_name.setdefault(name, deque(maxlen=TRANSFERS)).append(value)


log = logging.getLogger("atoll")


class WorkLedger:
    """Updates the counters of an island by the outcomes of its updates."""

    def __init__(
        self, joined: JoinReply, counters: IslandCounters, deal: Deal | None = None
    ) -> None:
        self._island, self._settings = joined.island, joined.settings
        self._counters, self._deal = counters, deal

    def weight(self, slot: IslandFragment) -> int:
        """Return the weight of an update that is sealed now.

        Raises:
            UsageError: the run weights updates by tokens, and none were reported.
        """
        by_tokens = self._settings.outer.weight == "tokens"
        if not by_tokens and self._settings.run.end_tokens is None:
            return 1
        settled_steps, settled_tokens = self._settled(slot)
        tokens = self._counters.tokens - settled_tokens
        if tokens < 1 and self._counters.inner_steps > settled_steps:
            key = "outer.weight='tokens'" if by_tokens else "run.end_tokens"
            raise UsageError(
                f"Island {self._island!r} has reported {tokens} tokens since its "
                f"last update, and {key} needs them. "
                "Call island.report(tokens=...) before every optimizer step."
            )
        return max(1, tokens) if by_tokens else 1

    def cursor(self, slot: IslandFragment) -> bytes:
        """Return the packed turns of the rows in an update that is sealed now."""
        if self._deal is None:
            return b""
        settled_steps, _ = self._settled(slot)
        in_flight = slot.sealed
        if (
            in_flight is not None
            and in_flight.frame is None
            and in_flight.outcome is None
        ):
            settled_steps = slot.settled_steps  # its seal was interrupted
        return self._deal.cursor(settled_steps, self._counters.inner_steps)

    def has_rest(self, slot: IslandFragment) -> bool:
        """Return whether inner steps of a fragment are in no update."""
        settled_steps, _ = self._settled(slot)
        return self._counters.inner_steps != settled_steps

    def count(
        self, slot: IslandFragment, sealed: UpdateInFlight, arrival: AppliedOutcome
    ) -> None:
        """Enter the outcome of an update."""
        match arrival.decision:
            case WorkDecision.ADOPT | WorkDecision.REBASE:
                self._counters.counted += 1
                slot.settle(sealed.inner_steps, sealed.tokens)
            case WorkDecision.CARRY:
                self._counters.carried += 1
            case WorkDecision.DROP:
                self._counters.counted += arrival.verdict is Verdict.COUNTED
                self._counters.dropped += 1
                if arrival.reason:
                    self._warn_counted_already(slot, arrival)
                else:
                    self._warn_dropped(slot, sealed, arrival.verdict)
                    self._drop_rows(slot, slot.settled_steps)
                slot.settle(self._counters.inner_steps, self._counters.tokens)
            case WorkDecision.REFUSE:
                self._counters.refused += 1
                self._drop_rows(slot, sealed.inner_steps)
                slot.settle(self._counters.inner_steps, self._counters.tokens)
                self._warn_refused(slot, sealed, arrival)

    def lose(self, slot: IslandFragment) -> None:
        """Warn about work since the last seal that no round has taken, if any."""
        steps, tokens = self._unsettled(slot)
        self._note_lost(steps)
        if steps:
            warnings.warn(
                f"Island {self._island!r} leaves, and no round took its work on "
                f"fragment {slot.index} since round {slot.state.round}: "
                f"{steps} inner steps are lost, with {tokens} tokens.",
                AtollWarning,
                stacklevel=2,
            )

    def lose_all(self, slots: list[IslandFragment]) -> None:
        """Count as lost the work in no update, of the fragment that loses most."""
        self._note_lost(max(self._unsettled(slot)[0] for slot in slots))

    def end(self, slots: list[IslandFragment]) -> None:
        """Count the inner steps that the run has ended without."""
        last = min(slot.settled_steps for slot in slots)
        self._counters.not_counted_steps = self._counters.inner_steps - last

    def _settled(self, slot: IslandFragment) -> tuple[int, int]:
        """Return the inner steps and tokens that no further update has to hold."""
        in_flight = slot.sealed
        if in_flight is None or (
            in_flight.outcome and in_flight.outcome.decision is WorkDecision.CARRY
        ):
            return slot.settled_steps, slot.settled_tokens
        return in_flight.inner_steps, in_flight.tokens

    def _unsettled(self, slot: IslandFragment) -> tuple[int, int]:
        """Return the inner steps and tokens that are in no update of a fragment.

        An update in flight whose outcome is an error counts as none.
        """
        steps, tokens = self._settled(slot)
        in_flight = slot.sealed
        if in_flight and in_flight.arrival.done() and in_flight.arrival.exception():
            steps, tokens = slot.settled_steps, slot.settled_tokens
        return self._counters.inner_steps - steps, self._counters.tokens - tokens

    def _drop_rows(self, slot: IslandFragment, settled_steps: int) -> None:
        """Note the rows of inner steps whose work is lost, and that no round has."""
        if self._deal is not None:
            self._deal.drop(slot.index, settled_steps, self._counters.inner_steps)

    def _note_lost(self, steps: int) -> None:
        self._counters.not_counted_steps = max(self._counters.not_counted_steps, steps)

    def _warn_counted_already(
        self, slot: IslandFragment, arrival: AppliedOutcome
    ) -> None:
        steps = self._counters.inner_steps - slot.settled_steps
        tokens = self._counters.tokens - slot.settled_tokens
        warnings.warn(
            f"Island {self._island!r} takes the anchor of fragment {slot.index}, and "
            f"drops {steps} inner steps with {tokens} tokens since its checkpoint: "
            f"{arrival.reason}. They are in the anchor already.",
            AtollWarning,
            stacklevel=2,
        )

    def _warn_dropped(
        self, slot: IslandFragment, sealed: UpdateInFlight, verdict: Verdict
    ) -> None:
        if verdict is Verdict.COUNTED:
            # It counted rounds ago: only the work since its seal is dropped.
            slot.settle(sealed.inner_steps, sealed.tokens)
        steps = self._counters.inner_steps - slot.settled_steps
        tokens = self._counters.tokens - slot.settled_tokens
        slot.dropped_steps += steps
        self._counters.dropped_steps = max(
            self._counters.dropped_steps, slot.dropped_steps
        )
        log.warning(
            "island %s missed round %d of fragment %d, after %d others in a row: %d "
            "inner steps with %d tokens are dropped, and its weights are the anchor's. "
            "Raise run.patience or limits.deadline_max_s, or give it a faster link.",
            self._island,
            sealed.round,
            slot.index,
            CARRIED_ROUNDS,
            steps,
            tokens,
        )

    def _warn_refused(
        self, slot: IslandFragment, sealed: UpdateInFlight, arrival: AppliedOutcome
    ) -> None:
        warnings.warn(
            f"Round {sealed.listed or sealed.round} refused fragment "
            f"{slot.index} of island "
            f"{self._island!r}: {arrival.reason}. "
            "Its weights are the anchor's again; the work since is lost.",
            AtollWarning,
            stacklevel=2,
        )


@dataclass(frozen=True, kw_only=True)
class RunClock:
    """The run's clock at the last synchronisation. Equal on all ranks of an island."""

    syncs: int = 0
    """Number of synchronisations so far: it differs if any other field may differ."""

    rounds: int = 0
    """Rounds that every fragment had committed."""

    tokens: int = 0
    """Tokens that the run had counted."""

    step: int = 0
    """The schedule step that this island had reached."""

    last_round: int | None = None
    decay_round: int | None = None
    end_tokens: int | None = None

    @classmethod
    def of(cls, position: Position, *, syncs: int, step: int) -> RunClock:
        """Return the clock of a run at a position, for an island at a schedule step."""
        return cls(
            syncs=syncs,
            rounds=min(position.rounds, default=1) - 1,
            tokens=position.tokens,
            step=step,
            last_round=position.last_round,
            decay_round=position.decay_round,
            end_tokens=position.end_tokens,
        )

    def to_dict(self) -> dict[str, int | None]:
        """Return the fields as plain values, for a checkpoint or another rank."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, int | None]) -> RunClock:
        """Return the clock that `to_dict` has made plain values of."""
        return cls(**values)  # type: ignore[arg-type]

    def tokens_at(self, step: int, *, sync_every: int | None) -> float | None:
        """Return the tokens that will have counted at a schedule step, at this pace.

        The pace is the mean since the beginning of the run, so that islands that join
        late compute the same. None before anything has counted. `sync_every` is None in
        an asynchronous run, whose rounds have no fixed steps: there the pace is the
        tokens of all islands per schedule step of this one.
        """
        if sync_every is not None:
            steps = self.rounds * sync_every
        else:
            steps = self.step if self.tokens else 0
        return self.tokens * step / steps if steps else None
