"""The demo's report: the report of its run beside data parallel, a table, and progress.

The page has the sections of any run's report, and the demo's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from atoll import report
from atoll.demo.results import ParallelResults, Point, Results, thin
from atoll.report import Card, ReportSection, RunRecord, html_table, preformatted
from atoll.report.run_report import TIMES, format_few
from atoll.report.sections import format_tokens, run_file
from atoll.report.svg import Bar, Curve, bar_chart, curve_chart, twice
from atoll.telemetry.text import format_size


def page(results: Results, record: RunRecord | None = None) -> str:
    """Return the whole page.

    Args:
        results: The results of the islands and of data parallel.
        record: The run as its coordinator has recorded it, if there was one.
    """
    run = results["coordinator"]
    recorded = [] if record is None else report.run_sections(record)
    shown = {section.heading: section for section in recorded}
    listed = [
        _held_out(results),
        _bytes(results),
        _island_losses(results),
        *(shown.get(name) for name in ("Waiting", "Updates by round")),
        _table(results),
        *(shown.get(name) for name in ("Events", "Islands")),
        _sample(results),
        shown.get("Settings") or _settings(results),
        _reproduction(results),
    ]
    return report.page(
        f"{format_few(len(results['islands']))} islands, one model",
        eyebrow="atoll demo" if run is None else f"atoll demo · run {run['run']}",
        lead=sentence(results),
        cards=_cards(results),
        sections=[section for section in listed if section is not None],
    )


def sentence(results: Results) -> str:
    """Return a sentence that sums up the results."""
    count = format_few(len(results["islands"]))
    size = format_count(results["islands"][0]["num_parameters"])
    text = (
        f"{count} processes, each reading another era of presidents' messages to "
        f"Congress, trained one GPT of {size} parameters together in "
        f"{results['rounds']} rounds. They moved {results['ratio_bf16']:.0f} times "
        "fewer bytes than data parallel does in bf16"
    )
    if results["parallel"] is None:
        return f"{text}."
    return f"{text}, and ended {_comparison(results, results['parallel']['loss'])}."


def _comparison(results: Results, other: float) -> str:
    share = results["loss"] / other - 1
    if abs(share) < 0.0005:
        return "with the same loss"
    side = "above" if share > 0 else "below"
    return f"{format_share(abs(share))} {side} its loss"


def _cards(results: Results) -> list[Card]:
    parallel = results["parallel"]
    beside = (
        f"nats per byte, perplexity {results['perplexity']:.2f}"
        if parallel is None
        else f"data parallel {parallel['loss']:.3f} on as many tokens"
    )
    return [
        Card(
            f"{results['ratio_bf16']:.0f}{TIMES}",
            "fewer bytes",
            f"than data parallel in bf16, {results['ratio_fp32']:.0f}{TIMES} in fp32",
        ),
        Card(f"{results['loss']:.3f}", "held-out loss", beside),
        Card(
            format_share(results["stall_share"]),
            "time waiting",
            "rounds travel while the islands continue to train",
        ),
        Card(
            format_seconds(results["seconds"]),
            "of training",
            f"{results['rounds']} rounds, {format_count(results['tokens'])} tokens",
        ),
    ]


def _held_out(results: Results) -> ReportSection:
    curves = [Curve("islands", _without_start(results["held_out"]), "ours")]
    if results["parallel"] is not None:
        points = _without_start(results["parallel"]["held_out"])
        curves.insert(0, Curve("data parallel", points, "theirs"))
    curves = [_with_loss(curve) for curve in curves]

    def draw(width: int) -> str:
        return curve_chart(
            curves,
            width,
            title="Loss on held-out text by tokens trained on",
            x_text=format_tokens,
            x_name="tokens of all",
        )

    text = (
        "Loss in nats per byte on whole messages held out from training. The islands' "
        "curve is the anchor, the weights they agreed on; it was evaluated after the "
        "run, so that no island had to wait. The first eighth of each curve is left "
        "out: it is steep, and would flatten the rest."
    )
    return ReportSection("Held-out loss", text, twice(draw))


def _island_losses(results: Results) -> ReportSection:
    curves = [
        Curve(
            island["island"],
            thin(island["losses"], max_points=SMOOTH_POINTS)[1:] or island["losses"],
            f"shard-{island['shard'] % 4}",
        )
        for island in results["islands"]
    ]

    def draw(width: int) -> str:
        return curve_chart(
            curves,
            width,
            title="Training loss of each island by its own tokens",
            height=270,
            x_text=format_tokens,
            x_name="own tokens",
        )

    text = "Each island reads other years and has its own loss, for one model."
    return ReportSection("Loss of each island", text, twice(draw))


def _bytes(results: Results) -> ReportSection:
    bars = [
        ("data parallel, fp32", 2 * results["ring_bytes_fp32"], "theirs"),
        ("data parallel, bf16", 2 * results["ring_bytes_bf16"], "theirs pale"),
        ("islands", results["bytes_up"] + results["bytes_down"], "ours"),
    ]
    shown = [Bar(label, size, format_size(size), style) for label, size, style in bars]

    def draw(width: int) -> str:
        return bar_chart(shown, width, title="Bytes moved by each")

    wire = results["settings"]["wire"]
    text = (
        f"Sent and received by one participant over the whole run. Islands send "
        f"{wire['up']} and receive {wire['down']}, measured as encoded, with headers; "
        "data parallel averages a gradient in every step, computed for an optimal "
        "all-reduce."
    )
    return ReportSection("Bytes moved", text, twice(draw))


def _table(results: Results) -> ReportSection:
    text = NOTE
    if results["parallel"] is not None:
        text += (
            " The islands share this machine's cores, so their training takes longer."
        )
    inside = html_table(table_heading(results), table_rows(results), "compare")
    return ReportSection("Side by side", text, inside)


def _sample(results: Results) -> ReportSection | None:
    sample = results["islands"][0]["sample"]
    if not sample:
        return None
    text = "A few hundred bytes sampled from the last anchor, which is hardly trained."
    return ReportSection("Sample", text, f"<blockquote>{escape(sample)}</blockquote>")


def _settings(results: Results) -> ReportSection:
    text = "The run owns its settings; the islands received them when they joined."
    blocks = run_file(results["settings"]).split("\n\n")
    return ReportSection("Settings", text, preformatted(*blocks))


def _reproduction(results: Results) -> ReportSection:
    versions = ", ".join(
        f"{k} {v}" for k, v in results["islands"][0]["versions"].items()
    )
    text = (
        f"Made with {versions}. Seeds are fixed; times differ from machine to machine."
    )
    quick = "" if results["parallel"] is not None else " --quick"
    count = len(results["islands"])
    commands = (
        f'pip install ".[demo]"  # in a clone\natoll demo{quick}\n\n'
        "# or by hand, on one machine or several\n"
        "atoll serve run.toml --dir demo-run\n"
        "atoll join RUN -- python -m atoll.demo.train "
        f"--shard 0 --of {count} --results 0.json"
    )
    return ReportSection("Do it again", text, preformatted(commands))


SMOOTH_POINTS = 48
"""Few enough that a curve shows where it goes, not how batches differ."""


def _without_start(points: Sequence[Point]) -> list[Point]:
    """Return a curve without its first steep part, which would flatten the rest."""
    return [point for point in points if point[0] > 0][len(points) // 8 :] or list(
        points
    )


def _with_loss(curve: Curve) -> Curve:
    label = f"{curve.label} {curve.points[-1][1]:.3f}"
    return Curve(label, curve.points, curve.style)


LINK_BITS_PER_S = 100e6
"""A common link between two sites."""

ABSENT = "-"

NOTE = """\
Bytes of data parallel are computed: 2(M - 1)/M gradients each way in every step, in
bf16, as in a ring of M. Bytes of islands are measured, as encoded."""


class TableRow(NamedTuple):
    """One line of the table."""

    label: str
    islands: str
    parallel: str


def table_heading(results: Results) -> TableRow:
    """Return the head of the table."""
    return TableRow("", f"{len(results['islands'])} islands", "data parallel")


def table_rows(results: Results) -> list[TableRow]:
    """Return the rows of the table; bytes of data parallel are computed, in bf16."""
    ring, parallel = results["ring_bytes_bf16"], results["parallel"]
    larger = max(results["bytes_up"], results["bytes_down"])
    return [
        *_loss_rows(results, parallel),
        TableRow("sent by each", format_size(results["bytes_up"]), format_size(ring)),
        TableRow(
            "received by each", format_size(results["bytes_down"]), format_size(ring)
        ),
        TableRow("bytes, times those of islands", "1", f"{results['ratio_bf16']:.0f}"),
        TableRow("the same, gradients in fp32", "1", f"{results['ratio_fp32']:.0f}"),
        TableRow("each way at 100 Mbit/s", _sent_s(larger), _sent_s(ring)),
        TableRow("stall", format_share(results["stall_share"]), ABSENT),
        TableRow(
            "training took",
            format_seconds(results["seconds"]),
            ABSENT if parallel is None else format_seconds(parallel["seconds"]),
        ),
    ]


def table_text(results: Results) -> str:
    """Return the table for a terminal, with the note on its bytes."""
    lines = [table_heading(results), *table_rows(results)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    aligned = [
        f"{label:{widths[0]}}   {islands:>{widths[1]}}   {parallel:>{widths[2]}}"
        for label, islands, parallel in lines
    ]
    return "\n".join([*aligned, "", NOTE])


def _loss_rows(results: Results, parallel: ParallelResults | None) -> list[TableRow]:
    loss, tokens = results["loss"], results["tokens"]
    if parallel is None:
        other = (ABSENT, ABSENT, ABSENT)
    else:
        other_loss = parallel["loss"]
        other = (
            _loss(other_loss),
            _loss(math.exp(other_loss)),
            f"{parallel['tokens']:,}",
        )
    return [
        TableRow("loss on held-out text, nats per byte", _loss(loss), other[0]),
        TableRow("perplexity per byte", _loss(results["perplexity"]), other[1]),
        TableRow("tokens", f"{tokens:,}", other[2]),
    ]


def _loss(value: float) -> str:
    return f"{value:.3f}"


def _sent_s(size_bytes: float) -> str:
    return format_seconds(8 * size_bytes / LINK_BITS_PER_S)


BAR_MARKS = 24


def progress_lines(status: Mapping[str, Any]) -> list[str]:
    """Return a line for each island of a status document, and why the run waits."""
    last_round = status["last_round"] or 1
    islands = sorted(status["islands"], key=lambda island: str(island["island"]))
    lines = [_line(island, last_round) for island in islands]
    return [*lines, *([status["why"]] if status["why"] else [])]


def _line(island: Mapping[str, Any], last_round: int) -> str:
    done = min(1.0, island["round"] / last_round)
    filled = round(done * BAR_MARKS)
    loss = "     " if island["loss"] is None else f"{island['loss']:5.3f}"
    return (
        f"{island['island']:<12} {'━' * filled}{'╌' * (BAR_MARKS - filled)} "
        f"round {island['round']:>3} of {last_round}   loss {loss}   "
        f"{island['tokens']:>9,} tokens   waited {100 * island['wait_share']:4.1f} %"
    )


_COUNT_UNITS = ((1e9, "billion"), (1e6, "million"))


def format_count(count: float) -> str:
    """Return a count in words where it is large: 1.23 million."""
    for unit, name in _COUNT_UNITS:
        if count >= unit / 10:
            return f"{count / unit:.2f} {name}"
    return f"{count:,.0f}"


def format_seconds(duration_s: float) -> str:
    """Return a duration as a clock would say it: 4 min 17 s."""
    if duration_s < 9.95:
        return f"{duration_s:.1f} s"
    minutes, seconds = divmod(round(duration_s), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def format_share(share: float) -> str:
    """Return a share in percent: 0.9 %."""
    return f"{100 * share:.1f} %"
