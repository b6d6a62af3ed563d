"""What each event does to the coordinator's machine, as tables beside their drivers."""

from __future__ import annotations

from dataclasses import fields, replace

from atoll.data import Ask, DataSpec, RowLedger
from atoll.errors import LeaseLost
from atoll.protocol import Heartbeat, HeldRound, JoinRequest
from atoll.protocol.coordinator import advance
from atoll.protocol.coordinator_state import CoordinatorState, Founding, Move
from atoll.protocol.events import (
    BaseSeen,
    Committed,
    ConnectionLost,
    DataOpened,
    EndPassed,
    Event,
    Founded,
    FoundingSeen,
    HeartbeatReceived,
    JoinRequested,
    Leave,
    MemberSeen,
    MoveCancelled,
    MoveCompleted,
    MoveRequested,
    MoveSeen,
    PauseRequested,
    Recovered,
    RosterSeen,
    RowsClaimed,
    RowsSeen,
    SaveRequested,
    SettingsChanged,
    SettingsSeen,
    StateSeen,
    StopRequested,
    StopSeen,
    Tick,
    UpdateOffered,
    UpdateRevoked,
    UpdateSeen,
    UpdatesGathered,
    UpdateStored,
)
from atoll.protocol.messages import CountedWork
from atoll.protocol.rounds import Phase
from atoll.protocol.tables import ANY, DecisionRow, DecisionTable
from atoll.settings import RunSettings
from atoll.wire import Roster
from tests.protocol.drivers import (
    MODEL,
    NOW_S,
    OPEN_ROUND,
    OPENED_LONG_AGO_S,
    OUTER,
    dealing,
    member,
    open_round,
    state_of,
    update,
)

COUNTED = CountedWork(round=1, inner_steps=4, tokens=4)

