"""The coordinator's machine, alone: membership, rounds and deadlines as values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from atoll import RunSettings
from atoll.algorithm.pace import Arrivals
from atoll.errors import LeaseLost, ModelError, Refused, Unreachable, UsageError
from atoll.protocol import Heartbeat, HeldRound, JoinRequest, ModelSpec, Position
from atoll.protocol.coordinator import advance, wakes_at
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.events import (
    Action,
    CloseRound,
    Committed,
    ConnectionLost,
    Epoch,
    Event,
    Founded,
    HeartbeatReceived,
    JoinRequested,
    Leave,
    PauseRequested,
    Persist,
    Respond,
    SettingsChanged,
    StopRequested,
    Tick,
    UpdateOffered,
    UpdateStored,
    Welcome,
)
from atoll.protocol.join_leave import IDLE_MEMORY_S, TRUSTED_IDLE_NAMES
from atoll.protocol.membership import CLOSED_S, LEASE_S
from atoll.protocol.rounds import Phase, Reception
from atoll.testing import vector_model
from atoll.wire import (
    FrameKind,
    Header,
    OuterValues,
    TrainingProgress,
    Verdict,
    with_body,
)

MODEL = vector_model({"w": (3,)})
OUTER = OuterValues(optimizer="sgd", lr=1.0, momentum=0.0)
UPPER_S = 600.0


@dataclass
class Desk:
    """A machine with the time and the state at hand."""

    state: CoordinatorState
    now_s: float = 0.0
    fragments: int = 1

    def do(self, event: Event) -> list[Action]:
        self.state, actions = advance(self.state, event, self.now_s)
        return actions

    def wait(self, name: str, fragment: int) -> tuple[int, ...]:
        """Let an island stand still for the open round, and return what is wanted."""
        waits_for = (fragment, self.state.rounds[fragment].number)
        incarnation = self.state.members.known[name].incarnation
        beat = Heartbeat(
            island=name, incarnation=incarnation, step=0, waits_for=waits_for
        )
        said = next(
            a for a in self.do(HeartbeatReceived(beat)) if isinstance(a, Respond)
        )
        assert isinstance(said.answer, Position)
        return said.answer.wanted

    def join(
        self, name: str, *, key: bytes = b"", nonce: bytes = b"1", **fields: ModelSpec
    ) -> Welcome:
        known = self.state.members.known.get(name)
        after = known.incarnation if known else 0
        model = fields.get("model", MODEL)
        request = JoinRequest(island=name, model=model, after=after)
        actions = self.do(JoinRequested(request, key or name.encode(), nonce))
        welcome = next(a for a in actions if isinstance(a, Welcome))
        if welcome.is_founder:
            many = self.fragments
            states = (bytes(16),) * many, (OUTER,) * many
            self.do(Founded(name, welcome.member.incarnation, *states))
        return welcome

    def publish(self, name: str, **fields: object) -> list[Action]:
        return self.do(UpdateStored(self.header(name, **fields)))

    def header(self, name: str, **fields: object) -> Header:
        round = self.state.rounds[0]
        header = Header(
            kind=FrameKind.UPDATE,
            run="run",
            fragment=0,
            round=round.number,
            island=name,
            incarnation=self.state.members.known[name].incarnation,
            base=round.base,
            refused="for the test",
        )
        return replace(header, **fields)  # type: ignore[arg-type]

    def commit(self, close: Action) -> list[Action]:
        assert isinstance(close, CloseRound)
        base = bytes([close.round]) * 16
        return self.do(Committed(close.fragment, close.roster, base, OUTER))

    def beat(self, *names: str) -> None:
        for name in names:
            member = self.state.members.known[name]
            beat = Heartbeat(
                island=name, incarnation=member.incarnation, step=member.step
            )
            self.do(HeartbeatReceived(beat))

    @property
    def open_round(self) -> int:
        return self.state.rounds[0].number


def desk(**run: object) -> Desk:
    settings = RunSettings.from_dict({"run": run})
    return Desk(CoordinatorState(run="run", settings=settings))


def closings(actions: list[Action]) -> list[CloseRound]:
    return [action for action in actions if isinstance(action, CloseRound)]


def started(*names: str, **run: object) -> Desk:
    table = desk(start_islands=len(names), **run)
    for name in names:
        table.join(name)
    return table


def test_the_first_island_founds_and_the_others_ask_again_until_it_has() -> None:
    """While a founder brings its weights, another joining is put off."""
    table = desk()
    request = JoinRequest(island="a", model=MODEL)
    welcome = table.do(JoinRequested(request, b"a", b"1"))[1]
    assert isinstance(welcome, Welcome)
    assert welcome.is_founder

    other = JoinRequested(JoinRequest(island="b", model=MODEL), b"b", b"1")
    with pytest.raises(Unreachable, match="founding the run"):
        table.do(other)
    table.do(Founded("a", 1, (bytes(16),), (OUTER,)))

    assert not table.join("b").is_founder


def test_a_founder_whose_lease_ran_out_gives_way() -> None:
    """The next island founds, and the first one's weights come too late."""
    table = desk()
    table.do(JoinRequested(JoinRequest(island="a", model=MODEL), b"a", b"1"))
    table.now_s = LEASE_S + 1
    assert table.join("b").is_founder

    with pytest.raises(Refused, match="'a' is not founding"):
        table.do(Founded("a", 1, (bytes(16),), (OUTER,)))


