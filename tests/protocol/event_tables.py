"""What each event does to the coordinator's machine, as tables beside their drivers."""

from __future__ import annotations

from dataclasses import fields, replace

from atoll.errors import LeaseLost
from atoll.protocol import Beat, Holding, JoinRequest
from atoll.protocol.coordinator import advance
from atoll.protocol.events import (
    Beaten,
    Closed,
    Committed,
    Event,
    Founded,
    Gathered,
    Joining,
    Leave,
    Moved,
    Moving,
    NewValues,
    Offered,
    Pausing,
    Recovered,
    Saving,
    Staying,
    Stopping,
    Stored,
    Tick,
)
from atoll.protocol.rounds import Phase
from atoll.protocol.run_state import CoordinatorState, Founding, Move
from atoll.protocol.tables import ANY, Row, Table
from atoll.wire import Roster
from tests.protocol.drivers import (
    MODEL,
    NOW_S,
    OPEN_ROUND,
    OPENED_LONG_AGO_S,
    OUTER,
    member,
    open_round,
    state_of,
    update,
)

EVENTS = Table(
    title="What an event does",
    columns={
        "event": (
            "Joining",
            "Founded",
            "Beaten",
            "Offered",
            "Stored",
            "Stored, nobody else is missing",
            "Gathered",
            "Leave",
            "Leave, nobody else is missing",
            "Closed",
            "Tick",
            "Tick, who is missing is late",
            "Committed",
            "Recovered",
            "NewValues",
            "Stopping",
            "Pausing",
            "Saving",
            "Moving",
            "Moved",
            "Staying",
        )
    },
    answer="changes, then actions",
    rows=(
        Row(
            ("Joining",),
            "members, joins; Remember, Welcome",
            "Durable before it is answered: an incarnation is given once.",
        ),
        Row(
            ("Founded",),
            "founding, model, rounds; Say",
            "The weights are durable already; the first rounds exist.",
        ),
        Row(
            ("Beaten",), "members; Say", "A lease renewed; the answer is the position."
        ),
        Row(
            ("Offered",), "nothing; Say", "By its header alone: the body may stay away."
        ),
        Row(
            ("Stored",),
            "members, rounds; Say",
            "Staged, and one more arrival of this island is known.",
        ),
        Row(
            ("Stored, nobody else is missing",),
            "members, rounds; Say, Close",
            "The staged set is frozen by the event that completes it.",
        ),
        Row(
            ("Gathered",),
            "members, rounds; Say, Close",
            "All at once; whose host asks only what would be keeps the state before.",
        ),
        Row(("Leave",), "members; Remember", "Nobody waits for who has gone."),
        Row(
            ("Leave, nobody else is missing",),
            "members, rounds; Remember, Close",
            "Those who stay do not wait.",
        ),
        Row(("Closed",), "members; none", "A hint: the lease ends a second from now."),
        Row(("Tick",), "nothing; none", "Time alone changes nothing before it is due."),
        Row(
            ("Tick, who is missing is late",),
            "rounds; Close",
            "`wakes_at` said when to look.",
        ),
        Row(
            ("Committed",),
            "rounds; none",
            "The next round opens; what counted is added up.",
        ),
        Row(
            ("Recovered",),
            "rounds; Say",
            "The round after the state that an island has brought, which is durable.",
        ),
        Row(
            ("NewValues",),
            "settings, epoch; Remember",
            "An epoch, durable before it is in force.",
        ),
        Row(
            ("Stopping",),
            "rounds, settings, epoch, last_round; Remember, Say",
            "The furthest published round is the last, by an epoch of its own.",
        ),
        Row(
            ("Pausing",),
            "is_paused; Remember, Say",
            "Updates are staged, and nothing closes.",
        ),
        Row(
            ("Saving",),
            "saves; Say",
            "Islands are told with their next heartbeat; nothing waits for them.",
        ),
        Row(
            ("Moving",),
            "move; Remember, Say",
            "Nothing closes, and nobody comes, goes or publishes until it is there.",
        ),
        Row(
            ("Moved",),
            "move; Remember, Say",
            "Every island is told where the run is, for good.",
        ),
        Row(
            ("Staying",),
            "move; Remember, Say",
            "The run is not there, and will not be: all goes on here.",
        ),
    ),
)

