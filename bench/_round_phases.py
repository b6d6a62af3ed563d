"""Where a round's time goes: the spans of `atoll.trace`, added up by phase."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

Span = tuple[str, float, float, float]
"""Phase, start, end, and the CPU time of its thread, in seconds."""

Part = tuple[float, float]
"""Seconds, and seconds of CPU time."""

PHASES = ("seal", "send", "reduce", "journal", "receive", "apply", "digest")


class Phases:
    """Collects spans, from any thread. `collect` is a sink of `atoll.trace`."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    @contextmanager
    def collect(self, phase: str) -> Iterator[None]:
        """Time a phase, by the clock and by the CPU of its thread."""
        start_s, cpu_s = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            used_s = time.thread_time() - cpu_s
            span = (phase, start_s, time.monotonic(), used_s)
            with self._lock:
                self._spans.append(span)

    def take(self) -> list[Span]:
        """Return the spans since the last time."""
        with self._lock:
            taken, self._spans = self._spans, []
        return taken


def took(spans: Sequence[Span], phase: str) -> Part:
    """Return how long a phase took, all its calls together."""
    calls = [span for span in spans if span[0] == phase]
    return (
        sum(end_s - start_s for _, start_s, end_s, _ in calls),
        sum(cpu_s for *_, cpu_s in calls),
    )


def split(
    whole: Part, islands: Sequence[Sequence[Span]], coordinator: Sequence[Span]
) -> dict[str, Part]:
    """Return the parts of a round, one after the other.

    An island's part is the mean over the islands. The rest is what waits: for another
    island, for a core, for an answer. What happens while others send comes last.
    """
    parts = {
        **{f"{phase} (island)": mean(islands, phase) for phase in PHASES},
        "receive (island)": received(islands, coordinator),
        **{f"{phase} (coordinator)": took(coordinator, phase) for phase in PHASES},
    }
    parts = {name: part for name, part in parts.items() if any(part)}
    parts["rest"] = (whole[0] - sum(seconds for seconds, _ in parts.values()), 0.0)
    parts["all processes"] = whole
    for within in ("check", "spool"):
        parts[f"[{within}, of all that is sent]"] = took(coordinator, within)
    return parts


def mean(sides: Sequence[Sequence[Span]], phase: str) -> Part:
    """Return a phase of several processes at once."""
    parts = [took(each, phase) for each in sides]
    seconds, cpu = (sum(column) / len(parts) for column in zip(*parts, strict=True))
    return seconds, cpu


def received(islands: Sequence[Sequence[Span]], coordinator: Sequence[Span]) -> Part:
    """Return how long outcomes take to arrive once they are durable."""
    durable_s = max(end_s for what, _, end_s, _ in coordinator if what == "journal")
    arrived = [
        max(span[2] for span in each if span[0] == "outcome") for each in islands
    ]
    cpu_s = mean(islands, "outcome")[1]
    return sum(arrived) / len(arrived) - durable_s, cpu_s
