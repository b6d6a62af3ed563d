"""The demo's report: one HTML page that needs no other file, a table, and progress.

The page has no script, no font, no picture and no style from elsewhere; text from other
machines, such as an island's name, is escaped.

Charts are SVG. Colours are left to the page: a shape has a class, and no colour.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import pairwise
from typing import Any, NamedTuple

from atoll.demo.results import IslandResults, ParallelResults, Point, Results, thin

TIMES = "\N{MULTIPLICATION SIGN}"

MARK = (
    '<svg class="mark" viewBox="0 0 48 48" aria-hidden="true">'
    '<circle cx="24" cy="24" r="17"/>'
    '<circle class="isle" cx="24" cy="7" r="5"/>'
    '<circle class="isle" cx="41" cy="24" r="5"/>'
    '<circle class="isle" cx="24" cy="41" r="5"/>'
    '<circle class="isle" cx="7" cy="24" r="5"/></svg>'
)


def page(results: Results) -> str:
    """Return the whole page."""
    style = files("atoll.demo").joinpath("report.css").read_text()
    heading = f"{format_few(len(results['islands']))} islands, one model"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>Atoll: {escape(heading)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{_opening(results, heading)}\n{_numbers(results)}\n"
        f"{_learning(results)}\n{_bytes(results)}\n{_time(results)}\n"
        f"{_table(results)}\n{_sample(results)}\n{_settings(results)}\n"
        f"{_reproduction(results)}\n</main>\n</body>\n</html>\n"
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


def _opening(results: Results, heading: str) -> str:
    run = results["coordinator"]
    title = "atoll demo" if run is None else f"atoll demo · run {run['run']}"
    return (
        f'<header>{MARK}<div><p class="eyebrow">{escape(title)}</p>'
        f"<h1>{escape(heading)}</h1></div></header>\n"
        f'<p class="lead">{escape(sentence(results))}</p>'
    )


def _numbers(results: Results) -> str:
    parallel = results["parallel"]
    beside = (
        f"nats per byte, perplexity {results['perplexity']:.2f}"
        if parallel is None
        else f"data parallel {parallel['loss']:.3f} on as many tokens"
    )
    cards = [
        _card(f"{results['loss']:.3f}", "held-out loss", beside),
        _card(
            f"{results['ratio_bf16']:.0f}{TIMES}",
            "fewer bytes",
            f"than data parallel in bf16, {results['ratio_fp32']:.0f}{TIMES} in fp32",
        ),
        _card(
            format_share(results["stall_share"]),
            "time waiting",
            "rounds travel while the islands continue to train",
        ),
        _card(
            format_seconds(results["seconds"]),
            "of training",
            f"{results['rounds']} rounds, {format_count(results['tokens'])} tokens",
        ),
    ]
    return f'<section class="cards">{"".join(cards)}</section>'


def _card(figure: str, label: str, detail: str) -> str:
    return (
        f'<div class="card"><p class="big">{escape(figure)}</p>'
        f'<p class="what">{escape(label)}</p><p class="more">{escape(detail)}</p></div>'
    )


def _section(heading: str, text: str, inside: str) -> str:
    return (
        f"<section><h2>{escape(heading)}</h2>\n"
        f'<p class="words">{escape(text)}</p>\n{inside}</section>'
    )


def _learning(results: Results) -> str:
    text = (
        "Loss in nats per byte on whole messages held out from training. The islands' "
        "curve is the anchor, the weights they agreed on; it was evaluated after the "
        "run, so that no island had to wait."
    )
    island_text = "Each island reads other years and has its own loss, for one model."
    return (
        _section("Held-out loss", text, held_out_chart(results))
        + "\n"
        + _section("Loss of each island", island_text, island_chart(results))
    )


def _bytes(results: Results) -> str:
    wire = results["settings"]["wire"]
    text = (
        f"Sent and received by one participant over the whole run. Islands send "
        f"{wire['up']} and receive {wire['down']}, measured as encoded, with headers; "
        "data parallel averages a gradient in every step, computed for an optimal "
        "all-reduce."
    )
    return _section("Bytes moved", text, bytes_chart(results))


def _time(results: Results) -> str:
    text = (
        "One lane for each island, a shade for each round. Where a lane is orange, "
        "training waited for a round."
    )
    return _section("Time", text, timeline_chart(results))


def _table(results: Results) -> str:
    def line(row: TableRow, cell: str) -> str:
        label, islands, parallel = map(escape, row)
        cells = "".join(f"<{cell}>{value}</{cell}>" for value in (islands, parallel))
        return f"<tr><th>{label}</th>{cells}</tr>"

    body = "".join(line(row, "td") for row in table_rows(results))
    head = line(table_heading(results), "th")
    text = NOTE
    inside = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
    return _section("Side by side", text, inside)


def _sample(results: Results) -> str:
    sample = results["islands"][0]["sample"]
    if not sample:
        return ""
    text = "A few hundred bytes sampled from the last anchor, which is hardly trained."
    inside = f"<blockquote>{escape(sample)}</blockquote>"
    return _section("Sample", text, inside)


def _settings(results: Results) -> str:
    text = "The run owns its settings; the islands received them when they joined."
    blocks = run_file(results["settings"]).split("\n\n")
    inside = "".join(f"<pre>{escape(block.strip())}</pre>" for block in blocks)
    return _section("Settings", text, f'<div class="tables">{inside}</div>')


def _reproduction(results: Results) -> str:
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
    return _section("Do it again", text, f"<pre>{escape(commands)}</pre>")


def run_file(tables: Mapping[str, Mapping[str, object]]) -> str:
    """Return settings as the text of a run file."""
    # JSON's form of a string, number or truth value is also TOML's.
    parts = [
        f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())
        for name, values in tables.items()
        if values
    ]
    return "\n".join(parts)


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
        TableRow("sent by each", format_bytes(results["bytes_up"]), format_bytes(ring)),
        TableRow(
            "received by each", format_bytes(results["bytes_down"]), format_bytes(ring)
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


_BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_COUNT_UNITS = ((1e9, "billion"), (1e6, "million"))


def format_bytes(size_bytes: float) -> str:
    """Return a size with three digits: 26.1 MB."""
    for unit_bytes, name in _BYTE_UNITS:
        if size_bytes >= unit_bytes:
            return f"{three_digits(size_bytes / unit_bytes)} {name}"
    return f"{size_bytes:.0f} bytes"


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


def three_digits(value: float) -> str:
    """Return the number with three digits that count, more before the point."""
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


NUMBER_WORDS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight")


def format_few(count: int) -> str:
    """Return a small number as the word that begins a sentence."""
    return NUMBER_WORDS[count] if count < len(NUMBER_WORDS) else str(count)


Coordinates = tuple[float, float]

WIDTH = 820
LEFT_MARGIN, RIGHT_MARGIN, TOP_MARGIN, BOTTOM_MARGIN = 48, 166, 14, 34
LABEL_GAP = 17
"""Lines of text closer than this would touch."""


@dataclass(frozen=True)
class Curve:
    """A line with a name at its end."""

    label: str
    points: Sequence[Coordinates]
    style: str
    """The class that gives it its colour."""


@dataclass(frozen=True)
class Scale:
    """Where a value lies on the page."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.first + share * (self.last - self.first)


