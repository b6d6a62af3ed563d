"""Status documents of runs that are easy to check by eye."""

from __future__ import annotations

from typing import Any


def island(name: str, **changes: Any) -> dict[str, Any]:
    """Return one live island that is in round 6 of a run."""
    return {
        "island": name,
        "incarnation": 2,
        "slot": 0,
        "state": "live",
        "lease_s": 12.0,
        "seen_s": 1.2,
        "step": 480,
        "round": 6,
        "pace_s": 12.4,
        "step_s": 0.124,
        "window": 100,
        "share": None,
        "age": None,
        "ages_max": None,
        "waits_for": None,
        "loss": 1.93,
        "loss_is_finite": True,
        "as_of_unix_s": 1_700_003_599.0,
        "deaths": 0,
        "utilisation": 0.98,
        "metrics": {"lr": 0.5},
        "tokens_per_s": 47_000.0,
        "tokens": 9999,
        "inner_steps": 480,
        "wait_s": 3.4,
        "wait_share": 0.02,
        "bytes_up": 12_345_678,
        "bytes_down": 23_456_789,
        "version": "0.1.0",
        "counted": 11,
        "late": 0,
        "refused": 0,
        "last_verdict": "counted",
        "refused_because": None,
        "dropped_steps": 0,
        "carried": 1,
        "dropped": 0,
        "late_after_s": 30.0,
        "exchange_s": 4.5,
        "hidden_s": 4.25,
        "up_bytes_per_s": 1.25e7,
        "down_bytes_per_s": 2.5e7,
        "rtt_s": 0.02,
        "store_usd": 0.5,
        "machine": "cpu, torch 2.13.0",
    } | changes


def committed(number: int, **changes: Any) -> dict[str, Any]:
    """Return a round that was committed `100 - number` seconds ago."""
    return {
        "fragment": 0,
        "round": number,
        "counted": 4,
        "late": 0,
        "refused": 0,
        "seconds": 3.2,
        "committed_unix_s": 1_700_003_500.0 + number,
        "bytes": 12_345,
    } | changes


def status(*islands: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the status of a run that has trained for an hour."""
    return {
        "run": "demo-abcdef123456",
        "name": "demo",
        "version": "0.1.0",
        "settings_authority": "run",
        "state": "training",
        "why": "",
        "waits_for": [],
        "round": 6,
        "rounds": [7, 7, 6],
        "last_round": 40,
        "last_rounds": None,
        "mode": "sync",
        "rounds_per_window": None,
        "bytes_down_factor": None,
        "disk": {"free_bytes": 500_000_000_000, "reserve_bytes": 1_000_000},
        "round_seconds": [
            {"fragment": 0, "upto": [(5.0, 6)], "count": 6, "sum_s": 19.2}
        ],
        "anchor_metrics": {"eval_loss": {"round": 6, "value": 1.9}},
        "end_tokens": None,
        "overshoot": None,
        "tokens": 123_456,
        "epoch": 2,
        "started_unix_s": 1_700_000_000.0,
        "now_unix_s": 1_700_003_600.0,
        "quorum": 1,
        "start_islands": 4,
        "sync_every": 100,
        "stall_share": 0.12,
        "stall_share_mean": 0.08,
        "utilisation": 0.92,
        "starts": 1,
        "created_unix_s": 1_700_000_000.0,
        "tokens_per_s": None,
        "ends_unix_s": None,
        "cure": None,
        "same_data": [],
        "unowned_share": 0.0,
        "islands": list(islands),
        "recent": [committed(number) for number in (4, 5, 6)],
        "damage": [],
        "bytes_in": 1_000_000,
        "bytes_out": 2_000_000,
        "listening": "https://127.0.0.1:4711",
        "connections": {
            "open": 9,
            "most": 4096,
            "unverified": 1,
            "parked_answers": 0,
            "parked_bytes": 0,
            "bulk_active": 2,
            "bulk_waiting": 0,
            "long_polls": 4,
            "shed": {"too_many": 3, "slow_reader": 0},
        },
    } | changes


def trouble(count: int) -> dict[str, Any]:
    """Return the status of a run that waits, with islands of every kind."""
    islands = [island(f"tokyo-{n}", loss=1.5 + n / 10, slot=n) for n in range(count)]
    islands[0] |= {"state": "silent", "seen_s": 75.0, "wait_share": 0.4}
    if count > 2:
        islands[1] |= {
            "refused": 1,
            "last_verdict": "refused",
            "refused_because": "norm: 812.1 is 40.6 times the median of the round",
        }
        islands[2] |= {"state": "left", "loss": None, "pace_s": None, "step_s": None}
    waits = [
        {
            "island": "tokyo-0",
            "fragment": 2,
            "round": 7,
            "since_s": 75.0,
            "late_in_s": 4.5,
        }
    ]
    return status(
        *islands,
        why="Waits for tokyo-0, which has not published round 7 of fragment 2.",
        waits_for=waits,
        stall_share=0.41,
        tokens_per_s=352_000.0,
        agreement={
            "round": 6,
            "digest": "a3c5e7cc",
            "holding": 3,
            "of": 3,
            "apart": [],
        },
        last_commit_unix_s=1_700_003_590.0,
        data={"trained": 5, "partly": 4, "refused": 3, "in_hand": 2, "free": 1},
        cure="Waiting costs 41 % of the time: set sync.overlap_steps=20, or evict it.",
    )
