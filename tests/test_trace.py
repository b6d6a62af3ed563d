"""Spans name the phases of a host's work, and are off unless a sink is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from atoll import trace


@pytest.fixture(autouse=True)
def _off_afterwards() -> Iterator[None]:
    yield
    trace.install(None)


def test_without_a_sink_every_span_is_the_same_object() -> None:
    """A span that is off allocates nothing and records nothing."""
    assert trace.span("reduce") is trace.OFF
    assert trace.span("journal") is trace.OFF


def test_a_sink_sees_spans_enter_and_exit_by_name() -> None:
    """A sink provides the context manager of every span that follows."""
    seen: list[tuple[str, str]] = []

    @contextmanager
    def sink(name: str) -> Iterator[None]:
        seen.append(("enter", name))
        yield
        seen.append(("exit", name))

    trace.install(sink)
    with trace.span("apply"), trace.span("journal"):
        pass

    assert seen == [
        ("enter", "apply"),
        ("enter", "journal"),
        ("exit", "journal"),
        ("exit", "apply"),
    ]


def test_a_sink_that_is_removed_sees_nothing_more() -> None:
    """`install(None)` turns spans off again."""
    seen: list[str] = []

    @contextmanager
    def sink(name: str) -> Iterator[None]:
        seen.append(name)
        yield

    trace.install(sink)
    trace.install(None)
    with trace.span("apply"):
        pass

    assert seen == []
