"""Owns what is seen of a run: events, their sinks, metrics, the page of a status.

Does not know who emits, nor how a reader asks.
Start reading at `events`, then `hub.Events`; `prometheus` and `status_view` are pure.

`tensorboard` is imported by its own name: it needs an optional extra.
"""

from atoll.telemetry.events import EVENTS, Event, EventKind, Field
from atoll.telemetry.hub import Counters, Events, Sink, Subscription
from atoll.telemetry.jsonl import JsonlWriter
from atoll.telemetry.kinds import Kind
from atoll.telemetry.prometheus import METRICS, Metric, render
from atoll.telemetry.status_view import render_status

__all__ = [
    "EVENTS",
    "METRICS",
    "Counters",
    "Event",
    "EventKind",
    "Events",
    "Field",
    "JsonlWriter",
    "Kind",
    "Metric",
    "Sink",
    "Subscription",
    "render",
    "render_status",
]
