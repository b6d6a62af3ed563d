"""Fields of the status document about a run as a whole: its end, its pace, remedies."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from atoll.protocol import Stats
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.model import ModelSpec
from atoll.wire import MOMENTS, codec

HIGH_WAITING_SHARE = 1 / 3
"""Share of waiting beyond which the status suggests a remedy."""

UNEQUAL = 1.3
"""Ratio of the slowest pace to the fastest beyond which it suggests other windows."""

RECENT_AGES = 21
"""Counted updates of an island whose ages are shown."""

SAMPLE = 2**20
"""Elements of a body whose size stands for all: codecs round up to blocks."""


def last_round_of(state: CoordinatorState) -> int | None:
    """Return the run's last round: the highest one, where fragments have their own."""
    return max(state.last_rounds) if state.last_rounds else state.last_round


def overshoot(state: CoordinatorState) -> int | None:
    """Return how many tokens have counted beyond `end_tokens`; None before that."""
    limit = state.settings.run.end_tokens
    if limit is None or state.counted.tokens < limit:
        return None
    return state.counted.tokens - limit


def why_ended(state: CoordinatorState) -> str:
    """Return which rounds were the last, and whether tokens decided that."""
    last = last_round_of(state)
    if not last:
        return "Stopped by an operator before any update."
    lasts = sorted(set(state.last_rounds or (last,)))
    text = f"Round {lasts[-1]} was the last"
    if len(lasts) > 1:
        text = f"Rounds {lasts[0]} to {lasts[-1]} were the last of their fragments"
    if overshoot(state) is None:
        return f"{text}."
    return (
        f"{text}: {state.settings.run.end_tokens:,} tokens were the goal, "
        f"{state.counted.tokens:,} counted."
    )


def ages_of(verdicts: Mapping[str, Any]) -> dict[str, float | int | None]:
    """Return the mean and the largest of an island's last ages, if it has any."""
    ages = verdicts.get("ages")
    if not ages:
        return {"age": None, "ages_max": None}
    return {"age": fmean(ages), "ages_max": max(ages)}


def async_fields(
    state: CoordinatorState, now_s: float, recent: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return how many rounds an asynchronous run commits per window, and their price.

    `rounds_per_window` is for one fragment, while the fastest island makes a window;
    `bytes_down_factor` is how many times more bytes an island takes down than one of
    a synchronous run, the mean over the live islands.
    """
    fields: dict[str, Any] = {
        "mode": state.settings.sync.mode,
        "rounds_per_window": None,
        "bytes_down_factor": None,
    }
    if not state.settings.sync.is_async:
        return fields
    rate = _rounds_per_s(recent) / max(1, len(state.rounds))
    windows_s = [
        member.step_s * state.window_of(name)
        for name in state.members.live(now_s)
        if (member := state.members.known[name]).step_s
    ]
    if not rate or not windows_s:
        return fields
    max_frames = _frames_of_a_state(state)
    frames = [min(max_frames, max(1.0, rate * window_s)) for window_s in windows_s]
    return fields | {
        "rounds_per_window": rate * min(windows_s),
        "bytes_down_factor": fmean(frames),
    }


def _rounds_per_s(recent: Sequence[Mapping[str, Any]]) -> float:
    if len(recent) < 2:
        return 0.0
    passed_s = recent[-1]["committed_unix_s"] - recent[0]["committed_unix_s"]
    return (len(recent) - 1) / passed_s if passed_s > 0 else 0.0


def _frames_of_a_state(state: CoordinatorState) -> float:
    """Return how many outcomes have the bytes of a state, which replaces them."""
    settings = state.settings
    gathers = settings.wire.down == "gather"
    down = codec(settings.wire.up if gathers else settings.wire.down)
    state_bytes = 4 * SAMPLE * (1 + MOMENTS[settings.outer.optimizer])
    return state_bytes / down.body_bytes(SAMPLE)


def same_data(stats: Mapping[str, Stats]) -> list[list[str]]:
    """Return groups of islands that have started with the same batch."""
    groups: dict[str, list[str]] = {}
    for name, island_stats in sorted(stats.items()):
        if island_stats.first_batch:
            groups.setdefault(island_stats.first_batch, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def unowned_share(state: CoordinatorState, now_s: float) -> float:
    """Return the share of the rows that `shard` gives to no live island."""
    if state.settings.data.is_dealt:
        return 0.0
    run, members = state.settings.run, state.members
    parts = run.start_islands if run.max_islands is None else run.max_islands
    slots = {members.known[name].slot for name in members.live(now_s)}
    return 1.0 - sum(slot < parts for slot in slots) / parts


def cure(state: CoordinatorState, now_s: float, shares: Sequence[float]) -> str | None:
    """Return a remedy when islands wait for more than a third of the time."""
    if max(shares, default=0.0) <= HIGH_WAITING_SHARE:
        return None
    sync = state.settings.sync
    if sync.is_async and sync.overlap_steps:
        return (
            f"Raise sync.overlap_steps above {sync.overlap_steps} in the next run, or "
            "lower async.grace_s: islands that train for twice the grace do not wait."
        )
    if not sync.is_async and not sync.dynamic_local_updates and sync.sync_every > 1:
        unequal = _unequal(state, now_s)
        if unequal:
            return unequal
    if sync.overlap_steps == 0:
        return "Give sync.overlap_steps in the next run: islands train while they wait."
    return (
        f"Raise sync.sync_every above {sync.sync_every} in the next run, or, if one "
        f"island is slow, lower run.patience from {state.settings.run.patience:g}: "
        f"`{control_command(state)} set run.patience=...`."
    )


def _unequal(state: CoordinatorState, now_s: float) -> str:
    """Return the remedy for islands whose paces differ, or an empty text."""
    members, live = state.members, state.members.live(now_s)
    paces = sorted(
        (step_s, name) for name in live if (step_s := members.known[name].step_s)
    )
    if not paces or paces[-1][0] <= UNEQUAL * paces[0][0]:
        return ""
    (fastest_s, fastest), (slowest_s, slowest) = paces[0], paces[-1]
    return (
        f"{slowest} takes {slowest_s / fastest_s:.1f} times as long for an inner step "
        f"as {fastest}. Set sync.dynamic_local_updates=true in the next run."
    )


def control_command(state: CoordinatorState) -> str:
    """Return the command line that controls the run, without its action."""
    return f"atoll control {shlex.quote(state.settings.run.name)}"


def num_parameters(model: ModelSpec | None) -> int | None:
    """Return the elements of the trained tensors; None before a run is founded."""
    if model is None:
        return None
    return sum(math.prod(t.shape) for t in model.with_role("parameter"))
