"""A status document with values of the run's past: totals, rates and the end in sight.

Rule 1: a process that has just started knows nothing of the islands. The values that an
earlier one received are shown with their time; a value that none received is None.
Rule 2: shares and rates are those of the last rounds, so that an hour of waiting at the
start is not blamed for days.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from atoll.telemetry.island_past import IslandPast
from atoll.telemetry.past import LINK, ROUND_BOUNDS_S, Past, RunTotals

MIN_ROUNDS = 5
"""Rounds of the run before its end is estimated."""

COUNTS = ("counted", "late", "refused")
REPORTED = (
    *("round", "loss", "loss_is_finite", "tokens", "inner_steps", "dropped_steps"),
    *("wait_s", "bytes_up", "bytes_down", "version", "step_s"),
    *("last_verdict", "refused_because", "metrics", "carried", "dropped", "machine"),
    *LINK,
)
"""Keys of an island's row that are taken from the past if this process has none."""

Document = Mapping[str, Any]


def with_past(
    status: Document,
    past: Past | None,
    before: Mapping[str, IslandPast] | None,
    *,
    now_unix_s: float,
) -> dict[str, Any]:
    """Return a status with the keys of the past.

    Args:
        status: The status by the messages of this process.
        past: None: it is not known yet.
        before: The islands as earlier processes left them; None: not known yet.
        now_unix_s: The time.
    """
    window = past.window() if past is not None else None
    rows = [_island(row, past, before, window) for row in status["islands"]]
    shares = [row["wait_share"] for row in rows if row["wait_share"] is not None]
    document = dict(status) | {
        "islands": rows,
        "stall_share": max(shares, default=None),
        "stall_share_mean": _mean_share(window),
        "utilisation": None,
        "tokens_per_s": _rate(window),
        "usual_round_s": past.usual_round_s() if past else None,
        "last_commit_unix_s": past.commit_unix_s if past else None,
        "created_unix_s": past.created_unix_s if past else None,
        "past_from_unix_s": past.first_unix_s if past else None,
        "process": past.process if past else None,
        "starts": past.starts if past else None,
        "epochs": past.epochs if past else None,
        "round_seconds": _round_seconds(past) if past else [],
        "anchor_metrics": _anchor_metrics(past) if past else {},
    }
    mean = document["stall_share_mean"]
    document["utilisation"] = None if mean is None else 1.0 - mean
    return document | _end(document, past, now_unix_s)


def _round_seconds(past: Past) -> list[dict[str, Any]]:
    """Return a histogram for each fragment: rounds up to each bound, and all."""
    return [
        {
            "fragment": fragment,
            "upto": [
                [bound, count]
                for bound, count in zip(
                    ROUND_BOUNDS_S, accumulate(times.counts), strict=False
                )
            ],
            "count": sum(times.counts),
            "sum_s": round(times.sum_s, 3),
        }
        for fragment, times in sorted(past.round_seconds.items())
    ]


def _anchor_metrics(past: Past) -> dict[str, dict[str, float]]:
    """Return the last measurement of the anchor by its name."""
    return {
        name: {"round": points[-1][0], "value": points[-1][1]}
        for name, points in past.anchor.items()
        if points
    }


def _island(
    row: Document,
    past: Past | None,
    before: Mapping[str, IslandPast] | None,
    window: tuple[RunTotals, RunTotals] | None,
) -> dict[str, Any]:
    record = past.islands.get(row["island"]) if past is not None else None
    earlier = before.get(row["island"]) if before is not None else None
    filled = {key: _reported(row, record, key) for key in REPORTED}
    is_new = past is not None and past.is_from_start
    counts: dict[str, int | None] = {}
    for key in COUNTS:
        # In a run whose beginning is known no earlier verdict is unknown.
        base = getattr(earlier, key) if earlier else (0 if is_new else None)
        counts[key] = None if base is None else base + (row[key] or 0)
    shares = _shares(row["island"], window)
    share = row["wait_share"] if shares is None else shares[0]
    return (
        dict(row)
        | filled
        | counts
        | {
            "wait_share": share,
            "utilisation": None if share is None else 1.0 - share,
            "tokens_per_s": shares[1] if shares else None,
            "as_of_unix_s": record.reported_unix_s if record else None,
            "deaths": record.deaths if record else None,
            "marks": record.marks if record else "",
        }
    )


def _reported(row: Document, record: IslandPast | None, key: str) -> Any:
    value = row.get(key)
    if value is not None or record is None:
        return value
    if key == "loss" and row.get("loss_is_finite") is False:
        return None  # this process knows better
    value = getattr(record, key)
    return None if value == {} else value  # as before any event of the island


def _shares(
    island: str, window: tuple[RunTotals, RunTotals] | None
) -> tuple[float, float | None] | None:
    """Return an island's share of waiting and its tokens per second, of late."""
    if window is None:
        return None
    first, last = (tick.islands.get(island) for tick in window)
    if first is None or last is None or last[1] <= first[1]:
        return None
    waited_s, seconds = last[2] - first[2], last[1] - first[1]
    share = min(1.0, max(0.0, waited_s / seconds))
    return share, max(0.0, (last[0] - first[0]) / seconds)


def _mean_share(window: tuple[RunTotals, RunTotals] | None) -> float | None:
    """Return the share of all islands' time that they waited, of late."""
    if window is None:
        return None
    seconds = waited_s = 0.0
    for island in window[0].islands.keys() & window[1].islands.keys():
        first, last = window[0].islands[island], window[1].islands[island]
        seconds += max(0.0, last[1] - first[1])
        waited_s += max(0.0, last[2] - first[2])
    return min(1.0, waited_s / seconds) if seconds > 0 else None


def _rate(window: tuple[RunTotals, RunTotals] | None) -> float | None:
    """Return the tokens that the run counts in a second, of late."""
    if window is None:
        return None
    first, last = window
    return max(0.0, (last.tokens - first.tokens) / (last.at_unix_s - first.at_unix_s))


def _end(
    document: Document, past: Past | None, now_unix_s: float
) -> dict[str, float | str | None]:
    """Return when the run will end, at its usual pace, and by which bound."""
    ends: list[tuple[float, str]] = []
    usual_s, last_round = document["usual_round_s"], document["last_round"]
    end_tokens, rate = document.get("end_tokens"), document["tokens_per_s"]
    is_known = past is not None and len(past.round_ends) > MIN_ROUNDS
    if is_known and document["state"] == "training":
        if last_round is not None and usual_s:
            rounds_left = max(0, last_round - document["round"])
            ends.append((now_unix_s + rounds_left * usual_s, "rounds"))
        if end_tokens is not None and rate:
            left_tokens = max(0, end_tokens - document["tokens"])
            ends.append((now_unix_s + left_tokens / rate, "tokens"))
    ends_unix_s, ends_by = min(ends, default=(None, None))
    return {"ends_unix_s": ends_unix_s, "ends_by": ends_by}


def recent_rounds(past: Past) -> list[dict[str, Any]]:
    """Return the last rounds as `recent` of a status lists them."""
    keys = ("fragment", "round", "counted", "late", "refused", "seconds", "bytes")
    return [
        {key: row.get(key) for key in keys} | {"committed_unix_s": row["committed"]}
        for row in past.rounds
    ]
