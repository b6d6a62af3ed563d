"""What an island counts of itself, for loggers and for its updates' headers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

from atoll import __version__
from atoll.errors import UsageError
from atoll.protocol import Stats
from atoll.wire import blake3_digest

Number = float | int

FIRST_REPORTS = 3
"""So many losses tell the rows that an island has begun with."""


@dataclass
class Tally:
    """Counters of one island since it joined."""

    inner_steps: int = 0
    tokens: int = 0
    wait_s: float = 0.0
    """Time that training stood still for an outcome."""

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
    given away when the island left."""

    reported: dict[str, SupportsFloat] = field(default_factory=dict)
    """What `report` was given last, untouched: reading it may cost a device sync."""

    first_batch: str | None = None
    """A digest of what the island began with, if somebody has seen it."""

    first_losses: list[tuple[int, SupportsFloat | None]] = field(default_factory=list)
    """Tokens and loss of the first reports, untouched."""

    costs: Callable[[], Mapping[str, Number]] = dict
    """What the way to the run has cost, if somebody counts it."""

    def stats(self, seconds: float) -> Stats:
        """Return what people are told, `seconds` after the island joined."""
        return Stats(
            version=__version__,
            seconds=seconds,
            inner_steps=self.inner_steps,
            tokens=self.tokens,
            loss=self._loss(),
            wait_s=self.wait_s,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            first_batch=self.began_with(),
            dropped_steps=self.dropped_steps or None,
        )

    def note_report(
        self, tokens: int, loss: Any, metrics: Mapping[str, Any], *, count: str
    ) -> None:
        """Keep what was reported of an inner step, and what the first were made on.

        Raises:
            UsageError: `tokens` is no count; `count` is how one is had.
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

        Islands that begin together have the same weights: equal losses, to the bit and
        several times, come of equal rows. One alone may be equal for any, as that of a
        model whose last layer is zero.
        """
        if self.first_batch is not None or len(self.first_losses) < FIRST_REPORTS:
            return self.first_batch
        losses = [math.nan if x is None else float(x) for _, x in self.first_losses]
        if not all(map(math.isfinite, losses)) or len(set(losses)) == 1:
            return None
        counts = [str(tokens) for tokens, _ in self.first_losses]
        said = " ".join([*counts, *(loss.hex() for loss in losses)])
        self.first_batch = "losses-" + blake3_digest(said.encode()).hex()[:16]
        return self.first_batch

    def _loss(self) -> float | None:
        """Return the loss as last reported; this may wait for a device."""
        reported = self.reported.get("loss")
        loss = math.nan if reported is None else float(reported)
        return loss if math.isfinite(loss) else None

    def summary(self) -> str:
        """Return in one sentence what became of the island's work."""
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