def test_a_repeated_joining_is_the_same_life() -> None:
    """A reply that was lost costs nothing: same incarnation, founder or not."""
    table = desk()
    joining = JoinRequested(JoinRequest(island="a", model=MODEL), b"a", b"1")
    first, again = table.do(joining)[1], table.do(joining)[1]
    assert isinstance(first, Welcome)
    assert isinstance(again, Welcome)

    assert (again.member.incarnation, again.is_founder) == (1, True)


def test_with_its_key_a_name_is_taken_over_at_once() -> None:
    """A restarted island is the next incarnation, without waiting for a lease."""
    table = started("a", "b")

    assert table.join("a", nonce=b"2").member.incarnation == 2


def test_without_its_key_a_live_name_is_refused_with_the_seconds_left() -> None:
    """After the lease the name is free."""
    table = started("a", "b")
    table.now_s = 5.0
    with pytest.raises(UsageError, match=r"this is not its key.*gone in 10 s"):
        table.join("a", key=b"stranger", nonce=b"2")
    table.now_s = LEASE_S + 1

    assert table.join("a", key=b"stranger", nonce=b"2").member.incarnation == 2


def test_a_later_life_fences_the_earlier_for_good() -> None:
    """Heartbeats, updates and goodbyes of the old incarnation change nothing."""
    table = started("a", "b")
    stale = table.header("a")
    table.join("a", nonce=b"2")
    before = table.state
    beat = Heartbeat(island="a", incarnation=1, step=99)

    for event in (
        UpdateStored(stale),
        UpdateOffered(stale),
        HeartbeatReceived(beat),
        Leave("a", 1),
    ):
        with pytest.raises(LeaseLost, match=r"knows incarnation 2"):
            table.do(event)
    assert table.state == before


def test_an_update_of_an_earlier_life_stands() -> None:
    """The restarted island is told which rounds are spoken for, and cannot replace."""
    table = started("a", "b")
    table.publish("a")
    welcome = table.join("a", nonce=b"2")
    assert welcome.spoken_for == (0,)

    other = table.header("a", weight=7)
    assert table.do(UpdateOffered(other)) == [Respond(Reception.OTHER_STAGED)]
    assert table.state.rounds[0].staged["a"].weight != 7


def test_a_second_update_of_one_life_is_refused() -> None:
    """The first one staged stands."""
    table = started("a", "b")
    table.publish("a")

    with pytest.raises(Refused, match="stands for round 1"):
        table.do(UpdateOffered(table.header("a", weight=7)))


def test_a_round_that_is_due_closes_before_a_header_is_judged() -> None:
    """An update that comes after the deadline is not wanted, though nobody looked."""
    table = started("a", "b")
    table.publish("a")
    table.now_s = LEASE_S - 1
    table.beat("a", "b")
    table.state = replace(
        table.state,
        rounds=(replace(table.state.rounds[0], opened_s=-UPPER_S, first_s=-UPPER_S),),
    )

    closing, said = table.do(UpdateOffered(table.header("b")))

    assert isinstance(closing, CloseRound)
    assert said == Respond(Reception.CLOSING)


def test_another_model_is_refused() -> None:
    """Joining compares names, shapes and dtypes."""
    table = started("a")

    with pytest.raises(ModelError, match="'w'"):
        table.join("b", model=vector_model({"w": (4,)}))


