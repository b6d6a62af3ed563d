"""Rows that a coordinator deals out: durable before the answer, and the same again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator import Service
from atoll.data import Ask, Claim, DataSpec, RowLedger, Spans
from atoll.exchange.calls import (
    ClaimCall,
    DataCall,
    HeartbeatCall,
    LeaveCall,
    PublishCall,
)
from atoll.protocol import Heartbeat, HeldRound, JoinReply, Phase
from atoll.simulate import ProcessDead, SimDisk
from atoll.testing.dealer_contract import dealing_settings
from atoll.wire import FrameKind
from tests.coordinator.desk import join, update

ROWS = 200


def make(**run: object) -> tuple[Service, SimDisk, dict[str, JoinReply]]:
    """Return a run of two islands that has its data, and its disk."""
    disk = SimDisk()
    service = Service.create(disk, dealing_settings(**run), run="run", now_s=0.0)
    joined = {name: join(service, name) for name in ("a", "b")}
    for reply in joined.values():
        call = DataCall(reply.island, reply.incarnation, DataSpec(rows=ROWS))
        service.handle(call, 0.0)
    return service, disk, joined


def ledger_of(service: Service) -> RowLedger:
    assert service.state.ledger is not None
    return service.state.ledger


def claim(
    service: Service, joined: JoinReply, number: int, now_s: float = 1.0
) -> Claim:
    ask = Ask(island=joined.island, incarnation=joined.incarnation, number=number)
    reply = service.handle(ClaimCall(ask), now_s)
    assert isinstance(reply, Claim)
    return reply


def with_rows(
    service: Service, joined: JoinReply, spans: Spans, *, round: int = 1, **more: object
) -> PublishCall:
    call = update(service, joined, 1.0, round=round, **more)
    header = call.frame.header
    progress = replace(header.progress, inner_steps=round, cursor=spans.pack())
    return PublishCall(replace(call.frame, header=replace(header, progress=progress)))


def hear(service: Service, *joined: JoinReply, now_s: float) -> None:
    """Let islands report after a restart: rounds wait for that."""
    for reply in joined:
        holds = (HeldRound(service.weights[0].round, service.weights[0].digest),)
        beat = Heartbeat(
            island=reply.island, incarnation=reply.incarnation, step=0, holds=holds
        )
        service.handle(HeartbeatCall(beat), now_s)


def restarted(disk: SimDisk, now_s: float = 2.0) -> Service:
    disk.crash(is_power_cut=True)
    return Service.open(disk, now_s=now_s)


def test_a_restart_has_the_ledger_of_before() -> None:
    """Claims, counted rows and releases are replayed without a decision."""
    service, disk, joined = make()
    a, b = joined["a"], joined["b"]
    of_a, of_b = claim(service, a, 1).spans, claim(service, b, 1).spans
    service.handle(with_rows(service, a, of_a.head(7)), 1.0)
    service.handle(with_rows(service, b, of_a), 1.0)  # is refused
    claim(service, a, 2)
    service.handle(LeaveCall("b", b.incarnation), 1.0)
    before = ledger_of(service)

    again = restarted(disk)

    assert ledger_of(again) == before
    assert before.counts.trained == 7
    assert before.free == of_b


def test_a_crash_at_any_disk_call_of_a_claim_deals_no_row_twice() -> None:
    """Before or after each call, the repeat and the claims of others share no row."""
    service, disk, joined = make()
    before = disk.calls
    claim(service, joined["a"], 1)
    num_calls = disk.calls - before
    assert num_calls >= 1
    for number in range(1, num_calls + 1):
        for after in (False, True):
            service, disk, joined = make()
            disk.crash_at(disk.calls + number, after=after)
            with pytest.raises(ProcessDead):
                claim(service, joined["a"], 1)
            again = restarted(disk)
            hear(again, *joined.values(), now_s=2.0)
            of_b = claim(again, joined["b"], 1, 2.0).spans
            of_a = claim(again, joined["a"], 1, 2.0).spans
            assert not of_a & of_b, (number, after)
            assert of_a | of_b == Spans([(0, 20)]), (number, after)


def test_an_answered_claim_survives_a_power_cut() -> None:
    """What an island was told is in the journal, and its repeat is the same claim."""
    service, disk, joined = make()
    answer = claim(service, joined["a"], 1)

    again = restarted(disk)
    hear(again, *joined.values(), now_s=2.0)

    assert claim(again, joined["a"], 1, 2.0) == answer
    assert claim(again, joined["b"], 1, 2.0).spans == Spans([(10, 20)])


def test_a_staged_update_that_a_crash_lost_counts_once_when_repeated() -> None:
    """Rows of an update that was lost are in hand, and trained by its repeat."""
    service, disk, joined = make()
    a, b = joined["a"], joined["b"]
    call = with_rows(service, a, claim(service, a, 1).spans)
    service.handle(call, 1.0)

    again = restarted(disk)
    hear(again, a, b, now_s=2.0)
    for repeat in (call, call, with_rows(again, b, Spans())):
        again.handle(repeat, 2.0)

    assert ledger_of(again).counts.trained == 10


def test_a_departing_update_keeps_its_rows_over_a_restart() -> None:
    """Its rows are not dealt to others while it stands, before and after a crash."""
    service, disk, joined = make()
    a, b = joined["a"], joined["b"]
    spans = claim(service, a, 1).spans
    departing = with_rows(service, a, spans.head(6), kind=FrameKind.DEPARTING)
    service.handle(departing, 1.0)
    service.handle(LeaveCall("a", a.incarnation), 1.0)

    again = restarted(disk)
    hear(again, b, now_s=2.0)
    assert ledger_of(again).free == Spans()
    again.handle(with_rows(again, b, Spans()), 2.0)

    assert claim(again, b, 1, 3.0).spans == Spans([(6, 10)])
    assert ledger_of(again).counts.trained == 6


def test_a_run_that_ended_with_its_data_has_ended_after_a_restart() -> None:
    """The end is durable before the round that holds the last rows is committed."""
    service, disk, joined = make(end_rounds=None)
    a, b = joined["a"], joined["b"]
    data = ledger_of(service)
    number = 0
    while ledger_of(service).has_free:
        number += 1
        claim(service, a, number)
    service.handle(LeaveCall("b", b.incarnation), 1.0)
    service.handle(with_rows(service, a, ledger_of(service).holdings["a"]), 1.0)
    assert service.state.last_round == 1

    again = restarted(disk)

    assert again.state.last_round == 1
    assert ledger_of(again).counts.trained == data.total


def test_a_run_that_all_islands_have_left_is_over_after_a_restart() -> None:
    """With its last row settled and no island left, it has ended for good."""
    service, disk, joined = make(end_rounds=None)
    number = 0
    while ledger_of(service).has_free:
        number += 1
        claim(service, joined["a"], number)
    spans = ledger_of(service).holdings["a"]
    service.handle(with_rows(service, joined["b"], Spans()), 1.0)
    departing = with_rows(service, joined["a"], spans, kind=FrameKind.DEPARTING)
    service.handle(departing, 1.0)
    for life in joined.values():
        service.handle(LeaveCall(life.island, life.incarnation), 1.0)
    service.tick(3.0)
    assert all(round.phase is Phase.ENDED for round in service.state.rounds)

    again = restarted(disk)

    assert again.state.last_rounds == service.state.last_rounds
    assert all(round.phase is Phase.ENDED for round in again.state.rounds)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("claim", "update", "leave", "join", "crash")),
        st.sampled_from("ab"),
        st.integers(1, 12),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(EVENTS)
def test_rows_add_up_whatever_happens(story: list[tuple[str, str, int]]) -> None:
    """No turn counts twice, and the five states add up, over crashes and new lives."""
    service, disk, joined = make(end_rounds=None)
    now_s = 1.0
    for what, name, count in story:
        now_s += 1.0
        life, ledger = joined[name], ledger_of(service)
        has_left = service.state.members.known[name].has_left
        if what == "crash":
            disk.crash(is_power_cut=True)
            service = Service.open(disk, now_s=now_s)
            assert ledger_of(service) == ledger
            known = service.state.members.known
            present = [
                life for life in joined.values() if not known[life.island].has_left
            ]
            hear(service, *present, now_s=now_s)
        elif what == "join" and has_left:
            joined[name] = join(service, name, nonce=str(now_s).encode())
        elif has_left:
            continue
        elif what == "claim":
            claim(service, life, ledger.last_claim(name) + 1, now_s)
        elif what == "leave":
            service.handle(LeaveCall(name, life.incarnation), now_s)
        else:
            round = service.state.rounds[0]
            if name in round.staged or service.state.last_round is not None:
                continue
            spans = ledger.holdings.get(name, Spans()).head(count)
            call = with_rows(service, life, spans, round=round.number)
            service.handle(call, now_s)
        counts = ledger_of(service).counts
        assert counts.free is not None
        states = (counts.trained, counts.partly, counts.refused, counts.in_hand)
        assert sum(states) + counts.free == ROWS
    rosters = service.journal.recorded.rosters.values()
    counted = [
        Spans.unpack(entry.spans) for roster in rosters for entry in roster.counted
    ]
    total = sum(map(len, counted))
    assert total == len(Spans(span for spans in counted for span in spans))
