"""Named spans of a host's phases, for benches and profilers; off by default.

A host wraps a phase of its work in `with span("reduce"):`. Without a sink, every span
is the same context manager, which does nothing. A sink decides what to record: this
module reads no clock. Pure code and kernels have no spans: their callers time them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Sink = Callable[[str], AbstractContextManager[object]]
"""Called with the name of a span by the thread that enters it, which may be any."""

OFF = nullcontext()
_sink: Sink | None = None


def span(name: str) -> AbstractContextManager[object]:
    """Return a context manager that the sink provides, or `OFF` without a sink."""
    return OFF if _sink is None else _sink(name)


def install(sink: Sink | None) -> None:
    """Send the spans of this process to `sink` from now on; None turns them off."""
    global _sink
    _sink = sink
