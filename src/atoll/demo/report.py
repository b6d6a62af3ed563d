"""The demo's report: one HTML page that needs no other file, a table, and progress.

The page has no script, no font, no picture and no style from elsewhere; text from other
machines, such as an island's name, is escaped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from atoll.demo import charts
from atoll.demo.results import ParallelResults, Results

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
    heading = f"{charts.format_few(len(results['islands']))} islands, one model"
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
    count = charts.format_few(len(results["islands"]))
    size = charts.format_count(results["islands"][0]["num_parameters"])
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
    return f"{charts.format_share(abs(share))} {side} its loss"


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
            charts.format_share(results["stall_share"]),
            "time waiting",
            "rounds travel while the islands continue to train",
        ),
        _card(
            charts.format_seconds(results["seconds"]),
            "of training",
            f"{results['rounds']} rounds, "
            f"{charts.format_count(results['tokens'])} tokens",
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
        _section("Held-out loss", text, charts.held_out_chart(results))
        + "\n"
        + _section("Loss of each island", island_text, charts.island_chart(results))
    )


def _bytes(results: Results) -> str:
    wire = results["settings"]["wire"]
    text = (
        f"Sent and received by one participant over the whole run. Islands send "
        f"{wire['up']} and receive {wire['down']}, measured as encoded, with headers; "
        "data parallel averages a gradient in every step, computed for an optimal "
        "all-reduce."
    )
    return _section("Bytes moved", text, charts.bytes_chart(results))


def _time(results: Results) -> str:
    text = (
        "One lane for each island, a shade for each round. Where a lane is orange, "
        "training waited for a round."
    )
    return _section("Time", text, charts.timeline_chart(results))


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
    return [
        *_loss_rows(results, parallel),
        TableRow("sent by each", _bytes_cell(results["bytes_up"]), _bytes_cell(ring)),
        TableRow(
            "received by each", _bytes_cell(results["bytes_down"]), _bytes_cell(ring)
        ),
        TableRow("bytes, times those of islands", "1", _times(results["ratio_bf16"])),
        TableRow("the same, gradients in fp32", "1", _times(results["ratio_fp32"])),
        TableRow("each way at 100 Mbit/s", _sent_s(_larger(results)), _sent_s(ring)),
        TableRow("stall", charts.format_share(results["stall_share"]), ABSENT),
        TableRow(
            "training took",
            charts.format_seconds(results["seconds"]),
            _duration(parallel),
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


def _larger(results: Results) -> float:
    return max(results["bytes_up"], results["bytes_down"])


def _loss(value: float) -> str:
    return f"{value:.3f}"


def _times(ratio: float) -> str:
    return f"{ratio:.0f}"


def _bytes_cell(size_bytes: float) -> str:
    return charts.format_bytes(size_bytes)


def _sent_s(size_bytes: float) -> str:
    return charts.format_seconds(8 * size_bytes / LINK_BITS_PER_S)


def _duration(parallel: ParallelResults | None) -> str:
    return ABSENT if parallel is None else charts.format_seconds(parallel["seconds"])


BAR = 24


def progress_lines(status: Mapping[str, Any]) -> list[str]:
    """Return a line for each island of a status document, and why the run waits."""
    last_round = status["last_round"] or 1
    islands = sorted(status["islands"], key=lambda island: str(island["island"]))
    lines = [_line(island, last_round) for island in islands]
    return [*lines, *([status["why"]] if status["why"] else [])]


def _line(island: Mapping[str, Any], last_round: int) -> str:
    done = min(1.0, island["round"] / last_round)
    filled = round(done * BAR)
    loss = "     " if island["loss"] is None else f"{island['loss']:5.3f}"
    return (
        f"{island['island']:<12} {'━' * filled}{'╌' * (BAR - filled)} "
        f"round {island['round']:>3} of {last_round}   loss {loss}   "
        f"{island['tokens']:>9,} tokens   waited {100 * island['wait_share']:4.1f} %"
    )
