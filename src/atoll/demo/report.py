"""The demo's report: one HTML page that needs nothing but itself.

No script, no font, no picture and no style from elsewhere; whatever was not written
here, such as an island's name, is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files

from atoll.demo import figures, pictures, table
from atoll.demo.results import Results

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
    heading = f"{figures.of_few(len(results['islands']))} islands, one model"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>Atoll: {escape(heading)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{_opening(results, heading)}\n{_numbers(results)}\n"
        f"{_learning(results)}\n{_bytes(results)}\n{_time(results)}\n"
        f"{_table(results)}\n{_sample(results)}\n{_settings(results)}\n"
        f"{_again(results)}\n</main>\n</body>\n</html>\n"
    )


def sentence(results: Results) -> str:
    """Return what happened."""
    count = figures.of_few(len(results["islands"]))
    size = figures.of_count(results["islands"][0]["num_parameters"])
    told = (
        f"{count} processes, each reading another era of presidents' messages to "
        f"Congress, trained one GPT of {size} parameters together in "
        f"{results['rounds']} rounds. They moved {results['ratio_bf16']:.0f} times "
        "fewer bytes than data parallel does in bf16"
    )
    if results["parallel"] is None:
        return f"{told}."
    return f"{told}, and ended {_beside(results, results['parallel']['loss'])}."


def _beside(results: Results, other: float) -> str:
    share = results["loss"] / other - 1
    if abs(share) < 0.0005:
        return "with the same loss"
    return (
        f"{figures.of_share(abs(share))} {'above' if share > 0 else 'below'} its loss"
    )


def _opening(results: Results, heading: str) -> str:
    run = results["coordinator"]
    about = "atoll demo" if run is None else f"atoll demo · run {run['run']}"
    return (
        f'<header>{MARK}<div><p class="eyebrow">{escape(about)}</p>'
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
            figures.of_share(results["stall_share"]),
            "time waiting",
            "rounds travel while the islands go on training",
        ),
        _card(
            figures.of_seconds(results["seconds"]),
            "of training",
            f"{results['rounds']} rounds, {figures.of_count(results['tokens'])} tokens",
        ),
    ]
    return f'<section class="cards">{"".join(cards)}</section>'


def _card(figure: str, what: str, more: str) -> str:
    return (
        f'<div class="card"><p class="big">{escape(figure)}</p>'
        f'<p class="what">{escape(what)}</p><p class="more">{escape(more)}</p></div>'
    )


def _section(heading: str, words: str, inside: str) -> str:
    return (
        f"<section><h2>{escape(heading)}</h2>\n"
        f'<p class="words">{escape(words)}</p>\n{inside}</section>'
    )


def _learning(results: Results) -> str:
    words = (
        "Loss in nats per byte on whole messages that nobody trained on. The islands' "
        "curve is the anchor, the weights they agreed on; nobody was stopped to judge "
        "it."
    )
    own = "Each island reads other years, and has a loss of its own; the model is one."
    return (
        _section("What it learnt", words, pictures.held_out(results))
        + "\n"
        + _section("What each island saw", own, pictures.by_island(results))
    )


def _bytes(results: Results) -> str:
    wire = results["settings"]["wire"]
    words = (
        f"Sent and received by one participant over the whole run. Islands send "
        f"{wire['up']} and receive {wire['down']}, as really encoded, with headers; "
        "data parallel averages a gradient in every step, worked out for the best "
        "all-reduce there is."
    )
    return _section("What travelled", words, pictures.moved(results))


def _time(results: Results) -> str:
    words = (
        "One lane for each island, a shade for each round. Where a lane is orange, "
        "training stood still because a round was not there yet."
    )
    return _section("How the time went", words, pictures.timeline(results))


def _table(results: Results) -> str:
    def line(row: table.Row, cell: str) -> str:
        label, islands, parallel = map(escape, row)
        cells = "".join(f"<{cell}>{each}</{cell}>" for each in (islands, parallel))
        return f"<tr><th>{label}</th>{cells}</tr>"

    body = "".join(line(row, "td") for row in table.rows(results))
    head = line(table.heading(results), "th")
    words = table.NOTE
    inside = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
    return _section("Side by side", words, inside)


def _sample(results: Results) -> str:
    sample = results["islands"][0]["sample"]
    if not sample:
        return ""
    words = "A few hundred bytes from the last anchor, which is still very young."
    inside = f"<blockquote>{escape(sample)}</blockquote>"
    return _section("What it writes", words, inside)


def _settings(results: Results) -> str:
    words = "The run owns its settings; the islands took them over when they joined."
    blocks = run_file(results["settings"]).split("\n\n")
    inside = "".join(f"<pre>{escape(each.strip())}</pre>" for each in blocks)
    return _section("Settings", words, f'<div class="tables">{inside}</div>')


def _again(results: Results) -> str:
    versions = ", ".join(
        f"{k} {v}" for k, v in results["islands"][0]["versions"].items()
    )
    words = (
        f"Made with {versions}. Seeds are fixed; times differ from machine to machine."
    )
    quick = "" if results["parallel"] is not None else " --quick"
    count = len(results["islands"])
    commands = (
        f'pip install "atoll[demo]"\natoll demo{quick}\n\n'
        "# or by hand, on one machine or several\n"
        "atoll serve run.toml --dir demo-run\n"
        "atoll join RUN -- python -m atoll.demo.island "
        f"--shard 0 --of {count} --results 0.json"
    )
    return _section("Do it again", words, f"<pre>{escape(commands)}</pre>")


def run_file(tables: Mapping[str, Mapping[str, object]]) -> str:
    """Return settings as a run file has them."""
    # JSON's form of a string, number or truth value is also TOML's.
    parts = [
        f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())
        for name, values in tables.items()
        if values
    ]
    return "\n".join(parts)
