"""What each event makes an island do, as tables beside their drivers."""

from __future__ import annotations

from dataclasses import replace

from atoll.errors import Refused
from atoll.protocol import (
    Action,
    Await,
    End,
    Event,
    FragmentsRequested,
    IslandState,
    Leaving,
    OutcomeTaken,
    Position,
    PublishRest,
    Resend,
    Seal,
    Stepped,
    SyncNow,
    SyncPlan,
    Take,
    advance,
)
from atoll.protocol.island import REFUSALS, FragmentSync, RoundInFlight
from atoll.protocol.tables import ANY, YES_NO, DecisionRow, DecisionTable
from atoll.wire import Verdict

SYNC_EVERY = 4
PLAN = SyncPlan(sync_every=SYNC_EVERY, num_fragments=1, overlap_steps=2)
LAST = 9
"""The last round of a run that has one."""

SAID: dict[type[Action], str] = {
    Seal: "seal",
    Await: "await",
    Take: "take",
    Resend: "resend",
    PublishRest: "rest",
    End: "end",
}

BOOKS = DecisionTable(
    title="Actions of an island",
    columns={
        "event": ("a step", "a send point", "a take point", "SyncNow", "Leaving"),
        "the fragment is": (
            "free",
            "reserved",
            "a round ahead",
            "in flight",
            "in flight, for the last round",
            "over",
        ),
    },
    answer="actions",
    rows=(
        DecisionRow((ANY, "over"), "none", "No round opens beyond the last."),
        DecisionRow(
            ("a step", ANY), "none", "A step that synchronises nothing costs nothing."
        ),
        DecisionRow(
            ("a take point", "in flight or in flight, for the last round"),
            "take",
            "The island waits for the outcome here, and never takes it earlier.",
        ),
        DecisionRow(("a take point", ANY), "none", "Nothing is in flight."),
        DecisionRow(("a send point", "free"), "seal", "The window's work is sent."),
        DecisionRow(
            ("a send point", "reserved"),
            "await",
            "An earlier incarnation's update is valid: only the outcome is taken.",
        ),
        DecisionRow(
            ("a send point", "a round ahead"),
            "none",
            "Its round belongs to a later step: it was sealed ahead of schedule.",
        ),
        DecisionRow(
            ("a send point or SyncNow", "in flight or in flight, for the last round"),
            "take",
            "One update in flight per fragment: taken first, sealed after.",
        ),
        DecisionRow(
            ("SyncNow", "reserved"),
            "await, take",
            "As at a send point, and immediately.",
        ),
        DecisionRow(
            ("SyncNow", ANY),
            "seal, take",
            "Everything is sent, and the island waits for the outcome.",
        ),
        DecisionRow(
            ("Leaving", "in flight"),
            "resend, rest",
            "The sealed bytes again, then the work since, for the next round.",
        ),
        DecisionRow(
            ("Leaving", "in flight, for the last round"),
            "resend",
            "There is no round after it.",
        ),
        DecisionRow(
            ("Leaving", ANY), "rest", "One departing update, for the open round."
        ),
    ),
)

ARRIVALS = DecisionTable(
    title="After an outcome",
    columns={
        "verdict": ("counted", "late", "refused", "refused a third time"),
        "due": YES_NO,
        "the run is": ("here", "ahead, round open", "ahead, round over"),
        "last": YES_NO,
    },
    answer="then",
    rows=(
        DecisionRow(
            ("refused a third time", ANY, ANY, ANY),
            "Refused",
            "The optimizer's moments are poisoned: a fresh start is the cure.",
        ),
        DecisionRow(
            ("late", ANY, "ahead, round open", "yes"),
            "jump, end",
            "Nothing is sealed beyond the last round.",
        ),
        DecisionRow((ANY, ANY, "ahead, round over", "yes"), "jump, end", "As above."),
        DecisionRow(
            (ANY, ANY, ANY, "yes"), "end", "Every fragment has its last round."
        ),
        DecisionRow(
            ("late", "no", "ahead, round open", ANY),
            "jump, seal",
            "In step with the others; a skipped send point is sent immediately.",
        ),
        DecisionRow(
            (ANY, "no", "ahead, round over", ANY),
            "jump, await, take",
            "Committed rounds give the run's position; the missed one is taken first.",
        ),
        DecisionRow(
            ("late", "yes", "ahead, round open", ANY),
            "jump, seal, take",
            "It was wanted now: sealed at the others' step, then taken.",
        ),
        DecisionRow(
            (ANY, "yes", "ahead, round over", ANY), "jump, seal, take", "As above."
        ),
        DecisionRow((ANY, "yes", ANY, ANY), "seal, take", "It was wanted now."),
        DecisionRow((ANY, ANY, ANY, ANY), "none", "Training continues."),
    ),
)