FENCES = Table(
    title="Who may speak",
    columns={
        "event": ("Beaten", "Offered", "Stored", "Leave", "Closed"),
        "from": (
            "the present life",
            "a silent life",
            "an earlier life",
            "left",
            "nobody",
        ),
    },
    answer="answer",
    rows=(
        Row((ANY, "the present life"), "heard", "It holds the lease."),
        Row(
            (ANY, "a silent life"),
            "heard",
            "Its lease ran out: nobody waits for it, but it may be alive.",
        ),
        Row(
            (ANY, "an earlier life"),
            "LeaseLost",
            "A later incarnation fences every earlier one, for good.",
        ),
        Row((ANY, "left"), "LeaseLost", "Who has left joins again."),
        Row((ANY, "nobody"), "LeaseLost", "The run does not know the name."),
    ),
)


def what_it_does(event: str) -> str:
    """Apply an event to a run of two islands, and say what changed and what follows."""
    before = _before(event)
    after, actions = advance(before, _event(event), NOW_S)
    changed = [
        field.name
        for field in fields(CoordinatorState)
        if getattr(before, field.name) != getattr(after, field.name)
    ]
    done = [type(action).__name__ for action in actions]
    order = ["members", "founding", "model", "rounds", "settings", "epoch"]
    changed.sort(key=lambda name: order.index(name) if name in order else len(order))
    return f"{', '.join(changed) or 'nothing'}; {', '.join(done) or 'none'}"


def _before(event: str) -> CoordinatorState:
    if event == "Founded":
        founding = Founding(island="a", incarnation=1, model=MODEL, until_s=NOW_S + 1)
        return replace(state_of(member("a"), start_islands=2), founding=founding)
    is_last = "," in event
    staged = {"b": update("b")} if is_last or event == "Committed" else {}
    round = open_round(
        phase=Phase.CLOSING if event == "Committed" else Phase.OPEN,
        roster=Roster(()) if event == "Committed" else None,
        candidates=frozenset("ab"),
        staged=staged,
        opened_s=OPENED_LONG_AGO_S if "late" in event else NOW_S,
    )
    speaker = member("a", lease_until_s=NOW_S + 10)
    state = state_of(speaker, member("b"), rounds=(round,))
    if event in ("Moved", "Staying"):
        state = replace(state, move=Move(target="s3://lagoon", nonce="nonce"))
    return replace(state, model=MODEL) if event == "Moving" else state


def _event(name: str) -> Event:
    beat = Beat(island="a", incarnation=1, step=3)
    request = JoinRequest(model=MODEL, island="c")
    events: dict[str, Event] = {
        "Joining": Joining(request, b"key of c", b"nonce"),
        "Founded": Founded("a", 1, (bytes(16),), (OUTER,)),
        "Beaten": Beaten(beat),
        "Offered": Offered(update("a")),
        "Stored": Stored(update("a")),
        "Gathered": Gathered((update("a"), update("b"))),
        "Leave": Leave("a", 1),
        "Closed": Closed("a", 1),
        "Tick": Tick(),
        "Committed": Committed(0, Roster(()), bytes(16), OUTER),
        "Recovered": Recovered(0, Holding(OPEN_ROUND, bytes(16)), (), OUTER),
        "NewValues": NewValues({"run.patience": 5.0}),
        "Stopping": Stopping(),
        "Pausing": Pausing(is_paused=True),
        "Saving": Saving(),
        "Moving": Moving("s3://lagoon", "nonce"),
        "Moved": Moved("s3://lagoon"),
        "Staying": Staying("s3://lagoon"),
    }
    return events[name.partition(",")[0]]


def may_speak(event: str, sender: str) -> str:
    """Send an event as incarnation 1 of island a."""
    known = {
        "the present life": [member("a")],
        "a silent life": [member("a", lease_until_s=NOW_S - 1)],
        "an earlier life": [member("a", incarnation=2)],
        "left": [member("a", has_left=True)],
        "nobody": [],
    }[sender]
    state = state_of(*known, member("b"), rounds=(open_round(),), quorum=2)
    try:
        advance(state, _event(event), NOW_S)
    except LeaseLost:
        return "LeaseLost"
    return "heard"
