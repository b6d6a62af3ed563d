"""The past of one island: the last values that events have reported of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.telemetry.curves import GROWING

LAST_MARKS = 24
"""Marks of an island's last rounds, which are never merged."""


@dataclass(slots=True)
class IslandPast:
    """The values that events have reported of an island."""

    name: str
    index: int
    """Its place in marks."""

    incarnation: int | None = None
    version: str | None = None
    state: str = "live"
    """live, silent or left, by the last event."""

    left_because: str | None = None
    joined_unix_s: list[float] = field(default_factory=list)
    """Of its last incarnations."""

    deaths: int = 0
    """Incarnations that ended without a leave."""

    counted: int = 0
    late: int = 0
    refused: int = 0
    last_verdict: str | None = None
    refused_because: str | None = None
    refused_unix_s: float | None = None
    marks: str = ""
    """Of its last rounds, the newest last."""

    round: int | None = None
    loss: float | None = None
    loss_is_finite: bool | None = None
    tokens: int | None = None
    inner_steps: int | None = None
    seconds: float | None = None
    wait_s: float | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    dropped_steps: int | None = None
    dropped_unix_s: float | None = None
    carried: int | None = None
    dropped: int | None = None
    exchange_s: float | None = None
    hidden_s: float | None = None
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    rtt_s: float | None = None
    machine: str | None = None
    step_s: float | None = None
    window: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    reported_unix_s: float | None = None
    """When it last reported its progress."""

    before: dict[str, float] = field(default_factory=dict)
    """Totals of earlier incarnations, which begin again at 0."""

    news: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Sum and number of the losses since the last tick."""

    round_news: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """The same since the last round of the run."""

    def totals(self) -> dict[str, float]:
        """Return what only grows, over all incarnations."""
        values = {name: getattr(self, name) for name in GROWING}
        return {
            name: milliseconds(value) + self.before.get(name, 0)
            for name, value in values.items()
            if value is not None
        }

    def mark(self, mark: str) -> None:
        """Append the mark of a round."""
        self.marks = (self.marks + mark)[-LAST_MARKS:]


RESET = ("seconds", "wait_s", "bytes_up", "bytes_down")
"""Totals that begin again with each incarnation."""


def milliseconds(value: float) -> float:
    """Return seconds with three decimals; a whole number unchanged."""
    return round(value, 3) if isinstance(value, float) else value