def test_a_round_closes_when_all_live_candidates_have_published() -> None:
    """The staged set is frozen, and lists who counted."""
    table = started("a", "b")
    assert not closings(table.publish("a"))

    (close,) = closings(table.publish("b"))

    assert [entry.island for entry in close.roster.entries] == ["a", "b"]
    assert table.state.rounds[0].phase is Phase.CLOSING


def test_nothing_is_staged_while_a_round_closes() -> None:
    """Who comes then is told so, and finds out by the outcome."""
    table = started("a", "b")
    table.publish("a")
    c = table.join("c")
    assert c.member.slot == 2
    table.publish("b")

    assert table.do(UpdateOffered(table.header("c"))) == [Respond(Reception.CLOSING)]


def test_a_repeat_is_staged_once_and_known_after_the_commit() -> None:
    """The answers are staged, staged again, and committed."""
    table = started("a", "b")
    header = table.header("a")
    assert table.do(UpdateOffered(header)) == [Respond(Reception.WANTED)]
    assert table.do(UpdateStored(header))[0] == Respond(Reception.STAGED)
    assert table.do(UpdateStored(header))[0] == Respond(Reception.STAGED)
    table.commit(closings(table.publish("b"))[0])

    assert table.do(UpdateOffered(header)) == [Respond(Reception.COMMITTED)]
    assert table.open_round == 2


def test_who_is_silent_is_waited_for_up_to_the_upper_bound_at_first() -> None:
    """Before five arrivals are known the rule is the upper bound."""
    table = started("a", "b")
    table.publish("a")
    while table.now_s + 5 < UPPER_S:
        table.now_s += 5
        table.beat("a", "b")
        assert not closings(table.do(Tick()))
    table.now_s = UPPER_S
    (close,) = closings(table.do(Tick()))

    late = close.roster.entry("b")
    assert late is not None
    assert late.verdict is Verdict.LATE


def learn(table: Desk, name: str, seconds: list[float]) -> None:
    """Let the run know five arrivals of an island."""
    members = table.state.members
    member = replace(members.known[name], arrivals={0: Arrivals(tuple(seconds))})
    table.state = replace(table.state, members=members.with_member(member))


def test_a_deadline_is_learned_from_the_islands_own_arrivals() -> None:
    """Median 10 s, spread 5 % of it at least, patience 3: late after 11.5 s."""
    table = started("a", "b")
    learn(table, "b", [10.0] * 5)
    table.publish("a")
    assert wakes_at(table.state, 0.0) == pytest.approx(11.5)

    table.now_s = 11.4
    assert not closings(table.do(Tick()))
    table.now_s = 11.6
    assert closings(table.do(Tick()))


def test_an_island_that_was_late_is_waited_for_in_the_next_round() -> None:
    """It gets the upper bound, so nobody misses two rounds in succession."""
    table = started("a", "b")
    learn(table, "b", [1.0] * 5)
    table.publish("a")
    table.now_s = 3.0
    table.commit(closings(table.do(Tick()))[0])
    table.beat("a", "b")
    assert not closings(table.publish("a"))

    table.now_s = 14.0
    assert not closings(table.do(Tick()))
    assert closings(table.publish("b"))


def test_a_lease_that_ran_out_is_not_waited_for_and_revives() -> None:
    """Silence beyond the lease lets the round close; a heartbeat brings it back."""
    table = started("a", "b")
    table.publish("a")
    table.now_s = LEASE_S - 1
    table.beat("a")
    table.now_s = LEASE_S + 0.1
    table.commit(closings(table.do(Tick()))[0])
    assert table.state.rounds[0].candidates == {"a"}
    table.beat("b")
    table.commit(closings(table.publish("a"))[0])

    assert table.state.rounds[0].candidates == {"a", "b"}


def test_a_closed_connection_shortens_the_wait() -> None:
    """After a second the island is not waited for, unless it beats again."""
    table = started("a", "b")
    table.publish("a")
    table.do(ConnectionLost("b", 1))
    table.now_s = CLOSED_S + 0.1

    assert closings(table.do(Tick()))


def test_below_the_quorum_nothing_closes() -> None:
    """The run waits until enough islands have published, and goes on by itself."""
    table = started("a", "b", quorum=2)
    table.publish("a")
    table.do(Leave("b", 1))
    assert not closings(table.do(Tick()))
    table.join("c")

    assert closings(table.publish("c"))


