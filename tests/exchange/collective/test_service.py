"""A coordinator checks the rounds that islands reduce among themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atoll.errors import CorruptError, LeaseLost, Refused, RunEnded, Unreachable
from atoll.exchange import CoordinatorExchange, Exchange, Frame, Outcome
from atoll.exchange.calls import AgreedCall, LeaveCall
from atoll.protocol import JoinReply, Reception
from atoll.protocol.events import PauseRequested
from atoll.testing.fixtures import enter, plain_settings, update_of
from atoll.wire import Header, Verdict, blake3_digest, with_body
from atoll.wire.frame import voucher
from tests.coordinator.serving import calling, line_to, picture, serving
from tests.exchange.collective.ranks import Bureau


class Pair:
    """Two islands at a coordinator that bring a round together, by hand."""

    def __init__(self, **run: object) -> None:
        self.bureau = Bureau(plain_settings(start_islands=2, **run))
        self.exchanges = {name: self.bureau.exchange(name.encode()) for name in "ab"}
        self.joined: dict[str, JoinReply] = {
            name: enter(each, name) for name, each in self.exchanges.items()
        }

    def update(self, name: str, value: float, **fields: object) -> Header:
        exchange: Exchange = self.exchanges[name]
        return update_of(exchange, self.joined[name], value, **fields).header  # type: ignore[arg-type]

    def ask(self, *updates: Header) -> AgreedCall:
        both = (self.update("a", 1.0), self.update("b", 3.0))
        return AgreedCall("a", 1, updates or both)

    def bring(self, value: float = 2.0) -> AgreedCall:
        """Return the call that brings a mean, with the word of both."""
        asked = self.bureau.call(self.ask())
        assert isinstance(asked, Outcome)
        body = np.full(3, value, np.float32).view(np.uint8)
        header = with_body(asked.agreed.header, body)
        words = tuple(voucher(blake3_digest(key), header) for key in (b"a", b"b"))
        return replace(self.ask(), agreed=Frame(header, body), vouchers=words)


def test_asking_changes_nothing() -> None:
    """The roster is the machine's own; the round stays open, and nothing is staged."""
    pair = Pair()
    before = pair.bureau.service.state
    asked = pair.bureau.call(pair.ask())

    assert isinstance(asked, Outcome)
    roster = asked.agreed.header.roster
    assert roster is not None
    assert [(each.island, each.verdict) for each in roster.entries] == [
        ("a", Verdict.COUNTED),
        ("b", Verdict.COUNTED),
    ]
    assert pair.bureau.service.state is before


def test_what_is_brought_is_committed_once() -> None:
    """A repeat gets the same outcome; whoever asks later is told that it is over."""
    pair = Pair()
    call = pair.bring()
    first, again = pair.bureau.call(call), pair.bureau.call(call)

    assert isinstance(first, Outcome)
    assert isinstance(again, Outcome)
    assert first.agreed.header == again.agreed.header
    assert float(pair.bureau.service.weights[0].anchor[0]) == -2.0
    assert pair.bureau.call(pair.ask()) is Reception.COMMITTED
    assert pair.exchanges["b"].outcome(0, 1, wait_s=0.0) is not None


def test_it_survives_a_restart() -> None:
    """The journal has the outcome as it has any other."""
    pair = Pair()
    pair.bureau.call(pair.bring())
    pair.bureau.restart()

    assert float(pair.bureau.service.weights[0].anchor[0]) == -2.0
    assert pair.bureau.service.state.counted.of("b")[0].round == 1


def test_others_that_take_part_are_heard() -> None:
    """One that has not published is waited for, and what one has published counts."""
    pair = Pair(quorum=2)
    other = pair.bureau.exchange(b"c")
    joined = enter(other, "c")
    assert isinstance(pair.bureau.call(pair.ask()), Outcome)  # it is no candidate yet
    other.publish(update_of(other, joined, 1.0))
    assert pair.bureau.call(pair.ask()) is Reception.WANTED

    pair = Pair()
    other = pair.bureau.exchange(b"c")
    joined = enter(other, "c")
    pair.bureau.call(pair.bring())
    updates = [pair.update(name, 1.0, round=2) for name in "ab"]
    assert pair.bureau.call(pair.ask(*updates)) is Reception.WANTED
    other.leave("c", joined.incarnation)
    assert isinstance(pair.bureau.call(pair.ask(*updates)), Outcome)