def svg_chart(
    curves: Sequence[Curve],
    *,
    title: str,
    height: int = 330,
    x_text: Callable[[float], str],
    x_name: str,
) -> str:
    """Return curves over one another, with a name at the end of each."""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    across = Scale(0.0, max(xs), LEFT_MARGIN, WIDTH - RIGHT_MARGIN)
    margin = 0.06 * (max(ys) - min(ys)) or 0.1
    up = Scale(min(ys) - margin, max(ys) + margin, height - BOTTOM_MARGIN, TOP_MARGIN)
    parts = [_grid(up), _x_axis(across, height, x_text, x_name)]
    parts += [_curve(curve, across, up) for curve in curves]
    parts += _end_labels(curves, across, up)
    return svg_picture("".join(parts), height=height, title=title)


def svg_picture(inside: str, *, height: float, title: str) -> str:
    """Return an image that scales with the page, with an accessible title."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}">{inside}</svg>'
    )


def svg_text(
    x: float, y: float, text: str, *, style: str = "", anchor: str = ""
) -> str:
    """Return text at a position; `anchor` is start, middle or end."""
    attributes = f' class="{escape(style)}"' if style else ""
    attributes += f' text-anchor="{escape(anchor)}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>'


def svg_box(
    x: float, y: float, width: float, height: float, style: str, tip: str
) -> str:
    """Return a rectangle with a tooltip."""
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.0):.2f}" '
        f'height="{height:.1f}" class="{escape(style)}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def ticks(low: float, high: float, *, max_ticks: int = 6) -> list[float]:
    """Return at most `max_ticks` round numbers between two values."""
    if high <= low:
        return [low]
    rough = (high - low) / max_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough)
    first = math.ceil(low / step - 1e-9)
    return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)]


def apart(positions: Sequence[float], *, gap: float = LABEL_GAP) -> list[float]:
    """Return positions in the same order that are at least `gap` from each other."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    moved = list(positions)
    for before, after in pairwise(order):
        moved[after] = max(moved[after], moved[before] + gap)
    excess = (moved[order[-1]] - positions[order[-1]]) / 2 if order else 0.0
    return [position - excess for position in moved]