def test_the_first_round_waits_for_start_islands() -> None:
    """An update before that is staged, and counts once the others are there."""
    table = desk(start_islands=2)
    table.join("a")
    assert not closings(table.publish("a"))
    table.join("b")

    assert closings(table.publish("b"))


def test_who_makes_the_run_begin_is_waited_for_from_then_on() -> None:
    """An update from long before the opening does not shorten anybody's time."""
    table = desk(start_islands=2)
    table.join("a")
    table.publish("a")
    while table.now_s < UPPER_S:
        table.now_s += 5
        table.beat("a")
    table.join("b")
    assert not closings(table.do(Tick()))

    (round,) = table.state.rounds
    late_at_s = round.late_at_s("b", table.state.members, table.state.settings)
    assert late_at_s == table.now_s + UPPER_S


def out_of_phase(**run: object) -> Desk:
    """Return a run in which a has published fragment 0, and b fragment 1."""
    table = desk(start_islands=2, **run)
    table.fragments = 2
    table.join("a")
    table.join("b")
    table.publish("a", fragment=0)
    table.publish("b", fragment=1)
    return table


def test_islands_that_wait_for_each_other_are_asked_for_what_is_missing() -> None:
    """Nobody trains, so no send point will come: each brings the other's fragment."""
    table = out_of_phase()

    assert table.wait("a", 0) == ()
    assert table.wait("b", 1) == (0,)
    assert table.wait("a", 0) == (1,)

    (close,) = closings(table.publish("b", fragment=0))
    assert close.fragment == 0


def test_who_waits_for_a_round_that_has_nothing_of_it_is_asked() -> None:
    """Its update is on its way, or an earlier life's was lost with the journal."""
    table = started("a", "b")

    assert table.wait("a", 0) == (0,)
    table.publish("a")
    assert table.wait("a", 0) == ()


def test_an_absurd_step_is_refused() -> None:
    """Newcomers would be sent to a schedule step that nobody can have reached."""
    table = started("a", "b")

    with pytest.raises(Refused, match="no island gets beyond 400"):
        table.do(HeartbeatReceived(Heartbeat(island="a", incarnation=1, step=10**12)))
    assert table.state.position(0.0).step == 0


def test_nothing_is_wanted_while_somebody_trains() -> None:
    """Who has not published what it waits for is not stuck: its update is coming."""
    table = out_of_phase()
    table.wait("b", 0)

    assert table.wait("a", 0) == ()


def test_nothing_is_wanted_of_too_few() -> None:
    """Below the quorum and in a pause nothing could close anyway."""
    table = out_of_phase(quorum=2)
    table.now_s = LEASE_S - 1
    table.beat("a")
    table.now_s = LEASE_S + 1
    assert table.wait("a", 0) == ()

    table.wait("b", 1)
    table.do(PauseRequested(True))
    assert table.wait("a", 0) == ()

    table.do(PauseRequested(False))
    assert table.wait("a", 0) == (1,)


def test_a_newcomer_is_wanted_where_the_quorum_needs_it() -> None:
    """No open round waits for a new life, but without it none could close."""
    table = out_of_phase(quorum=2)
    table.join("b", nonce=b"2")
    assert table.state.rounds[0].candidates == {"a"}

    table.wait("a", 0)
    assert table.wait("b", 1) == (0,)

    (close,) = closings(table.publish("b", fragment=0))
    assert [entry.island for entry in close.roster.entries] == ["a", "b"]


def test_who_left_before_the_run_began_does_not_begin_it() -> None:
    """Two must take part: one that came and went is none, unless it left its work."""
    table = desk(start_islands=2)
    table.join("a")
    table.do(Leave("a", 1))
    table.join("b")
    assert not table.state.has_started

    table.publish("b", kind=FrameKind.DEPARTING)
    table.do(Leave("b", 1))
    table.join("c")
    assert table.state.has_started


def test_a_departing_update_counts_for_its_round_and_the_next() -> None:
    """Its owner has gone; roster and quorum count it all the same."""
    table = started("a", "b")
    table.publish("b", kind=FrameKind.DEPARTING)
    table.publish("b", kind=FrameKind.DEPARTING, round=2)
    table.do(Leave("b", 1))
    (close,) = closings(table.publish("a"))
    assert close.roster.entry("b") is not None
    table.commit(close)

    assert table.state.rounds[0].staged.keys() == {"b"}


