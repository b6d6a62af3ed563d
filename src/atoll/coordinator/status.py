"""What a coordinator says of its run to people: one document, kept stable."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from atoll.protocol.membership import LEASE_S, Member
from atoll.protocol.messages import Stats
from atoll.protocol.recovery import held_by
from atoll.protocol.rounds import Phase, Round
from atoll.protocol.run_state import CoordinatorState

DEAR_SHARE = 1 / 3
"""Beyond this share of waiting, status names the cure."""

MAX_NAMES = 8
"""So many islands are named in a sentence."""


def status_of(
    state: CoordinatorState,
    now_s: float,
    *,
    stats: Mapping[str, Stats],
    verdicts: Mapping[str, Mapping[str, Any]],
    since_unix_s: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return where the run is, who takes part, and whom it waits for.

    Args:
        state: Of the run.
        now_s: By the coordinator's clock.
        stats: What each island told last.
        verdicts: What became of each island's updates.
        since_unix_s: Since when the run is in a state, as far as that is known.
    """
    missing = waits_for(state, now_s)
    shares = [_share(each) for each in stats.values()]
    word = run_state(state, now_s)
    return {
        "run": state.run,
        "name": state.settings.run.name,
        "bundle": state.settings.run.bundle,
        "settings_authority": "run",
        "state": word,
        "why": why(state, now_s, missing),
        "since_unix_s": (since_unix_s or {}).get(word),
        "waits_for": missing,
        "round": min((round.number for round in state.rounds), default=1) - 1,
        "rounds": [round.number for round in state.rounds],
        "last_round": state.last_round,
        "move": state.move
        and {
            "target": state.move.target,
            "nonce": state.move.nonce,
            "is_over": state.move.is_over,
        },
        "tokens": state.counted.tokens,
        "epoch": state.epoch,
        "quorum": state.settings.run.quorum,
        "start_islands": state.settings.run.start_islands,
        "stall_share": max(shares, default=0.0),
        "cure": cure(state, shares),
        "same_data": same_data(stats),
        "islands": [
            island_of(member, now_s, stats.get(name), verdicts.get(name, {}))
            for name, member in sorted(state.members.known.items())
        ],
    }


def run_state(state: CoordinatorState, now_s: float) -> str:
    """Return the one word for where the run is."""
    if state.model is None:
        return "ended" if state.last_round == 0 else "founding"
    if state.move is not None:
        return "moved" if state.move.is_over else "moving"
    if all(round.phase is Phase.ENDED for round in state.rounds):
        return "ended"
    if state.is_paused:
        return "paused"
    if any(round.phase is Phase.WAITING for round in state.rounds):
        return "waiting"
    live = len(state.members.live(now_s))
    return "training" if live >= state.settings.run.quorum else "waiting"


def why(
    state: CoordinatorState, now_s: float, missing: Sequence[Mapping[str, Any]]
) -> str:
    """Return why the run does not go on, in a sentence; empty if it does."""
    live, run = len(state.members.live(now_s)), state.settings.run
    match run_state(state, now_s):
        case "founding" if state.founding and now_s <= state.founding.until_s:
            return f"Waits for {state.founding.island} to bring the first weights."
        case "founding":
            return "Waits for the first island, which brings the weights."
        case "moving" if state.move:
            return (
                f"On its way to {state.move.target}: say `atoll move` again to go on, "
                "or with --back to stay."
            )
        case "moved" if state.move:
            return f"It goes on at {state.move.target}. Islands that ask are told."
        case "paused":
            return f"Paused by an operator: `{_control(state)} resume` goes on."
        case "ended" if not state.last_round:
            return "Stopped by an operator before any update."
        case "ended":
            return f"Round {state.last_round} was the last."
        case "waiting" if not state.has_started:
            more = run.start_islands - live
            return f"Waits for {more} more of start_islands={run.start_islands}."
        case "waiting":
            return _too_few(state, now_s)
    names = sorted({each["island"] for each in missing})
    return (
        _why_not_known(state, now_s)
        or (f"Waits for {_listed(names)}." if names else "")
        or _why_not_closed(state)
    )


def _why_not_known(state: CoordinatorState, now_s: float) -> str:
    """Return what a restarted coordinator waits for before it closes a round."""
    members = state.members
    unheard = sorted(members.look(now_s).unheard)
    if unheard:
        until_s = max(members.known[name].unheard_until_s for name in unheard)
        return (
            f"The coordinator has restarted, and waits up to {until_s - now_s:.0f} s "
            f"for {_listed(unheard)} to report what they hold."
        )
    for round in state.rounds:
        lost = state.lost_state(round.fragment, now_s)
        if lost is not None:
            holders = sorted(
                name
                for name in members.live(now_s)
                if held_by(members.known[name], round.fragment) == lost
            )
            return (
                f"The run has lost rounds {round.number} to {lost.round} of fragment "
                f"{round.fragment}, and waits for {_listed(holders)} to bring its "
                f"state. `{_control(state)} evict ISLAND` goes on without it."
            )
    return ""


