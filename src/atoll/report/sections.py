"""The sections of a run's report, each from the run's record.

A section returns None if the run has nothing for it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from atoll import __version__
from atoll.report.page import ReportSection, html_table, preformatted
from atoll.report.record import RunRecord, last_of, thin
from atoll.report.svg import (
    Band,
    Bar,
    Block,
    Coordinates,
    Curve,
    Lane,
    bar_chart,
    curve_chart,
    lane_chart,
    mark_chart,
    twice,
)
from atoll.settings.reference import values_of
from atoll.telemetry.text import (
    format_count,
    format_loss,
    format_share,
    format_size,
    format_span,
)

MAX_CURVES = 24
"""Islands with separate curves; more islands are a band."""

MAX_COLUMNS = {820: 320, 380: 110}
"""Columns of the matrix of marks, by the width of the drawing."""

MAX_EVENTS = 200
ALPHA, ETA, MU, TAU = (
    *("\N{GREEK SMALL LETTER ALPHA}", "\N{GREEK SMALL LETTER ETA}"),
    *("\N{GREEK SMALL LETTER MU}", "\N{GREEK SMALL LETTER TAU}"),
)
MARK_STYLES = {"~": "late", "!": "refused", ".": "absent", "#": "counted"}
WORST = "!.~#"
SIGNIFICANT_WAIT = 0.02
"""Shares of waiting below this are not drawn."""


def learning(record: RunRecord) -> ReportSection | None:
    """Return the losses of the anchor, of each island, and of a baseline."""
    losses, anchor = record.losses(), record.anchor_losses()
    if not losses:
        return None
    band = None
    if len(losses) > MAX_CURVES:
        curves, band = [], _band(list(losses.values()))
    else:
        style = "island" if anchor else "shard-{}"
        curves = [
            Curve(island, thin(points), style.format(number % 4))
            for number, (island, points) in enumerate(losses.items())
        ]
    if record.baseline:
        curves.append(Curve("baseline", thin(record.baseline), "theirs"))
    if anchor is not None:
        name, points = anchor
        label = f"anchor {format_loss(points[-1][1])}"
        curves.append(Curve(label, thin(points), "ours"))
        subject = f"The thick curve is {name} of the anchor, reported while evaluating."
    else:
        subject = (
            "Each curve is an island's loss on its own batches; the loop reported none "
            "of the anchor's inside evaluating()."
        )
    if band is not None:
        subject += " The area is the range of the islands, its line their median."
        curves.insert(0, Curve("median", _median(list(losses.values())), "island"))
    lines = _epoch_lines(record)
    if lines:
        subject += " Vertical lines are changes of settings."

    def draw(width: int) -> str:
        return curve_chart(
            curves,
            width,
            title="Loss by tokens that the run has trained on",
            x_text=format_tokens,
            x_name="tokens",
            band=band,
            lines=lines,
        )

    return ReportSection("Loss", subject, twice(draw))


def _band(losses: Sequence[Sequence[Coordinates]]) -> Band:
    rows = _by_position(losses)
    low = thin([(x, min(values)) for x, values in rows])
    return Band(low, thin([(x, max(values)) for x, values in rows]), "band")


def _median(losses: Sequence[Sequence[Coordinates]]) -> list[Coordinates]:
    return thin([(x, statistics.median(v)) for x, v in _by_position(losses)])


def _by_position(
    losses: Sequence[Sequence[Coordinates]],
) -> list[tuple[float, list[float]]]:
    values: dict[float, list[float]] = {}
    for points in losses:
        for x, y in points:
            values.setdefault(x, []).append(y)
    return sorted(values.items())


def _epoch_lines(record: RunRecord) -> list[tuple[float, str]]:
    """Return the tokens at each change of settings, and the changed values."""
    curves = record.past["curves"]
    lines = []
    for note in record.past["notes"]:
        if note["event"] == "epoch_set":
            before = [
                tokens or 0
                for row_unix_s, tokens in zip(
                    curves["at"], curves["tokens"], strict=True
                )
                if row_unix_s <= note["at"]
            ]
            lines.append((before[-1] if before else 0, _epoch_text(note)))
    return lines


def counted(record: RunRecord) -> ReportSection | None:
    """Return the matrix of marks: which island counted in which round."""
    marks = record.past["marks"]
    names = [name or "" for name in marks["islands"]]
    if not marks["columns"] or not names:
        return None
    columns = [column[3] for column in marks["columns"]]
    rounds = [column[0] for column in marks["columns"]]

    def draw(width: int) -> str:
        return mark_chart(
            names,
            merged(columns, MAX_COLUMNS[width]),
            width,
            title="Which island counted in which round",
            styles=MARK_STYLES,
            first=f"round {rounds[0]}",
            last=f"round {rounds[-1]}",
        )

    rows = record.status["islands"]
    late, refused = (
        sum(r["late"] or 0 for r in rows),
        sum(r["refused"] or 0 for r in rows),
    )
    text = (
        "A row for each island, from the first round to the last; neighbouring "
        f"columns show the worst of their rounds. {late} updates were late and "
        f"{refused} refused."
    )
    legend = "".join(
        f'<span><i class="{style}"></i>{label}</span>'
        for style, label in (
            ("counted", "counted"),
            ("late", "late"),
            ("refused", "refused"),
            ("absent", "absent"),
        )
    )
    return ReportSection(
        "Updates by round", text, f'<p class="legend">{legend}</p>{twice(draw)}'
    )


def merged(columns: Sequence[str], limit: int) -> list[str]:
    """Return at most `limit` columns: neighbours show the worst of their marks."""
    size = -(-len(columns) // limit)
    groups = []
    for first in range(0, len(columns), size):
        group = columns[first : first + size]
        height = max(map(len, group))
        groups.append(
            "".join(
                _worst([column[row : row + 1] for column in group])
                for row in range(height)
            )
        )
    return groups


def _worst(marks: Sequence[str]) -> str:
    return next((mark for mark in WORST if mark in marks), " ")


def time_spent(record: RunRecord) -> ReportSection | None:
    """Return lanes that show waits, absences and restarts, but no training."""
    curves, begin, end = (
        record.past["curves"],
        record.started_unix_s,
        record.ended_unix_s,
    )
    if begin is None or end is None or end <= begin or not curves["islands"]:
        return None
    unit_s, unit = time_unit(end - begin)
    lanes = [
        _lane(record, name, begin, end, unit_s) for name in sorted(curves["islands"])
    ]
    starts = [
        ((note["at"] - begin) / unit_s, "the coordinator started again")
        for note in record.past["notes"]
        if note["event"] == "coordinator_started" and begin < note["at"] < end
    ]

    def draw(width: int) -> str:
        return lane_chart(
            lanes,
            width,
            title="Waits and absences of each island by time",
            end=(end - begin) / unit_s,
            x_text=lambda value: f"{value:g} {unit}",
            lines=starts,
        )

    text = (
        "Training is the empty ground. Orange is the share of the time that an island "
        "waited, grey the time that it was away; a line is a restart of the "
        "coordinator."
    )
    return ReportSection("Waiting", text, twice(draw))


def _lane(
    record: RunRecord, island: str, begin: float, end: float, unit_s: float
) -> Lane:
    columns = record.past["curves"]["islands"][island]
    blocks = []
    rows = zip(
        record.past["curves"]["at"],
        columns.get("seconds", ()),
        columns.get("wait_s", ()),
        strict=False,
    )
    complete_rows = [row for row in rows if None not in row]
    for (unix_s, seconds, waited), (next_unix_s, next_seconds, next_waited) in pairwise(
        complete_rows
    ):
        spent = next_seconds - seconds
        share = (next_waited - waited) / spent if spent > 0 else 0.0
        if share >= SIGNIFICANT_WAIT:
            tip = f"{island} waited {format_share(min(share, 1.0))} of this time"
            span = unix_s - begin, next_unix_s - begin
            blocks.append((*span, min(share, 1.0), "wait", tip))
    for first, last, reason in _absences(record.joined(island), begin, end):
        tip = f"{island} was away{f': {reason}' if reason else ''}"
        blocks.append((first - begin, last - begin, 1.0, "away", tip))
    seconds, wait_s = last_of(columns, "seconds"), last_of(columns, "wait_s")
    share = wait_s / seconds if seconds and wait_s is not None else None
    scaled = [
        (first / unit_s, last / unit_s, height, style, tip)
        for first, last, height, style, tip in _joined_blocks(blocks)
    ]
    return Lane(island, scaled, f"waited {format_share(share)}")


def _joined_blocks(blocks: Sequence[Block]) -> list[Block]:
    """Join neighbours of about equal shares: a page stays small."""
    joined: list[Block] = []
    for block in blocks:
        if joined and joined[-1][3] == block[3] and joined[-1][1] == block[0]:
            first, _, share, style, tip = joined[-1]
            if abs(share - block[2]) < 0.05:
                joined[-1] = (first, block[1], share, style, tip)
                continue
        joined.append(block)
    return joined


def _absences(
    incarnations: Sequence[tuple[float, float, str]], begin: float, end: float
) -> list[tuple[float, float, str]]:
    if not incarnations:
        return []
    gaps = [(begin, incarnations[0][0], "")] if incarnations[0][0] > begin + 1 else []
    gaps += [(a[1], b[0], a[2]) for a, b in pairwise(incarnations) if b[0] > a[1]]
    if incarnations[-1][1] < end - 1:
        gaps.append((incarnations[-1][1], end, incarnations[-1][2]))
    return gaps


def traffic(record: RunRecord) -> ReportSection | None:
    """Return the bytes that one island moved, and those of data parallel."""
    moved = record.bytes_each
    if moved is None:
        return None
    up, down = moved
    bars = [
        Bar("sent", up, format_size(up), "ours"),
        Bar("received", down, format_size(down), "ours"),
    ]
    text = (
        "Sent and received by one island over the whole run, the mean. Updates travel "
        f"as {record.settings.wire.up}, rounds as {record.settings.wire.down}, "
        "measured as encoded."
    )
    parallel = record.parallel_bytes
    if parallel is not None:
        parallel_bytes = parallel / 2
        bars.insert(
            0,
            Bar("data parallel", parallel_bytes, format_size(parallel_bytes), "theirs"),
        )
        text += (
            " The bar of data parallel is computed, for each direction: an optimal "
            "all-reduce of one gradient in bf16 for every inner step."
        )

    def draw(width: int) -> str:
        return bar_chart(bars, width, title="Bytes moved by one island")

    return ReportSection("Bytes moved", text, twice(draw))


def happened(record: RunRecord) -> ReportSection | None:
    """Return the findings, and then the events worth noting by time."""
    findings = record.status.get("findings") or []
    notes = [note for note in record.past["notes"] if note["event"] in SENTENCES]
    if not findings and not notes:
        return None
    begin = record.started_unix_s or (notes[0]["at"] if notes else 0.0)
    rows = [(str(finding["severity"]), str(finding["message"])) for finding in findings]
    cut = len(notes) - MAX_EVENTS
    rows += [
        (_moment(note["at"] - begin), SENTENCES[note["event"]](note))
        for note in notes[max(0, cut) :]
    ]
    text = "Findings at the end of this record, worst first, and then events by time."
    if cut > 0:
        text += f" The first {cut} events are left out: atoll events lists them."
    return ReportSection(
        "Events", text, html_table(("after", "event"), rows, "sentences")
    )


def islands(record: RunRecord) -> ReportSection | None:
    """Return the table of all islands."""
    if not record.islands:
        return None
    heading = (
        *("island", "state", "loss", "tokens", "counted", "late", "refused"),
        *("dropped steps", "waited", "sent", "received", "starts"),
    )
    rows = [
        (
            str(row["island"]),
            str(row["state"]),
            format_loss(row["loss"]),
            format_count(row["tokens"]),
            format_count(row["counted"]),
            format_count(row["late"]),
            format_count(row["refused"]),
            format_count(row["dropped_steps"]),
            format_share(row["wait_share"]),
            format_size(row["bytes_up"]),
            format_size(row["bytes_down"]),
            str(max(1, len(record.joined(str(row["island"]))))),
        )
        for row in record.islands
    ]
    text = "The values that each island reported last; - is what none has reported."
    return ReportSection("Islands", text, html_table(heading, rows))


def settings(record: RunRecord) -> ReportSection:
    """Return the settings that differ from the defaults first, then all, and epochs."""
    values = values_of(record.settings)
    own_values = [row for row in values if not row.is_default]
    inside = html_table(
        ("setting", "value", "default"),
        [(r.key, r.value, r.default) for r in own_values],
    )
    rest = [(r.key, r.value) for r in values if r.is_default]
    inside += (
        f"<details><summary>{len(rest)} settings have their defaults</summary>"
        f"{html_table(('setting', 'value'), rest)}</details>"
    )
    epochs = [note for note in record.past["notes"] if note["event"] == "epoch_set"]
    begin = record.started_unix_s or 0.0
    if epochs:
        inside += html_table(
            ("after", "change"),
            [(_moment(note["at"] - begin), _epoch_text(note)) for note in epochs],
            "sentences",
        )
    text = (
        "The run owns its settings; islands received them when they joined. Its "
        f"fingerprint is {record.settings.fingerprint[:16]}."
    )
    digests = {
        r["fragment"]: r["digest"] for r in record.past["rounds"] if "digest" in r
    }
    if digests:
        listed = ", ".join(f"{digests[n]}" for n in sorted(digests))
        text += f" The last anchor's fragments are {listed}."
    return ReportSection("Settings", text, inside)


def again(record: RunRecord) -> ReportSection:
    """Return the run file, the commands, and a sentence for a paper."""
    versions = sorted({str(r["version"]) for r in record.islands if r.get("version")})
    text = f"Written by Atoll {__version__}."
    if versions:
        text += f" The islands had version {', '.join(versions)}."
    commands = (
        "atoll serve run.toml\natoll join RUN -- python train.py   # on every machine"
    )
    blocks = [run_file(record.settings.to_dict()), commands, paper_line(record)]
    return ReportSection("Run it again", text, preformatted(*blocks))


def run_file(tables: Mapping[str, Mapping[str, object]]) -> str:
    """Return settings as the text of a run file."""
    # JSON's form of a string, number or truth value is also TOML's.
    parts = [
        f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())
        for name, values in tables.items()
        if values
    ]
    return "\n".join(parts)


def paper_line(record: RunRecord) -> str:
    """Return one sentence with all settings in the letters of the papers."""
    sync, outer, wire = (
        record.settings.sync,
        record.settings.outer,
        record.settings.wire,
    )
    kind = "Streaming DiLoCo" if sync.num_fragments > 1 else "DiLoCo"
    letters = {
        "M": len(record.islands),
        "H": sync.sync_every,
        "P": sync.num_fragments,
        TAU: sync.overlap_steps,
        ALPHA: f"{sync.keep_local:g}",
        ETA: f"{outer.lr:g}",
        MU: f"{outer.momentum:g}",
    }
    listed = ", ".join(f"{letter} = {value}" for letter, value in letters.items())
    text = (
        f"We train with {kind} ({listed}) and the outer optimizer {outer.optimizer}; "
        f"updates are sent as {wire.up} and received as {wire.down}; "
        f"{record.status['round']} rounds"
    )
    tokens = record.status["tokens"]
    return f"{text}, {tokens:,} tokens." if tokens else f"{text}."


def _text(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda note: form.format(note.get(key))


SENTENCES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "run_founded": _text("island", "{} brought the first weights."),
    "island_joined": lambda n: (
        f"{n.get('island')} joined"
        + (
            f", for the {_ordinal(n['incarnation'])} time."
            if n.get("incarnation", 1) > 1
            else "."
        )
    ),
    "island_left": lambda n: (
        f"{n.get('island')} left"
        + (f": {n['reason']}." if n.get("reason", "left") != "left" else ".")
    ),
    "island_silent": _text("island", "{} fell silent."),
    "island_returned": _text("island", "{} returned."),
    "island_taken_over": _text("island", "{} was started again elsewhere."),
    "update_refused": lambda n: (
        f"An update of {n.get('island')} was refused: {n.get('reason')}"
    ),
    "epoch_set": lambda n: f"Settings changed: {_epoch_text(n)}.",
    "run_paused": _text("round", "The run was paused."),
    "run_resumed": _text("round", "The run was resumed."),
    "run_moved": _text("target", "The run moved to {}."),
    "run_stopped": _text("last_round", "The run was stopped."),
    "run_ended": _text("round", "The run ended with round {}."),
    "state_recovered": _text("island", "{} brought back a state that was lost."),
    "journal_cut": _text(
        "file", "The end of the journal did not verify and was cut: {}."
    ),
    "journal_damaged": _text("message", "The journal was damaged: {}"),
    "disk_failed": _text("message", "The disk failed: {}"),
    "work_dropped": _text("island", "{} dropped work that came too late."),
    "coordinator_started": lambda n: (
        f"The coordinator started at round {n.get('round')}"
        + ("." if n.get("was_clean") else "; it had been killed before.")
    ),
    "coordinator_stopped": _text("round", "The coordinator stopped at round {}."),
}
"""By event, the sentence for the report."""


def _ordinal(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if 10 < number % 100 < 14 else suffix}"


def _epoch_text(note: Mapping[str, Any]) -> str:
    values = note.get("values") or {}
    return f"epoch {note.get('epoch')}, " + ", ".join(
        f"{k} = {v}" for k, v in values.items()
    )


def _moment(seconds: float) -> str:
    return format_span(max(0.0, seconds))


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit in which a span of time is read best."""
    for unit_s, name in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit_s:
            return unit_s, name
    return 1.0, "s"


def format_tokens(count: float) -> str:
    """Return a number of tokens for an axis."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:g}{name}"
    return f"{count:g}"


def day(unix_s: float) -> str:
    """Return a day as people write it."""
    return time.strftime("%d %B %Y", time.localtime(unix_s)).lstrip("0")
