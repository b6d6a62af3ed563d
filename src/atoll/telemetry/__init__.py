"""Owns the view of a run: events, their sinks, metrics and the status page.

Does not know which code emits events, nor how a reader requests them.
Start reading at `events`, then `bus.EventBus`; `prometheus` and `status_page` are pure.

`tensorboard` is imported by its own name: it needs an optional extra.
"""

from atoll.telemetry.bus import (
    Counters,
    EventBus,
    JsonlWriter,
    Sink,
    Subscription,
)
from atoll.telemetry.events import (
    EVENTS,
    Event,
    EventField,
    EventKind,
    ValueKind,
)
from atoll.telemetry.prometheus import METRICS, Metric, render
from atoll.telemetry.status_page import render_status

__all__ = [
    "EVENTS",
    "METRICS",
    "Counters",
    "Event",
    "EventBus",
    "EventField",
    "EventKind",
    "JsonlWriter",
    "Metric",
    "Sink",
    "Subscription",
    "ValueKind",
    "render",
    "render_status",
]
