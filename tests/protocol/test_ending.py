"""The end of a run: by rounds, by tokens and by an operator, decided once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atoll import RunSettings
from atoll.errors import Refused, RunEnded, SettingsError, UsageError
from atoll.protocol import Position
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.events import (
    Action,
    CloseRound,
    Epoch,
    LastRounds,
    Leave,
    Persist,
    Respond,
    SettingsChanged,
    StopRequested,
    Tick,
    UpdateOffered,
    UpdateStored,
)
from atoll.protocol.membership import LEASE_S
from atoll.protocol.rounds import Phase, Reception
from atoll.settings.sections import AsyncSection, RunSection, SyncSection
from atoll.wire import FrameKind, TrainingProgress, with_body
from tests.protocol.test_coordinator import Desk, closings

GRACE_S = 2.0
DEADLINE_S = RunSettings().limits.deadline_max_s


def table_of(*names: str, fragments: int = 1, mode: str = "async", **run: Any) -> Desk:
    """Return a run that these islands have joined, and its first rounds."""
    is_async = mode == "async"
    settings = RunSettings(
        run=RunSection(start_islands=len(names), **run),
        sync=SyncSection(mode=mode, num_fragments=fragments),
        asynchronous=AsyncSection(grace_s=GRACE_S if is_async else None),
    )
    table = Desk(CoordinatorState.begin("run", settings), fragments=fragments)
    for name in names:
        table.join(name)
    return table


def persisted(actions: list[Action]) -> list[object]:
    return [action.change for action in actions if isinstance(action, Persist)]


def counts(
    table: Desk, name: str, *, tokens: int = 0, fragment: int = 0
) -> list[Action]:
    """Publish an update that counts, for the open round of a fragment."""
    round = table.state.rounds[fragment]
    header = table.header(
        name,
        refused="",
        elements=3,
        fragment=fragment,
        round=round.number,
        base=round.base,
        progress=TrainingProgress(inner_steps=tokens, tokens=tokens),
    )
    return table.do(UpdateStored(with_body(header, bytes(12))))


def committed(
    table: Desk, name: str, *, tokens: int = 0, fragment: int = 0
) -> list[Action]:
    """Commit a round that an island alone has published for."""
    counts(table, name, tokens=tokens, fragment=fragment)
    table.now_s += GRACE_S
    closes = [
        action
        for action in table.do(Tick())
        if isinstance(action, CloseRound) and action.fragment == fragment
    ]
    return table.commit(closes[0])


def numbers(table: Desk) -> tuple[int, ...]:
    return tuple(round.number for round in table.state.rounds)


def phases(table: Desk) -> list[Phase]:
    return [round.phase for round in table.state.rounds]


def test_tokens_end_a_run_with_an_epoch() -> None:
    """Round 2 has been published when round 1 of fragment 0 brings the tokens."""
    table = table_of("a", mode="sync", end_tokens=100)
    (close,) = closings(counts(table, "a", tokens=150))
    actions = table.commit(close)

    assert persisted(actions) == [Epoch(1, {"run.end_rounds": 1})]
    assert table.state.settings.run.end_rounds == 1
    assert table.state.epoch == 1
    assert phases(table) == [Phase.ENDED]
    assert persisted(table.do(Tick())) == []


def test_a_restart_does_not_take_back_an_end_by_tokens() -> None:
    """An update of the last round was staged and is lost: its round stays the last."""
    table = table_of("a", "b", fragments=2, mode="sync", end_tokens=100)
    for fragment in (0, 1):
        counts(table, "a", tokens=150, fragment=fragment)
        (close,) = closings(counts(table, "b", fragment=fragment))
        if fragment == 0:
            table.commit(close)
    counts(table, "a", tokens=300, fragment=0)  # of round 2
    actions = table.commit(close)
    assert persisted(actions) == [Epoch(1, {"run.end_rounds": 2})]
    rounds = tuple(replace(round, staged={}) for round in table.state.rounds)
    table.state = replace(table.state, rounds=rounds)

    assert persisted(table.do(Tick())) == []
    assert phases(table) == [Phase.OPEN, Phase.OPEN]


def test_an_end_that_a_crash_has_lost_takes_the_open_rounds() -> None:
    """The round is durable, its epoch is not: the open round may have had updates."""
    table = table_of("a", mode="sync", end_tokens=100)
    (close,) = closings(counts(table, "a", tokens=150))
    before = table.state.with_counted(close.roster, fragment=0, round=1)
    opened = replace(before.rounds[0], number=2, phase=Phase.OPEN, staged={})
    table.state = before.with_round(opened)

    assert persisted(table.do(Tick())) == [Epoch(1, {"run.end_rounds": 2})]


def test_tokens_below_what_has_counted_end_the_run_at_once() -> None:
    """No further commit is waited for; the published round is the last."""
    table = table_of("a", "b", mode="sync")
    counts(table, "a", tokens=150)
    (close,) = closings(counts(table, "b", tokens=150))
    table.commit(close)
    actions = table.do(SettingsChanged({"run.end_tokens": 200}))

    assert persisted(actions) == [
        Epoch(1, {"run.end_tokens": 200}),
        Epoch(2, {"run.end_rounds": 1}),
    ]
    assert phases(table) == [Phase.ENDED]


def test_tokens_below_what_has_counted_make_each_open_round_the_last() -> None:
    """Fragment 0 of an asynchronous run is in round 3 then, and fragment 1 in 2."""
    table = table_of("a", "b", fragments=2)
    for fragment in (0, 1, 0):
        committed(table, "a", tokens=150, fragment=fragment)
    actions = table.do(SettingsChanged({"run.end_tokens": 100}))

    assert persisted(actions) == [
        Epoch(1, {"run.end_tokens": 100}),
        LastRounds((3, 2)),
    ]
    assert phases(table) == [Phase.OPEN, Phase.OPEN]
    assert persisted(table.do(Tick())) == []


def test_more_tokens_before_the_end_change_nothing_else() -> None:
    """And with fewer than have counted the same end comes later."""
    table = table_of("a", mode="sync", end_tokens=100)
    actions = table.do(SettingsChanged({"run.end_tokens": 500}))
    assert persisted(actions) == [Epoch(1, {"run.end_tokens": 500})]
    (close,) = closings(counts(table, "a", tokens=150))

    assert persisted(table.commit(close)) == []
    assert phases(table) == [Phase.OPEN]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("more", [500, None])
def test_more_tokens_after_the_end_need_its_withdrawal(
    mode: str, more: int | None
) -> None:
    """Alone they would be ignored, so they are refused; with `none` the run goes on."""
    table = table_of("a", "b", mode=mode, end_tokens=100)
    counts(table, "b", tokens=150)
    (close,) = closings(counts(table, "a", tokens=150))
    table.commit(close)
    asked = more or "none"
    with pytest.raises(
        UsageError,
        match=rf"end_tokens={asked} has no effect: .* round \d is the last\. "
        rf"To continue: set run\.end_tokens={asked} run\.end_rounds=none",
    ):
        table.do(SettingsChanged({"run.end_tokens": more}))
    table.do(SettingsChanged({"run.end_tokens": more, "run.end_rounds": None}))

    assert table.state.last_of(0) is None
    assert phases(table) == [Phase.OPEN]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_last_round_closes_below_the_quorum_when_nobody_is_left(mode: str) -> None:
    """The others have left; before the last round the quorum is waited for."""
    table = table_of("a", "b", mode=mode, quorum=2, end_rounds=2)
    counts(table, "b")
    (close,) = closings(counts(table, "a"))
    table.do(Leave("b", 1))
    table.commit(close)

    assert closings(counts(table, "a"))
    other = table_of("a", "b", mode=mode, quorum=2, end_rounds=9)
    other.do(Leave("b", 1))
    assert not closings(counts(other, "a"))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_last_round_waits_for_its_quorum_while_an_island_lives(mode: str) -> None:
    """Late as it is, it may publish; when its lease is over nobody may."""
    table = table_of("a", "b", mode=mode, quorum=2, end_rounds=1)
    counts(table, "a")
    table.now_s = LEASE_S - 1.0
    table.beat("a")
    assert not closings(table.do(Tick()))
    table.now_s = LEASE_S + 1.0

    assert closings(table.do(Tick()))


def test_each_fragment_ends_with_the_round_that_is_open() -> None:
    """Of the fragment that closes it is the next; decided once, durable and told."""
    table = table_of("a", "b", fragments=2)
    for _ in range(3):
        committed(table, "a", fragment=1)
    counts(table, "b", fragment=0)
    assert closings(counts(table, "a", fragment=0))
    actions = table.do(StopRequested())

    assert persisted(actions) == [LastRounds((2, 4))]
    (said,) = (action for action in actions if isinstance(action, Respond))
    assert isinstance(said.answer, Position)
    assert (said.answer.last_round, said.answer.last_rounds) == (None, (2, 4))
    assert persisted(table.do(StopRequested())) == []


def test_a_last_round_waits_for_every_live_island() -> None:
    """Not only a grace, and for those, too, that have joined since it opened."""
    table = table_of("a", "b")
    committed(table, "a")
    table.join("c")
    table.do(StopRequested())
    counts(table, "a")
    opened_s = table.now_s
    table.now_s += GRACE_S + 1.0
    assert not closings(table.do(Tick()))
    counts(table, "b")
    assert closings(counts(table, "c"))

    other = table_of("a", "b")
    other.do(StopRequested())
    counts(other, "a")
    for _ in range(round(DEADLINE_S // LEASE_S) + 1):
        assert not closings(other.do(Tick()))
        other.now_s += LEASE_S - 1.0
        other.beat("a", "b")
    other.now_s = DEADLINE_S
    assert opened_s < DEADLINE_S
    assert closings(other.do(Tick()))


def test_an_asynchronous_run_ends_after_its_rounds() -> None:
    """The lowest fragment has committed all but the last of three rounds."""
    table = table_of("a", "b", fragments=2, end_rounds=3)
    for _ in range(4):
        committed(table, "a", fragment=1)
    assert table.state.last_of(1) is None
    committed(table, "a")
    assert table.state.position(0.0).last_round is None

    assert persisted(committed(table, "a")) == [LastRounds((3, 5))]
    counts(table, "b")
    (close,) = closings(counts(table, "a"))
    table.commit(close)
    assert phases(table) == [Phase.ENDED, Phase.OPEN]


def test_a_run_of_one_round_is_decided_before_that_closes() -> None:
    """The first round of each fragment is its last."""
    table = table_of("a", "b", end_rounds=1)
    assert persisted(counts(table, "a")) == [LastRounds((1,))]
    (close,) = closings(counts(table, "b"))
    table.commit(close)

    assert phases(table) == [Phase.ENDED]


def test_tokens_end_each_fragment_with_its_open_round() -> None:
    """What islands have trained up to their next seal counts, and no more."""
    table = table_of("a", "b", end_tokens=100)
    assert persisted(committed(table, "a", tokens=150)) == [LastRounds((2,))]
    with pytest.raises(RunEnded, match=r"Round 3 will not open: .* round 2"):
        table.state.require_opens(3, fragment=0)


def test_a_round_that_never_opens_takes_no_update() -> None:
    """The rest of a farewell beside the flight in the last round, and what is late."""
    table = table_of("a", "b")
    table.publish("b", kind=FrameKind.DEPARTING)
    table.do(StopRequested())
    rest = table.header("b", kind=FrameKind.DEPARTING, round=2)
    assert table.do(UpdateOffered(rest)) == [Respond(Reception.COMMITTED)]
    late = table.header("a")
    table.do(Leave("b", 1))
    table.state = replace(table.state, is_paused=False)
    (close,) = closings(table.publish("a"))
    other = replace(late, incarnation=1, weight=7)

    assert table.do(UpdateOffered(late)) == [Respond(Reception.STAGED)]
    assert table.do(UpdateOffered(other)) == [Respond(Reception.COMMITTED)]
    table.commit(close)
    assert phases(table) == [Phase.ENDED]


def test_a_stop_waits_for_what_departs_beside_a_flight() -> None:
    """The rest was acknowledged, so that its round is the last."""
    table = table_of("a", "b")
    table.publish("b", kind=FrameKind.DEPARTING)
    table.publish("b", kind=FrameKind.DEPARTING, round=2)

    assert persisted(table.do(StopRequested())) == [LastRounds((2,))]


def test_a_stop_without_a_live_island_ends_open_rounds() -> None:
    """Nobody will publish; nor where the islands have died since a first stop."""
    table = table_of("a", "b")
    committed(table, "a")
    table.now_s += LEASE_S + 1.0
    assert persisted(table.do(StopRequested())) == [LastRounds((1,))]
    assert phases(table) == [Phase.ENDED]

    other = table_of("a", "b")
    committed(other, "a")
    assert persisted(other.do(StopRequested())) == [LastRounds((2,))]
    other.now_s += LEASE_S + 1.0
    assert persisted(other.do(StopRequested())) == [LastRounds((1,))]


def test_a_stop_before_any_update_leaves_no_round() -> None:
    """As in a synchronous run: an epoch says so, and whoever joins learns it."""
    table = table_of("a")
    table.state = replace(table.state, rounds=(), model=None)
    table.do(StopRequested())

    assert table.state.position(0.0).last_round == 0


def test_an_end_of_an_asynchronous_run_is_withdrawn_durably() -> None:
    """`run.end_rounds` replaces it; one that all fragments are beyond is refused."""
    table = table_of("a", "b")
    committed(table, "a")
    table.do(StopRequested())
    with pytest.raises(
        UsageError,
        match=r"end_rounds=1 is over: every fragment has committed round 1\. Give 2",
    ):
        table.do(SettingsChanged({"run.end_rounds": 1}))

    assert persisted(table.do(SettingsChanged({"run.end_rounds": 9}))) == [
        Epoch(1, {"run.end_rounds": 9}),
        LastRounds(()),
    ]
    assert table.state.last_of(0) is None


def test_a_decay_by_rounds_is_refused_while_an_asynchronous_run_trains() -> None:
    """Its rounds have no fixed steps, whenever that is set."""
    table = table_of("a")
    with pytest.raises(
        SettingsError, match=r"run\.decay_round=3 has no meaning .* Use run\.end_tokens"
    ):
        table.do(SettingsChanged({"run.decay_round": 3}))

    assert table.state.epoch == 0


def test_an_update_beyond_the_open_round_says_which_is_open() -> None:
    """Nothing of a later round can have been sealed, unless the run has lost rounds."""
    table = table_of("a", "b")
    with pytest.raises(
        Refused, match=r"Round 3 of fragment 0 cannot be .* round 1 is open\. Wait"
    ):
        table.do(UpdateOffered(table.header("a", round=3)))
    member = replace(table.state.members.known["a"], is_heard=False)
    members = table.state.members.with_member(member)
    table.state = replace(table.state, members=members)

    assert table.do(UpdateOffered(table.header("a", round=3))) == [
        Respond(Reception.EARLY)
    ]


def test_a_base_of_more_than_1024_rounds_ago_is_refused_by_name() -> None:
    """The reason is in the roster: the island takes the anchor."""
    table = table_of("a", "b")
    old = table.header("b", refused="", elements=3, base=bytes([9]) * 16)
    table.do(UpdateStored(with_body(old, bytes(12))))
    (close,) = closings(counts(table, "a"))
    entry = close.roster.entry("b")

    assert entry is not None
    assert entry.reason == f"base: {'09' * 16} is not the fragment's {'00' * 16}"
