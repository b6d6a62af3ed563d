"""A run's report: its sentence, its cards, and every section that it has data for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll import __version__
from atoll.report import sections
from atoll.report.page import Card, ReportSection, page
from atoll.report.record import RunRecord
from atoll.telemetry.text import (
    format_count,
    format_loss,
    format_share,
    format_size,
    format_span,
)

TIMES = "\N{MULTIPLICATION SIGN}"
NUMBER_WORDS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight")

OPTIONAL: Sequence[tuple[Callable[[RunRecord], ReportSection | None], str]] = (
    (sections.learning, "losses, because no island reported one"),
    (sections.counted, "updates, because no round was recorded"),
    (sections.time_spent, "waits"),
    (sections.traffic, "bytes moved"),
    (sections.happened, "events"),
    (sections.islands, "islands"),
)
"""Sections that need data, and the name of the missing data."""


def run_report(record: RunRecord) -> str:
    """Return the report of a run as one HTML page."""
    version = f"Atoll {__version__}"
    begin = record.started_unix_s
    eyebrow = f"{record.status['run']} · {version}"
    if begin is not None:
        eyebrow += f" · {sections.day(begin)}"
    return page(
        record.name,
        eyebrow=eyebrow,
        lead=sentence(record),
        cards=cards(record),
        sections=run_sections(record),
    )


def run_sections(record: RunRecord) -> list[ReportSection]:
    """Return every section that the run has data for."""
    shown, missing = [], []
    for make, name in OPTIONAL:
        section = make(record)
        if section is None:
            missing.append(name)
        else:
            shown.append(section)
    shown += [sections.settings(record), sections.again(record)]
    if missing:
        source = (
            "The past of this run was not recorded"
            if not record.has_past
            else "The past of this run has nothing on them"
        )
        text = f"{source}: {'; '.join(missing)}."
        shown.append(ReportSection("Not recorded", text, ""))
    return shown


def sentence(record: RunRecord) -> str:
    """Return the sentences that sum up a run."""
    status = record.status
    count = len(record.islands)
    size = (
        f" {format_count(record.parameters)} parameters"
        if record.parameters
        else " a model"
    )
    verb = "trained" if status["state"] == "ended" else "have trained"
    text = f"{format_few(count)} island{'s' * (count != 1)} {verb}{size}"
    if status["tokens"]:
        text += f" on {format_count(status['tokens'])} tokens"
    text += f" in {status['round']} rounds"
    if record.seconds is not None:
        text += f" and {format_span(record.seconds)}"
    parts = [text, _busy(record), _losses_of_work(record)]
    return " ".join(f"{part}." for part in parts if part)


def _busy(record: RunRecord) -> str:
    parts = []
    if record.utilisation is not None:
        parts.append(f"They trained {format_share(record.utilisation)} of their time")
    up_and_down = record.bytes_each
    if up_and_down is not None:
        moved = f"each moved {format_size(sum(up_and_down))}"
        if record.parallel_bytes and sum(up_and_down):
            moved += (
                f", 1/{record.parallel_bytes / sum(up_and_down):.0f} of data parallel"
            )
        parts.append(moved)
    return "; ".join(parts)


def _losses_of_work(record: RunRecord) -> str:
    """Return the deaths of islands, and the steps that were lost with them."""
    deaths = sum(row.get("deaths") or 0 for row in record.islands)
    dropped = record.total("dropped_steps")
    died = f"Islands died {deaths} time{'s' * (deaths != 1)}"
    text = died if deaths else "No island died"
    if dropped is None:
        return text if record.has_past else ""
    lost = f"{dropped:.0f} inner steps were dropped" if dropped else "no work was lost"
    return f"{text}; {lost}"


def cards(record: RunRecord) -> list[Card]:
    """Return the figures at the top of the page."""
    shown = []
    up_and_down = record.bytes_each
    if record.parallel_bytes and up_and_down is not None and sum(up_and_down):
        ratio = record.parallel_bytes / sum(up_and_down)
        detail = "than data parallel in bf16, worked out"
        shown.append(Card(f"{ratio:.0f}{TIMES}", "fewer bytes", detail))
    elif up_and_down is not None:
        shown.append(
            Card(
                format_size(sum(up_and_down)),
                "moved by each",
                "sent and received, the mean",
            )
        )
    if record.utilisation is not None:
        waiting = f"{format_share(1 - record.utilisation)} of the time waiting"
        shown.append(Card(format_share(record.utilisation), "busy", waiting))
    if record.loss is not None:
        subject, value = record.loss
        shown.append(Card(format_loss(value), "loss", subject))
    tokens, seconds = record.status["tokens"], record.seconds
    if tokens and seconds:
        detail = f"{format_count(tokens)} tokens in {format_span(seconds)}"
        shown.append(Card(format_count(tokens / seconds), "tokens a second", detail))
    return shown


def format_few(count: int) -> str:
    """Return a small number as the word that begins a sentence."""
    return NUMBER_WORDS[count] if count < len(NUMBER_WORDS) else str(count)
