"""The page of events and metrics lists what the code has, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.island.progress import IslandCounters
from atoll.telemetry import EVENTS, METRICS, bus
from atoll.telemetry.events import MAX_ITEMS, MAX_TEXT

PAGE = (Path(__file__).parents[2] / "docs" / "events.md").read_text()


def event_rows() -> Iterator[str]:
    """Yield the rows of the table of events, as the page must have them."""
    for name, event in EVENTS.items():
        yield f"| `{name}` | | | {event.description} |"
        for key, field in event.fields.items():
            holds = field.kind.value + ", or absent" * field.is_optional
            yield f"| | `{key}` | {holds} | {field.description} |"


def metric_rows() -> Iterator[str]:
    """Yield the rows of the table of metrics."""
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        cell = f" {labels} " if labels else " "
        yield f"| `{metric.name}` | {metric.type} |{cell}| {metric.description} |"


def table(heading: str) -> list[str]:
    """Return the rows of the first table below a heading."""
    _, _, below = PAGE.partition(f"\n## {heading}\n")
    found = re.search(r"^\|.*\n\|[-|]+\n((\|.*\n)+)", below, flags=re.MULTILINE)
    assert found is not None, heading
    return found[1].splitlines()


def test_the_page_lists_every_event_with_its_fields() -> None:
    """Names, kinds and meanings on the page are those that are emitted."""
    assert table("Events") == list(event_rows())


def test_the_page_lists_every_metric() -> None:
    """Names, types and labels on the page are those that are scraped."""
    assert table("Prometheus") == list(metric_rows())


def test_the_page_lists_what_an_island_counts() -> None:
    """`island.metrics()` has the names that the page promises."""
    listed = {re.findall(r"`(atoll/\w+)`", row)[0] for row in table("Any other logger")}

    of_the_run = {"atoll/round", "atoll/run_steps", "atoll/run_tokens"}
    assert listed == set(IslandCounters().metrics()) | of_the_run


@pytest.mark.parametrize(
    "said",
    [
        f"at most {MAX_TEXT} characters",
        f"at most {MAX_ITEMS} names or numbers",
        f"{bus.MAX_BYTES // 10**6} MB",
        f"{bus.KEEP} files",
        "wandb.log(island.metrics())",
        "pip install 'atoll[tensorboard]'",
    ],
)
def test_the_page_says_the_bounds_of_the_code(said: str) -> None:
    """Numbers and commands on the page are those of the code."""
    assert said in PAGE
