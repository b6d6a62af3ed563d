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
from atoll.telemetry.event_files import EventFiles, EventPage
from atoll.telemetry.events import (
    EVENTS,
    Event,
    EventField,
    EventKind,
    ValueKind,
)
from atoll.telemetry.findings import Finding, Severity, findings
from atoll.telemetry.history import history
from atoll.telemetry.past import Past
from atoll.telemetry.past_recorder import PastRecorder, load_past
from atoll.telemetry.prometheus import METRICS, Metric, render
from atoll.telemetry.row_page import render_rows
from atoll.telemetry.status_page import render_head, render_status
from atoll.telemetry.status_past import with_past

__all__ = [
    "EVENTS",
    "METRICS",
    "Counters",
    "Event",
    "EventBus",
    "EventField",
    "EventFiles",
    "EventKind",
    "EventPage",
    "Finding",
    "JsonlWriter",
    "Metric",
    "Past",
    "PastRecorder",
    "Severity",
    "Sink",
    "Subscription",
    "ValueKind",
    "findings",
    "history",
    "load_past",
    "render",
    "render_head",
    "render_rows",
    "render_status",
    "with_past",
]
