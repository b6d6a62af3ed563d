"""The pictures of the demo's report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from atoll.demo import figures, svg
from atoll.demo.results import IslandResults, Point, Results, thin

LANE, LANE_GAP = 26, 14
NAME_WIDTH, NOTE_WIDTH = 92, 118
BAR, BAR_GAP = 30, 18
SMOOTH_POINTS = 48
"""Few enough that a curve shows where it goes, not how batches differ."""


def held_out(results: Results) -> str:
    """Return the loss on text that nobody trained on, by tokens of all islands."""
    curves = [svg.Curve("islands", _begun(results["held_out"]), "ours")]
    if results["parallel"] is not None:
        points = _begun(results["parallel"]["held_out"])
        curves.insert(0, svg.Curve("data parallel", points, "theirs"))
    curves = [_with_loss(each) for each in curves]
    title = "Loss on held-out text by tokens trained on"
    return svg.chart(curves, title=title, x_text=_tokens, x_name="tokens of all")


def by_island(results: Results) -> str:
    """Return each island's own training loss."""
    curves = [
        svg.Curve(
            each["island"],
            thin(each["losses"], most=SMOOTH_POINTS)[1:] or each["losses"],
            f"shard-{each['shard'] % 4}",
        )
        for each in results["islands"]
    ]
    title = "Training loss of each island by its own tokens"
    return svg.chart(
        curves, title=title, height=270, x_text=_tokens, x_name="own tokens"
    )


def moved(results: Results) -> str:
    """Return the bytes that one participant moves, as bars of one measure."""
    ours = results["bytes_up"] + results["bytes_down"]
    bars = [
        ("data parallel, fp32", 2 * results["ring_bytes_fp32"], "theirs"),
        ("data parallel, bf16", 2 * results["ring_bytes_bf16"], "theirs pale"),
        ("islands", ours, "ours"),
    ]
    left, right = 150, svg.WIDTH - 90
    across = svg.Scale(0.0, max(size for _, size, _ in bars), left, right)
    parts = []
    for number, (name, size, style) in enumerate(bars):
        y, said = number * (BAR + BAR_GAP), figures.of_bytes(size)
        wide = max(2.0, across(size) - left)
        parts.append(svg.text(left - 12, y + 20, name, anchor="end", style="name"))
        parts.append(svg.box(left, y, wide, BAR, f"bar {style}", f"{name}: {said}"))
        parts.append(svg.text(left + wide + 10, y + 20, said, style="figure"))
    height = len(bars) * (BAR + BAR_GAP) - BAR_GAP
    return svg.picture("".join(parts), height=height, title="Bytes moved by each")


def timeline(results: Results) -> str:
    """Return a lane for each island: its rounds one after the other, and its waits."""
    islands = results["islands"]
    began_s = min(each["started_unix_s"] for each in islands)
    left, right = NAME_WIDTH, svg.WIDTH - NOTE_WIDTH
    across = svg.Scale(0.0, results["seconds"], left, right)
    parts = [
        _lane(
            each, number * (LANE + LANE_GAP), across, each["started_unix_s"] - began_s
        )
        for number, each in enumerate(islands)
    ]
    bottom = len(islands) * (LANE + LANE_GAP) + 12
    parts += [
        svg.text(across(at_s), bottom, f"{at_s:g} s", anchor="middle")
        for at_s in svg.ticks(0.0, results["seconds"], most=7)
    ]
    title = "Rounds and waits of each island by time"
    return svg.picture("".join(parts), height=bottom + 8, title=title)


def _lane(island: IslandResults, y: float, across: svg.Scale, late_s: float) -> str:
    name, style = island["island"], f"shard-{island['shard'] % 4}"
    ends = [at_s for at_s, _ in island["rounds"]] + [island["seconds"]]
    parts = [svg.text(NAME_WIDTH - 12, y + 18, name, anchor="end", style="name")]
    for number, (begin_s, end_s) in enumerate(pairwise(ends)):
        x, wide = across(late_s + begin_s), across(end_s) - across(begin_s)
        tip = f"{name}, after round {island['rounds'][number][1]:.0f}"
        shade = "odd" if number % 2 else "even"
        parts.append(svg.box(x, y, wide, LANE, f"round {style} {shade}", tip))
    for begin_s, end_s in island["waits"]:
        x, wide = across(late_s + begin_s), across(end_s) - across(begin_s)
        tip = f"{name} waited {figures.of_seconds(end_s - begin_s)}"
        parts.append(svg.box(x, y, max(wide, 0.8), LANE, "wait", tip))
    share = figures.of_share(island["wait_s"] / (island["seconds"] or 1.0))
    end = across(late_s + island["seconds"])
    parts.append(svg.text(end + 10, y + 18, f"waited {share}", style="figure"))
    return "".join(parts)


def _begun(points: Sequence[Point]) -> list[Point]:
    """Return a curve without its first fall, which would make all the rest flat."""
    return [each for each in points if each[0] > 0][len(points) // 8 :] or list(points)


def _with_loss(curve: svg.Curve) -> svg.Curve:
    label = f"{curve.label} {curve.points[-1][1]:.3f}"
    return svg.Curve(label, curve.points, curve.style)


def _tokens(count: float) -> str:
    if count >= 1e6:
        return f"{count / 1e6:g}M"
    return f"{count / 1e3:g}k" if count else "0"