def _grid(up: Scale) -> str:
    values = ticks(up.low, up.high)
    end = WIDTH - RIGHT_MARGIN
    digits = 2 if len(values) > 1 and values[1] - values[0] < 0.1 else 1
    return "".join(
        f'<path class="grid" d="M{LEFT_MARGIN} {up(value):.1f}H{end}"/>'
        + svg_text(LEFT_MARGIN - 8, up(value) + 4, f"{value:.{digits}f}", anchor="end")
        for value in values
    )


def _x_axis(
    across: Scale, height: int, x_text: Callable[[float], str], name: str
) -> str:
    values = ticks(0.0, across.high)
    marks = [
        svg_text(across(value), height - 14, x_text(value), anchor="middle")
        for value in values
    ]
    return "".join(marks) + svg_text(WIDTH - RIGHT_MARGIN + 12, height - 14, name)


def _curve(curve: Curve, across: Scale, up: Scale) -> str:
    points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in curve.points)
    x, y = curve.points[-1]
    return (
        f'<polyline class="curve {escape(curve.style)}" points="{points}"/>'
        f'<circle class="end {escape(curve.style)}" cx="{across(x):.1f}" '
        f'cy="{up(y):.1f}" r="3.5"/>'
    )


def _end_labels(curves: Sequence[Curve], across: Scale, up: Scale) -> list[str]:
    heights = apart([up(curve.points[-1][1]) for curve in curves])
    # The lowest keeps clear of the axis's name, and takes the others along.
    excess = max(0.0, max(heights) + LABEL_GAP / 2 - up.first)
    heights = [height - excess for height in heights]
    return [
        svg_text(
            across(curve.points[-1][0]) + 10, y + 4, curve.label, style=curve.style
        )
        for curve, y in zip(curves, heights, strict=True)
    ]


LANE, LANE_GAP = 26, 14
NAME_WIDTH, NOTE_WIDTH = 92, 118
BAR_HEIGHT, BAR_GAP = 30, 18
SMOOTH_POINTS = 48
"""Few enough that a curve shows where it goes, not how batches differ."""


def held_out_chart(results: Results) -> str:
    """Return the loss on held-out text, by tokens of all islands."""
    curves = [Curve("islands", _without_start(results["held_out"]), "ours")]
    if results["parallel"] is not None:
        points = _without_start(results["parallel"]["held_out"])
        curves.insert(0, Curve("data parallel", points, "theirs"))
    curves = [_with_loss(curve) for curve in curves]
    title = "Loss on held-out text by tokens trained on"
    return svg_chart(curves, title=title, x_text=_tokens, x_name="tokens of all")


def island_chart(results: Results) -> str:
    """Return each island's own training loss."""
    curves = [
        Curve(
            island["island"],
            thin(island["losses"], max_points=SMOOTH_POINTS)[1:] or island["losses"],
            f"shard-{island['shard'] % 4}",
        )
        for island in results["islands"]
    ]
    title = "Training loss of each island by its own tokens"
    return svg_chart(
        curves, title=title, height=270, x_text=_tokens, x_name="own tokens"
    )


