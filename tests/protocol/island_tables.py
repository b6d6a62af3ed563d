"""What each event makes an island do, as tables beside their drivers."""

from __future__ import annotations

from dataclasses import replace

from atoll.errors import Refused
from atoll.protocol import (
    Action,
    Await,
    End,
    Event,
    IslandState,
    Leaving,
    Plan,
    Position,
    Resend,
    Rest,
    Seal,
    Stepped,
    SyncNow,
    Take,
    Taken,
    Wanted,
    advance,
)
from atoll.protocol.island_state import REFUSALS, Book, Flight
from atoll.protocol.tables import ANY, YES_NO, Row, Table
from atoll.wire import Verdict

SYNC_EVERY = 4
PLAN = Plan(sync_every=SYNC_EVERY, num_fragments=1, overlap_steps=2)
LAST = 9
"""The last round of a run that has one."""

SAID: dict[type[Action], str] = {
    Seal: "seal",
    Await: "await",
    Take: "take",
    Resend: "resend",
    Rest: "rest",
    End: "end",
}

BOOKS = Table(
    title="What an island does when",
    columns={
        "event": ("a step", "a send point", "a take point", "SyncNow", "Leaving"),
        "the fragment is": (
            "free",
            "spoken for",
            "a round ahead",
            "in flight",
            "in flight, for the last round",
            "over",
        ),
    },
    answer="actions",
    rows=(
        Row((ANY, "over"), "none", "No round opens beyond the last."),
        Row(("a step", ANY), "none", "A step that synchronises nothing costs nothing."),
        Row(
            ("a take point", "in flight or in flight, for the last round"),
            "take",
            "The outcome is waited for here, never taken earlier.",
        ),
        Row(("a take point", ANY), "none", "Nothing is in flight."),
        Row(("a send point", "free"), "seal", "The window's work goes out."),
        Row(
            ("a send point", "spoken for"),
            "await",
            "An earlier life's update stands: this life only takes the outcome.",
        ),
        Row(
            ("a send point", "a round ahead"),
            "none",
            "Its round belongs to a later step: `sync_now` or a summons was earlier.",
        ),
        Row(
            ("a send point or SyncNow", "in flight or in flight, for the last round"),
            "take",
            "One update in flight per fragment: taken first, sealed after.",
        ),
        Row(
            ("SyncNow", "spoken for"), "await, take", "As at a send point, and at once."
        ),
        Row(("SyncNow", ANY), "seal, take", "Everything goes out, and is waited for."),
        Row(
            ("Leaving", "in flight"),
            "resend, rest",
            "The sealed bytes again, then what came since, for the round after.",
        ),
        Row(
            ("Leaving", "in flight, for the last round"),
            "resend",
            "There is no round after it.",
        ),
        Row(("Leaving", ANY), "rest", "One departing update, for the open round."),
    ),
)

ARRIVALS = Table(
    title="When an outcome was taken",
    columns={
        "verdict": ("counted", "late", "refused", "refused a third time"),
        "due": YES_NO,
        "the run is": ("here", "ahead, round open", "ahead, round over"),
        "last": YES_NO,
    },
    answer="then",
    rows=(
        Row(
            ("refused a third time", ANY, ANY, ANY),
            "Refused",
            "The optimizer's moments are poisoned: a fresh start is the cure.",
        ),
        Row(
            ("late", ANY, "ahead, round open", "yes"),
            "jump, end",
            "Nothing is sealed beyond the last round.",
        ),
        Row((ANY, ANY, "ahead, round over", "yes"), "jump, end", "As above."),
        Row((ANY, ANY, ANY, "yes"), "end", "Every fragment has its last round."),
        Row(
            ("late", "no", "ahead, round open", ANY),
            "jump, seal",
            "In step with the others; a send point jumped over is sent at once.",
        ),
        Row(
            (ANY, "no", "ahead, round over", ANY),
            "jump, await, take",
            "The committed rounds say where the run is; the one missed is taken first.",
        ),
        Row(
            ("late", "yes", "ahead, round open", ANY),
            "jump, seal, take",
            "It was wanted now: sealed where the others are, and waited for.",
        ),
        Row((ANY, "yes", "ahead, round over", ANY), "jump, seal, take", "As above."),
        Row((ANY, "yes", ANY, ANY), "seal, take", "It was wanted now."),
        Row((ANY, ANY, ANY, ANY), "none", "Training goes on."),
    ),
)

SUMMONS = Table(
    title="When all islands wait",
    columns={
        "the wanted fragment is": (
            "free",
            "free, and a round behind",
            "spoken for",
            "in flight, for its open round",
            "in flight, for an earlier round",
        )
    },
    answer="actions",
    rows=(
        Row(
            ("free",),
            "seal 1, take 0, take 1",
            "It publishes before its time, and goes on waiting for its own.",
        ),
        Row(
            ("spoken for",),
            "seal 1, take 0, take 1",
            "What an earlier life sent was lost with a restart: nothing stands.",
        ),
        Row(("in flight, for its open round",), "take 0", "It is on its way already."),
        Row(
            ("in flight, for an earlier round",),
            "take 1, take 0",
            "That round is over; taken, the open one is sealed for.",
        ),
        Row(
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
        books=(_book(fragment),),
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


def _book(fragment: str) -> Book:
    take_at = 7
    return {
        "free": Book(taken=1),
        "spoken for": Book(taken=1, is_spoken_for=True),
        "a round ahead": Book(taken=2),
        "in flight": Book(taken=1, flight=Flight(round=2, take_at=take_at)),
        "in flight, for the last round": Book(
            taken=LAST - 1, flight=Flight(round=LAST, take_at=take_at)
        ),
        "over": Book(taken=LAST),
    }[fragment]


def after_the_outcome(verdict: str, due: str, run: str, last: str) -> str:
    """Take round 2 at step 10; round 3 belongs to step 12, which others may be past."""
    book = Book(
        taken=1,
        refused=REFUSALS - 1 if "third" in verdict else 0,
        flight=Flight(round=2, take_at=10),
        is_due=due == "yes",
    )
    position = Position(
        step=10 if run == "here" else 13,
        rounds=(4 if "over" in run else 3,),
        last_round=2 if last == "yes" else None,
    )
    event = Taken(
        fragment=0,
        verdict=Verdict[verdict.split()[0].upper()],
        through=2,
        position=position,
    )
    try:
        after, actions = advance(IslandState(step=10, books=(book,)), event, PLAN)
    except Refused:
        return "Refused"
    jumps = ["jump"] if after.step != 10 else []
    return ", ".join([*jumps, *(SAID[type(each)] for each in actions)]) or "none"


def when_summoned(fragment: str) -> str:
    """Wait for fragment 0, while others wait for round 3 of fragment 1."""
    wanted = {
        "free": Book(taken=2),
        "free, and a round behind": Book(taken=1),
        "spoken for": Book(taken=2, is_spoken_for=True),
        "in flight, for its open round": Book(
            taken=2, flight=Flight(round=3, take_at=8)
        ),
        "in flight, for an earlier round": Book(
            taken=1, flight=Flight(round=2, take_at=8)
        ),
    }[fragment]
    waiting = Book(taken=2, flight=Flight(round=3, take_at=6))
    position = Position(step=6, rounds=(3, 3), wanted=(1,))
    _, actions = advance(
        IslandState(step=6, books=(waiting, wanted)),
        Wanted(0, position),
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