def test_a_paused_run_says_so() -> None:
    """Whoever asks is to ask again; nothing is committed."""
    pair = Pair()
    call = pair.bring()
    pair.bureau.change(PauseRequested(is_paused=True))

    with pytest.raises(Unreachable, match="the run is paused"):
        pair.bureau.call(call)
    pair.bureau.change(PauseRequested(is_paused=False))
    assert isinstance(pair.bureau.call(call), Outcome)


def test_no_round_is_taken_beyond_the_last() -> None:
    """As for any update."""
    pair = Pair(end_rounds=1)
    pair.bureau.call(pair.bring())

    with pytest.raises(RunEnded):
        pair.bureau.call(pair.ask(*(pair.update(name, 1.0, round=2) for name in "ab")))


def test_who_is_no_member_brings_nothing() -> None:
    """Neither as who calls, nor as one of those whose updates are brought."""
    pair = Pair()
    call = pair.bring()
    pair.bureau.call(LeaveCall("b", 1))

    with pytest.raises(LeaseLost):
        pair.bureau.call(call)
    with pytest.raises(LeaseLost):
        pair.bureau.call(replace(call, island="b"))


def test_updates_that_the_run_does_not_take_are_refused() -> None:
    """Twice of one island, of another size, or with a weight that is not 1."""
    pair = Pair()
    good = pair.update("a", 1.0)

    with pytest.raises(Refused, match="An island is named twice"):
        pair.bureau.call(pair.ask(good, good))
    with pytest.raises(Refused, match="weight=7 is not 1"):
        pair.bureau.call(pair.ask(replace(good, weight=7), pair.update("b", 1.0)))
    small = replace(good, elements=2, body_bytes=8)
    with pytest.raises(Refused, match="An update of 2 elements in fp32 is not what"):
        pair.bureau.call(pair.ask(small, pair.update("b", 1.0)))


@pytest.mark.parametrize("field", ["base", "epoch", "roster", "outer"])
def test_an_outcome_that_the_machine_would_not_make_is_refused(field: str) -> None:
    """Whatever all islands vouch for: who counts and on what is the run's to say."""
    pair = Pair()
    call = pair.bring()
    assert call.agreed is not None
    header = call.agreed.header
    assert header.roster is not None
    assert header.outer is not None
    others = {
        "base": b"\1" * 16,
        "epoch": 7,
        "roster": replace(header.roster, entries=header.roster.entries[:1]),
        "outer": replace(header.outer, lr=0.5),
    }
    other = replace(header, **{field: others[field]})  # type: ignore[arg-type]
    words = tuple(voucher(blake3_digest(key), other) for key in (b"a", b"b"))
    lie = replace(call, agreed=Frame(other, call.agreed.body), vouchers=words)

    with pytest.raises(Refused, match="is not what this round comes to"):
        pair.bureau.call(lie)
    assert isinstance(pair.bureau.call(call), Outcome)


def test_values_that_are_not_finite_never_reach_the_weights() -> None:
    """Their digests may be right, and everybody's word given."""
    pair = Pair()

    with pytest.raises(CorruptError, match="holds values that fp32 cannot hold"):
        pair.bureau.call(pair.bring(float("nan")))
    assert isinstance(pair.bureau.call(pair.bring()), Outcome)


def test_too_much_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """Over HTTP: the size is known before the body, and nothing has changed."""
    with (
        serving(tmp_path / "run", plain_settings()) as coordinator,
        line_to(coordinator) as line,
    ):
        exchange = CoordinatorExchange(line, key=b"a", nonce=b"1")
        update = update_of(exchange, enter(exchange, "a"), 1.0)
        before = picture(coordinator)
        call = AgreedCall("a", 1, (update.header,))
        heard = calling(coordinator, call, body=bytes(2**20))

        assert heard.status == 409
        assert b"1048576 bytes cannot be an outcome of fragment 0" in heard.body
        assert picture(coordinator)["rounds"] == before["rounds"]
        assert isinstance(line.call(call), Outcome)