EVENTS = DecisionTable(
    title="Effects of events",
    columns={
        "event": (
            "JoinRequested",
            "Founded",
            "HeartbeatReceived",
            "UpdateOffered",
            "UpdateStored",
            "UpdateStored, no other island is missing",
            "UpdatesGathered",
            "Leave",
            "Leave, no other island is missing",
            "Leave, the island holds rows",
            "DataOpened",
            "RowsClaimed",
            "ConnectionLost",
            "Tick",
            "Tick, the missing islands are late",
            "Committed",
            "Recovered",
            "SettingsChanged",
            "StopRequested",
            "PauseRequested",
            "SaveRequested",
            "MoveRequested",
            "MoveCompleted",
            "MoveCancelled",
            "FoundingSeen",
            "StateSeen",
            "BaseSeen",
            "MemberSeen",
            "UpdateSeen",
            "UpdateRevoked",
            "RosterSeen",
            "SettingsSeen",
            "StopSeen",
            "EndPassed",
            "RowsSeen",
            "MoveSeen",
        )
    },
    answer="changes, then actions",
    rows=(
        DecisionRow(
            ("JoinRequested",),
            "members, joins; Persist, Welcome",
            "Durable before the response: an incarnation is assigned once.",
        ),
        DecisionRow(
            ("Founded",),
            "founding, model, rounds; Respond",
            "The weights are durable already; the first rounds exist.",
        ),
        DecisionRow(
            ("HeartbeatReceived",),
            "members; Respond",
            "A lease renewed; the response is the position.",
        ),
        DecisionRow(
            ("UpdateOffered",),
            "nothing; Respond",
            "Decided by its header: the body is not needed.",
        ),
        DecisionRow(
            ("UpdateStored",),
            "members, rounds; Respond",
            "Staged, and one more arrival of this island is known.",
        ),
        DecisionRow(
            ("UpdateStored, no other island is missing",),
            "members, rounds; Respond, CloseRound",
            "The staged set is frozen by the event that completes it.",
        ),
        DecisionRow(
            ("UpdatesGathered",),
            "members, rounds; Respond, CloseRound",
            "All updates in one event; a host that only previews keeps the old state.",
        ),
        DecisionRow(
            ("Leave",),
            "members; Persist",
            "No island waits for an island that has left.",
        ),
        DecisionRow(
            ("Leave, no other island is missing",),
            "members, rounds; Persist, CloseRound",
            "The remaining islands do not wait.",
        ),
        DecisionRow(
            ("Leave, the island holds rows",),
            "members, ledger; Persist, Persist",
            "No update of it stands, so that its rows return.",
        ),
        DecisionRow(
            ("DataOpened",),
            "ledger; Persist, Respond",
            "Durable: a second dataset is compared with it.",
        ),
        DecisionRow(
            ("RowsClaimed",),
            "ledger; Persist, Respond",
            "A claim is durable before it is answered.",
        ),
        DecisionRow(
            ("ConnectionLost",),
            "members; none",
            "A hint: the lease ends a second from now.",
        ),
        DecisionRow(
            ("Tick",), "nothing; none", "Time alone changes nothing before a deadline."
        ),
        DecisionRow(
            ("Tick, the missing islands are late",),
            "rounds; CloseRound",
            "`wakes_at` gave the time of this tick.",
        ),
        DecisionRow(
            ("Committed",),
            "rounds; none",
            "The next round opens; the counted progress is added.",
        ),
        DecisionRow(
            ("Recovered",),
            "rounds; Respond",
            "The round after the uploaded state, which is durable.",
        ),
        DecisionRow(
            ("SettingsChanged",),
            "settings, epoch; Persist",
            "An epoch, durable before it takes effect.",
        ),
        DecisionRow(
            ("StopRequested",),
            "rounds, settings, epoch, last_round; Persist, Respond",
            "The highest published round is the last, in a separate epoch.",
        ),
        DecisionRow(
            ("PauseRequested",),
            "is_paused; Persist, Respond",
            "Updates are staged, and no round closes.",
        ),
        DecisionRow(
            ("SaveRequested",),
            "saves; Respond",
            "Islands get the request with their next heartbeat; no round waits.",
        ),
        DecisionRow(
            ("MoveRequested",),
            "move; Persist, Respond",
            "Only rounds close whose updates no island sends again.",
        ),
        DecisionRow(
            ("MoveCompleted",),
            "move; Persist, Respond",
            "Every island gets the run's new location, permanently.",
        ),
        DecisionRow(
            ("MoveCancelled",),
            "move; Persist, Respond",
            "The move is cancelled: everything continues here.",
        ),
        DecisionRow(
            ("FoundingSeen",),
            "model, rounds; none",
            "The first rounds exist: `run.json` is in the bucket.",
        ),
        DecisionRow(
            ("StateSeen",),
            "rounds, counted; none",
            "A reader begins after the newest state, without older rosters.",
        ),
        DecisionRow(
            ("BaseSeen",),
            "rounds; none",
            "An island has made the state before the open round.",
        ),
        DecisionRow(
            ("MemberSeen",),
            "members; none",
            "A changed document renews its island's lease, by the observer's clock.",
        ),
        DecisionRow(
            ("UpdateSeen",),
            "members, rounds; none",
            "Staged; an observer may write the roster when the round is due.",
        ),
        DecisionRow(
            ("UpdateRevoked",),
            "rounds; none",
            "An update counts only if its island's latest incarnation names it.",
        ),
        DecisionRow(
            ("RosterSeen",),
            "rounds; none",
            "The first roster that was put closes the round, for every observer.",
        ),
        DecisionRow(
            ("SettingsSeen",),
            "settings, epoch; none",
            "The bucket has the control already: nothing is left to make durable.",
        ),
        DecisionRow(
            ("StopSeen",),
            "rounds, last_round; none",
            "The control, or the roster with the last tokens, names the round.",
        ),
        DecisionRow(
            ("EndPassed",),
            "last_rounds; none",
            "The roster was put by an island that did not know the end.",
        ),
        DecisionRow(
            ("RowsSeen",),
            "ledger; none",
            "The bucket has the claims and the rosters that it is folded from.",
        ),
        DecisionRow(
            ("MoveSeen",),
            "move; none",
            "No round closes from then on.",
        ),
    ),
)

