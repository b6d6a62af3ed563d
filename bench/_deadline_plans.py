"""What befalls four islands in an hour: scenarios as plans of faults."""

from __future__ import annotations

from atoll.simulate import FaultPlan

HOUR_S = 3600


def drifting() -> FaultPlan:
    """Two islands get slower and faster again, by turns, in small changes."""
    plan = FaultPlan()
    for number in range(12):
        at_s = number * HOUR_S / 12
        away = abs(number - 6) / 6  # 1 at the start, 0 after half an hour
        plan = plan.slow("i2", factor=1 + 0.8 * away, at_s=at_s, for_s=HOUR_S / 12)
        plan = plan.slow("i3", factor=1.8 - 0.8 * away, at_s=at_s, for_s=HOUR_S / 12)
    return plan


def dying() -> FaultPlan:
    """A slow island dies four times and is back after five minutes."""
    plan = FaultPlan().slow("i3", factor=1.5)
    for minute in (10, 25, 40, 55):
        plan = plan.kill("i3", at_s=minute * 60.0, back_after_s=300.0)
    return plan


def freezing() -> FaultPlan:
    """An island stands still for 40 s every four minutes, heartbeats and all."""
    plan = FaultPlan()
    for minute in range(3, 60, 4):
        plan = plan.freeze("i3", at_s=minute * 60.0, for_s=40.0)
    return plan


def stalling() -> FaultPlan:
    """One inner step in twenty minutes takes five, while heartbeats go on."""
    plan = FaultPlan()
    for minute in (10, 30, 50):
        # Steps that begin in these 20 s take 300 s, so that there is one of them.
        plan = plan.slow("i3", factor=150.0, at_s=minute * 60.0, for_s=20.0)
    return plan


MIXED = FaultPlan().slow("i2", factor=1.3).slow("i3", factor=2.0)

SCENARIOS: dict[str, FaultPlan] = {
    "even speeds": FaultPlan(),
    "speeds 1, 1, 1.3, 2": MIXED,
    "drifting speeds": drifting(),
    "one becomes 1.5 x slower": FaultPlan().slow("i3", factor=1.5, at_s=1200.0),
    "one always 6 x slower": FaultPlan().slow("i3", factor=6.0),
    "one dies now and then": dying(),
    "one on a slow link": FaultPlan().throttle("i3", bytes_per_s=1000.0),
    "one freezes for 40 s": freezing(),
    "one stalls for 5 min": stalling(),
    "one hangs forever": FaultPlan().slow("i3", factor=1e4, at_s=1200.0),
}