def test_a_round_in_the_future_is_refused() -> None:
    """Only a departing update may be one ahead."""
    table = started("a")

    with pytest.raises(Refused, match=r"Round 2 .* cannot be published yet"):
        table.publish("a", round=2)


def test_frames_of_another_run_or_fragment_are_refused() -> None:
    """Each by name, and nothing changes."""
    table = started("a")
    with pytest.raises(Refused, match="belongs to run 'other'"):
        table.publish("a", run="other")
    with pytest.raises(Refused, match="Fragment 3 does not exist"):
        table.publish("a", fragment=3)


def test_new_values_are_an_epoch() -> None:
    """What may change is in force at once; what may not is refused by name."""
    table = started("a")
    assert table.do(SettingsChanged({"run.quorum": 2})) == [
        Persist(Epoch(1, {"run.quorum": 2}))
    ]
    assert (table.state.epoch, table.state.settings.run.quorum) == (1, 2)

    with pytest.raises(UsageError, match=r"sync.sync_every cannot change"):
        table.do(SettingsChanged({"sync.sync_every": 5}))


def test_the_outer_values_of_a_round_are_fixed_when_it_opens() -> None:
    """A new rate is for the round that opens next."""
    table = started("a")
    table.do(SettingsChanged({"outer.lr": 0.25}))
    (close,) = closings(table.publish("a"))

    assert close.outer == OUTER


def test_a_stopped_run_finishes_the_rounds_under_way() -> None:
    """The furthest published round is the last, and nothing opens beyond it."""
    table = started("a", "b")
    table.publish("a")
    remembered, said = table.do(StopRequested())
    assert remembered == Persist(Epoch(1, {"run.end_rounds": 1}))
    assert isinstance(said, Respond)
    assert isinstance(said.answer, Position)
    assert said.answer.last_round == 1
    table.commit(closings(table.publish("b"))[0])

    assert table.state.rounds[0].phase is Phase.ENDED


def test_no_round_stays_open_beyond_a_stop() -> None:
    """Nobody has published for the open round: it ends with the one before."""
    table = started("a", "b")
    table.publish("a")
    table.commit(closings(table.publish("b"))[0])
    table.do(StopRequested())

    assert table.state.last_round == 1
    assert table.state.rounds[0].phase is Phase.ENDED


def test_a_later_end_opens_what_had_ended() -> None:
    """And an end that is behind what was published is refused."""
    table = started("a")
    table.do(SettingsChanged({"run.end_rounds": 1}))
    table.commit(closings(table.publish("a"))[0])
    assert table.state.rounds[0].number == 2

    table.do(SettingsChanged({"run.end_rounds": 3}))
    (close,) = closings(table.publish("a"))
    table.commit(close)
    with pytest.raises(UsageError, match=r"end_rounds=1 is over: round 2"):
        table.do(SettingsChanged({"run.end_rounds": 1}))


def test_a_decay_begins_where_nobody_has_been() -> None:
    """It must be learnt with the outcome before it; where the run ends is too late."""
    table = started("a")
    table.do(SettingsChanged({"run.decay_round": 2}))
    table.commit(closings(table.publish("a"))[0])
    assert table.state.position(table.now_s).decay_round == 2
    with pytest.raises(UsageError, match=r"decay_round=2 is not ahead of .* Give 3 or"):
        table.do(SettingsChanged({"run.decay_round": 2}))
    with pytest.raises(
        UsageError, match=r"=8 is beyond the run's last round, 5\. Give 5"
    ):
        table.do(SettingsChanged({"run.decay_round": 8, "run.end_rounds": 5}))
    table.do(SettingsChanged({"run.decay_round": 8}))
    table.do(StopRequested())

    assert table.state.position(table.now_s).decay_round == 8


def test_with_overlap_a_decay_begins_a_round_later() -> None:
    """Steps of the next round are made before the outcome of this one is taken."""
    table = started("a")
    overlapped = table.state.settings.with_values({"sync.overlap_steps": 2})
    table.state = replace(table.state, settings=overlapped)
    with pytest.raises(UsageError, match=r"=2 is not ahead of every .* Give 3 or more"):
        table.do(SettingsChanged({"run.decay_round": 2}))
    table.do(SettingsChanged({"run.decay_round": 3}))