FENCES = DecisionTable(
    title="Fencing",
    columns={
        "event": (
            "HeartbeatReceived",
            "UpdateOffered",
            "UpdateStored",
            "Leave",
            "ConnectionLost",
        ),
        "from": (
            "the current incarnation",
            "a silent incarnation",
            "an earlier incarnation",
            "left",
            "an unknown island",
        ),
    },
    answer="answer",
    rows=(
        DecisionRow((ANY, "the current incarnation"), "heard", "It holds the lease."),
        DecisionRow(
            (ANY, "a silent incarnation"),
            "heard",
            "Its lease has expired: no round waits for it, but it may be alive.",
        ),
        DecisionRow(
            (ANY, "an earlier incarnation"),
            "LeaseLost",
            "A later incarnation fences every earlier one permanently.",
        ),
        DecisionRow(
            (ANY, "left"), "LeaseLost", "An island that has left must join again."
        ),
        DecisionRow(
            (ANY, "an unknown island"), "LeaseLost", "The run does not know the name."
        ),
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
    if event == "FoundingSeen":
        return CoordinatorState.begin("run", RunSettings(), is_observed=True)
    is_last = "no other" in event or "late" in event or event == "UpdateRevoked"
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
    if event.endswith("Seen") or event == "UpdateRevoked":
        return replace(state, is_observed=True)
    if event == "EndPassed":
        return replace(state, is_observed=True, last_rounds=(OPEN_ROUND,))
    if event in ("MoveCompleted", "MoveCancelled"):
        state = replace(state, move=Move(target="s3://lagoon", nonce="nonce"))
    if "rows" in event.lower() or event == "DataOpened":
        return dealing(state, is_open=event != "DataOpened", holder="a")
    return replace(state, model=MODEL) if event == "MoveRequested" else state


def _event(name: str) -> Event:
    beat = Heartbeat(island="a", incarnation=1, step=3)
    request = JoinRequest(model=MODEL, island="c")
    events: dict[str, Event] = {
        "JoinRequested": JoinRequested(request, b"key of c", b"nonce"),
        "Founded": Founded("a", 1, (bytes(16),), (OUTER,)),
        "HeartbeatReceived": HeartbeatReceived(beat),
        "UpdateOffered": UpdateOffered(update("a")),
        "UpdateStored": UpdateStored(update("a")),
        "UpdatesGathered": UpdatesGathered((update("a"), update("b"))),
        "Leave": Leave("a", 1),
        "DataOpened": DataOpened("a", 1, DataSpec(rows=100)),
        "RowsClaimed": RowsClaimed(Ask(island="a", incarnation=1, number=2)),
        "ConnectionLost": ConnectionLost("a", 1),
        "Tick": Tick(),
        "Committed": Committed(0, Roster(()), bytes(16), OUTER),
        "Recovered": Recovered(0, HeldRound(OPEN_ROUND, bytes(16)), (), OUTER),
        "SettingsChanged": SettingsChanged({"run.patience": 5.0}),
        "StopRequested": StopRequested(),
        "PauseRequested": PauseRequested(is_paused=True),
        "SaveRequested": SaveRequested(),
        "MoveRequested": MoveRequested("s3://lagoon", "nonce"),
        "MoveCompleted": MoveCompleted("s3://lagoon"),
        "MoveCancelled": MoveCancelled("s3://lagoon"),
        "FoundingSeen": FoundingSeen(MODEL, (OUTER,)),
        "StateSeen": StateSeen(0, OPEN_ROUND, {"a": COUNTED}, (bytes(16),)),
        "BaseSeen": BaseSeen(0, HeldRound(OPEN_ROUND - 1, b"x" * 16)),
        "MemberSeen": MemberSeen(member("a", step=9)),
        "UpdateSeen": UpdateSeen(update("a"), NOW_S + 30),
        "UpdateRevoked": UpdateRevoked(0, "b"),
        "RosterSeen": RosterSeen(0, Roster(()), bytes(16), OUTER),
        "SettingsSeen": SettingsSeen({"run.patience": 5.0}, (OUTER,)),
        "StopSeen": StopSeen(OPEN_ROUND),
        "EndPassed": EndPassed(0, OPEN_ROUND),
        "RowsSeen": RowsSeen(
            RowLedger(unit_rows=10, passes=1, num_fragments=1, is_open=True)
        ),
        "MoveSeen": MoveSeen(Move(target="s3://lagoon", nonce="nonce")),
    }
    return events[name.partition(",")[0]]


def may_speak(event: str, sender: str) -> str:
    """Send an event as incarnation 1 of island a."""
    known = {
        "the current incarnation": [member("a")],
        "a silent incarnation": [member("a", lease_until_s=NOW_S - 1)],
        "an earlier incarnation": [member("a", incarnation=2)],
        "left": [member("a", has_left=True)],
        "an unknown island": [],
    }[sender]
    state = state_of(*known, member("b"), rounds=(open_round(),), quorum=2)
    try:
        advance(state, _event(event), NOW_S)
    except LeaseLost:
        return "LeaseLost"
    return "heard"