def bytes_chart(results: Results) -> str:
    """Return the bytes that one participant moves, as bars of one measure."""
    island_bytes = results["bytes_up"] + results["bytes_down"]
    bars = [
        ("data parallel, fp32", 2 * results["ring_bytes_fp32"], "theirs"),
        ("data parallel, bf16", 2 * results["ring_bytes_bf16"], "theirs pale"),
        ("islands", island_bytes, "ours"),
    ]
    left, right = 150, WIDTH - 90
    across = Scale(0.0, max(size for _, size, _ in bars), left, right)
    parts = []
    for number, (name, size, style) in enumerate(bars):
        y, size_text = number * (BAR_HEIGHT + BAR_GAP), format_bytes(size)
        wide = max(2.0, across(size) - left)
        parts.append(svg_text(left - 12, y + 20, name, anchor="end", style="name"))
        parts.append(
            svg_box(left, y, wide, BAR_HEIGHT, f"bar {style}", f"{name}: {size_text}")
        )
        parts.append(svg_text(left + wide + 10, y + 20, size_text, style="figure"))
    height = len(bars) * (BAR_HEIGHT + BAR_GAP) - BAR_GAP
    return svg_picture("".join(parts), height=height, title="Bytes moved by each")


def timeline_chart(results: Results) -> str:
    """Return a lane for each island: its rounds one after the other, and its waits."""
    islands = results["islands"]
    began_s = min(island["started_unix_s"] for island in islands)
    left, right = NAME_WIDTH, WIDTH - NOTE_WIDTH
    across = Scale(0.0, results["seconds"], left, right)
    parts = [
        _lane(
            island,
            number * (LANE + LANE_GAP),
            across,
            island["started_unix_s"] - began_s,
        )
        for number, island in enumerate(islands)
    ]
    bottom = len(islands) * (LANE + LANE_GAP) + 12
    parts += [
        svg_text(across(at_s), bottom, f"{at_s:g} s", anchor="middle")
        for at_s in ticks(0.0, results["seconds"], max_ticks=7)
    ]
    title = "Rounds and waits of each island by time"
    return svg_picture("".join(parts), height=bottom + 8, title=title)


def _lane(island: IslandResults, y: float, across: Scale, late_s: float) -> str:
    name, style = island["island"], f"shard-{island['shard'] % 4}"
    ends = [at_s for at_s, _ in island["rounds"]] + [island["seconds"]]
    parts = [svg_text(NAME_WIDTH - 12, y + 18, name, anchor="end", style="name")]
    for number, (begin_s, end_s) in enumerate(pairwise(ends)):
        x, wide = across(late_s + begin_s), across(end_s) - across(begin_s)
        tip = f"{name}, after round {island['rounds'][number][1]:.0f}"
        shade = "odd" if number % 2 else "even"
        parts.append(svg_box(x, y, wide, LANE, f"round {style} {shade}", tip))
    for begin_s, end_s in island["waits"]:
        x, wide = across(late_s + begin_s), across(end_s) - across(begin_s)
        tip = f"{name} waited {format_seconds(end_s - begin_s)}"
        parts.append(svg_box(x, y, max(wide, 0.8), LANE, "wait", tip))
    share = format_share(island["wait_s"] / (island["seconds"] or 1.0))
    end = across(late_s + island["seconds"])
    parts.append(svg_text(end + 10, y + 18, f"waited {share}", style="figure"))
    return "".join(parts)


def _without_start(points: Sequence[Point]) -> list[Point]:
    """Return a curve without its first steep part, which would flatten the rest."""
    return [point for point in points if point[0] > 0][len(points) // 8 :] or list(
        points
    )


def _with_loss(curve: Curve) -> Curve:
    label = f"{curve.label} {curve.points[-1][1]:.3f}"
    return Curve(label, curve.points, curve.style)


def _tokens(count: float) -> str:
    if count >= 1e6:
        return f"{count / 1e6:g}M"
    return f"{count / 1e3:g}k" if count else "0"