def _why_not_closed(state: CoordinatorState) -> str:
    """Return why a round that waits for no island is open or closing still."""
    quorum = state.settings.run.quorum
    for round in state.rounds:
        name = f"Round {round.number} of fragment {round.fragment}"
        if round.phase is Phase.CLOSING:
            return f"{name} is being reduced and written."
        if round.phase is Phase.OPEN and 0 < len(round.staged) < quorum:
            return f"{name} has {len(round.staged)} of quorum={quorum} updates."
    return ""


def _too_few(state: CoordinatorState, now_s: float) -> str:
    """Say how many more islands are needed, and whose return would help."""
    members, quorum = state.members, state.settings.run.quorum
    live = members.live(now_s)
    said = f"Waits for {quorum - len(live)} more of quorum={quorum}"
    silent = sorted(
        name
        for name, each in members.known.items()
        if name not in live and not each.has_left
    )
    return f"{said}. Silent: {_listed(silent)}." if silent else f"{said}."


def _listed(names: Sequence[str]) -> str:
    few = ", ".join(names[:MAX_NAMES])
    return (
        few if len(names) <= MAX_NAMES else f"{few} and {len(names) - MAX_NAMES} more"
    )


def waits_for(state: CoordinatorState, now_s: float) -> list[dict[str, Any]]:
    """Return who is awaited by rounds that others have published for."""
    return [
        _awaited(state, round, island, now_s)
        for round in state.rounds
        if round.phase is Phase.OPEN and round.staged
        for island in sorted(round.missing(state.members, now_s))
    ]


def _awaited(
    state: CoordinatorState, round: Round, island: str, now_s: float
) -> dict[str, Any]:
    since_s = round.waits_from_s
    late_s = round.late_at_s(island, state.members, state.settings) - now_s
    return {
        "island": island,
        "fragment": round.fragment,
        "round": round.number,
        "since_s": max(0.0, now_s - since_s),
        "late_in_s": max(0.0, late_s),
    }


def island_of(
    member: Member, now_s: float, stats: Stats | None, verdicts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return one island's row."""
    stats = stats or Stats()
    paces = [arrivals.median_s for arrivals in member.arrivals.values() if arrivals]
    left_s = member.lease_until_s - now_s
    waits = member.waits_for
    return {
        "island": member.island,
        "incarnation": member.incarnation,
        "slot": member.slot,
        "state": _standing(member, now_s),
        "lease_s": max(0.0, left_s),
        "seen_s": max(0.0, LEASE_S - left_s),
        "step": member.step,
        "round": min((held.round for held in member.holds), default=0),
        "pace_s": median(paces) if paces else None,
        "waits_for": waits and {"fragment": waits[0], "round": waits[1]},
        "loss": stats.loss,
        "tokens": stats.tokens,
        "inner_steps": stats.inner_steps,
        "dropped_steps": stats.dropped_steps or 0,
        "wait_s": stats.wait_s,
        "wait_share": _share(stats),
        "bytes_up": stats.bytes_up,
        "bytes_down": stats.bytes_down,
        "version": stats.version,
        "counted": verdicts.get("counted", 0),
        "late": verdicts.get("late", 0),
        "refused": verdicts.get("refused", 0),
        "last_verdict": verdicts.get("last"),
        "refused_because": verdicts.get("because"),
    }


def same_data(stats: Mapping[str, Stats]) -> list[list[str]]:
    """Return the islands that have begun with the same batch, group by group."""
    groups: dict[str, list[str]] = {}
    for name, each in sorted(stats.items()):
        if each.first_batch:
            groups.setdefault(each.first_batch, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def cure(state: CoordinatorState, shares: Sequence[float]) -> str | None:
    """Return what would help when waiting costs more than a third of the time."""
    if max(shares, default=0.0) <= DEAR_SHARE:
        return None
    sync = state.settings.sync
    if sync.overlap_steps == 0:
        return "Give sync.overlap_steps in the next run: islands train while they wait."
    return (
        f"Raise sync.sync_every above {sync.sync_every} in the next run, or, if one "
        f"island is slow, lower run.patience from {state.settings.run.patience:g}: "
        f"`{_control(state)} set run.patience=...`."
    )


def _control(state: CoordinatorState) -> str:
    return f"atoll control {shlex.quote(state.settings.run.name)}"


def _share(stats: Stats) -> float:
    return min(1.0, stats.wait_s / stats.seconds) if stats.seconds > 0 else 0.0


def _standing(member: Member, now_s: float) -> str:
    if member.has_left:
        return "left"
    return "live" if member.is_live(now_s) else "silent"