SUMMONS = DecisionTable(
    title="Islands that wait for each other",
    columns={
        "the wanted fragment is": (
            "free",
            "free, and a round behind",
            "reserved",
            "in flight, for its open round",
            "in flight, for an earlier round",
        )
    },
    answer="actions",
    rows=(
        DecisionRow(
            ("free",),
            "seal 1, take 0, take 1",
            "It publishes ahead of schedule, and keeps waiting for its own outcome.",
        ),
        DecisionRow(
            ("reserved",),
            "seal 1, take 0, take 1",
            "The earlier incarnation's update was lost with a restart.",
        ),
        DecisionRow(
            ("in flight, for its open round",), "take 0", "It is being sent already."
        ),
        DecisionRow(
            ("in flight, for an earlier round",),
            "take 1, take 0",
            "That round is over: it is taken, then the open one is sealed.",
        ),
        DecisionRow(
            ("free, and a round behind",),
            "await 1, take 1, take 0",
            "The round that it missed is taken first.",
        ),
    ),
)


def what_follows(event: str, fragment: str) -> str:
    """Send an event at inner step 8, the second send point of a period of 4."""
    state = IslandState(
        step=4 if event == "a send point" else 5,
        sync_states=(_book(fragment),),
        last_round=LAST,
    )
    events: dict[str, Event] = {
        "a step": Stepped(6),
        "a send point": Stepped(8),
        "a take point": Stepped(7),
        "SyncNow": SyncNow(6),
        "Leaving": Leaving(),
    }
    _, actions = advance(state, events[event], PLAN)
    return _said(actions)


def _book(fragment: str) -> FragmentSync:
    take_at = 7
    return {
        "free": FragmentSync(taken=1),
        "reserved": FragmentSync(taken=1, is_spoken_for=True),
        "a round ahead": FragmentSync(taken=2),
        "in flight": FragmentSync(
            taken=1, flight=RoundInFlight(round=2, take_at=take_at)
        ),
        "in flight, for the last round": FragmentSync(
            taken=LAST - 1, flight=RoundInFlight(round=LAST, take_at=take_at)
        ),
        "over": FragmentSync(taken=LAST),
    }[fragment]


def after_the_outcome(verdict: str, due: str, run: str, last: str) -> str:
    """Take round 2 at step 10; round 3 belongs to step 12, which others may be past."""
    sync_state = FragmentSync(
        taken=1,
        refused=REFUSALS - 1 if "third" in verdict else 0,
        flight=RoundInFlight(round=2, take_at=10),
        is_due=due == "yes",
    )
    position = Position(
        step=10 if run == "here" else 13,
        rounds=(4 if "over" in run else 3,),
        last_round=2 if last == "yes" else None,
    )
    event = OutcomeTaken(
        fragment=0,
        verdict=Verdict[verdict.split()[0].upper()],
        through=2,
        position=position,
    )
    try:
        after, actions = advance(
            IslandState(step=10, sync_states=(sync_state,)), event, PLAN
        )
    except Refused:
        return "Refused"
    jumps = ["jump"] if after.step != 10 else []
    return ", ".join([*jumps, *(SAID[type(each)] for each in actions)]) or "none"


def when_summoned(fragment: str) -> str:
    """Wait for fragment 0, while others wait for round 3 of fragment 1."""
    wanted = {
        "free": FragmentSync(taken=2),
        "free, and a round behind": FragmentSync(taken=1),
        "reserved": FragmentSync(taken=2, is_spoken_for=True),
        "in flight, for its open round": FragmentSync(
            taken=2, flight=RoundInFlight(round=3, take_at=8)
        ),
        "in flight, for an earlier round": FragmentSync(
            taken=1, flight=RoundInFlight(round=2, take_at=8)
        ),
    }[fragment]
    waiting = FragmentSync(taken=2, flight=RoundInFlight(round=3, take_at=6))
    position = Position(step=6, rounds=(3, 3), wanted=(1,))
    _, actions = advance(
        IslandState(step=6, sync_states=(waiting, wanted)),
        FragmentsRequested(0, position),
        replace(PLAN, num_fragments=2),
    )
    numbered = [
        f"{SAID[type(each)]} {each.fragment}"
        for each in actions
        if not isinstance(each, End)
    ]
    return ", ".join(numbered)


def _said(actions: list[Action]) -> str:
    return ", ".join(SAID[type(action)] for action in actions) or "none"