def test_a_founder_that_lives_keeps_its_founding() -> None:
    """Its heartbeats renew it, as they do its lease."""
    table = desk()
    table.do(JoinRequested(JoinRequest(island="a", model=MODEL), b"a", b"1"))
    for _ in range(4):
        table.now_s += LEASE_S / 2
        table.beat("a")
    table.do(Founded("a", 1, (bytes(16),), (OUTER,)))

    assert table.state.model is not None


def test_what_an_island_holds_never_goes_back() -> None:
    """A heartbeat that was overtaken by a later one changes nothing about it."""
    table = started("a")
    for held in (4, 3):
        holds = (HeldRound(held, bytes(16)),)
        table.do(
            HeartbeatReceived(Heartbeat(island="a", incarnation=1, step=0, holds=holds))
        )

    assert table.state.members.known["a"].holds[0].round == 4


def test_other_values_do_not_undo_a_stop() -> None:
    """Only new `end_rounds` say that a run goes on."""
    table = started("a")
    table.publish("a", kind=FrameKind.DEPARTING)
    table.do(StopRequested())
    table.do(SettingsChanged({"run.quorum": 1, "run.patience": 5.0}))
    last = table.state.last_round
    assert last is not None

    table.do(SettingsChanged({"run.end_rounds": last + 7}))
    assert table.state.last_round == last + 7


def test_a_paused_run_stages_and_does_not_close() -> None:
    """Resuming closes what could have closed."""
    table = started("a")
    table.do(PauseRequested(is_paused=True))
    assert not closings(table.publish("a"))

    assert closings(table.do(PauseRequested(is_paused=False)))


def test_the_run_ends_by_tokens() -> None:
    """The sum of the islands' lowest counted progress reaches end_tokens."""
    table = started("a", end_tokens=100)
    draft = table.header(
        "a", refused="", elements=3, progress=TrainingProgress(tokens=150)
    )
    header = with_body(draft, bytes(12))
    table.commit(closings(table.do(UpdateStored(header)))[0])

    assert table.state.rounds[0].phase is Phase.ENDED


def publish_counted(table: Desk, name: str) -> list[CloseRound]:
    """Publish an update that will count, and return what it closes."""
    header = table.header(name, refused="", elements=3)
    return closings(table.do(UpdateStored(with_body(header, bytes(12)))))


def commit_round_of(table: Desk, name: str) -> None:
    (close,) = publish_counted(table, name)
    table.commit(close)


def join_and_fall_silent(table: Desk, names: list[str]) -> None:
    for name in names:
        table.now_s += 1.0  # within the burst limit of joins
        table.join(name)
        table.beat("a")
    table.now_s += LEASE_S + 1.0
    table.beat("a")


@pytest.mark.parametrize("silent", [TRUSTED_IDLE_NAMES - 1, TRUSTED_IDLE_NAMES])
def test_a_newcomer_is_waited_for_unless_many_never_published(silent: int) -> None:
    """Names that join and publish nothing hold a few rounds, and not all later ones."""
    table = started("a")
    commit_round_of(table, "a")
    join_and_fall_silent(table, [f"idle-{number}" for number in range(silent)])
    table.join("newcomer")
    commit_round_of(table, "a")  # it was opened before the newcomer came

    is_waited_for = not publish_counted(table, "a")
    assert is_waited_for == (silent < TRUSTED_IDLE_NAMES)


def test_a_newcomer_whose_update_counted_is_waited_for_again() -> None:
    """What others did under many names does not keep an island apart."""
    table = started("a")
    commit_round_of(table, "a")
    names = [f"idle-{number}" for number in range(TRUSTED_IDLE_NAMES)]
    join_and_fall_silent(table, names)
    table.join("newcomer")
    publish_counted(table, "newcomer")
    commit_round_of(table, "a")

    assert not publish_counted(table, "a")
    assert publish_counted(table, "newcomer")


def test_newcomers_are_waited_for_again_after_a_while() -> None:
    """Idle names are held against newcomers for ten minutes."""
    table = started("a")
    commit_round_of(table, "a")
    names = [f"idle-{number}" for number in range(TRUSTED_IDLE_NAMES)]
    join_and_fall_silent(table, names)
    table.now_s += IDLE_MEMORY_S
    table.join("newcomer")
    table.beat("a")
    commit_round_of(table, "a")

    assert not publish_counted(table, "a")
