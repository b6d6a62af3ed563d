"""Contract of every `Exchange`, as claims that any adapter's tests can run.

A claim takes `open_run`, which creates a run with given settings and returns a function
that attaches islands. Run each one separately; none needs a thread or a clock:

    @pytest.mark.parametrize("claim", EXCHANGE_CLAIMS, ids=lambda claim: claim.__name__)
    def test_it_is_an_exchange(claim):
        claim(open_my_run)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import numpy as np

from atoll.errors import (
    CorruptError,
    LeaseLost,
    ModelError,
    Refused,
    RunEnded,
    UsageError,
)
from atoll.exchange import Exchange, Frame, Outcome
from atoll.island.numpy_model import vector_model
from atoll.protocol import Heartbeat, JoinReply, Reception
from atoll.settings import RunSettings
from atoll.testing.fixtures import (
    anchor_of,
    enter,
    outcome_of,
    plain_settings,
    raises,
    roster_of,
    update_of,
    verdicts_of,
)
from atoll.wire import FrameKind, TrainingProgress, Verdict


class Attach(Protocol):
    """Attaches islands to one run."""

    def __call__(self, *, key: bytes) -> Exchange:
        """Return the exchange for one incarnation of an island that holds `key`.

        An adapter that serves all islands with one object returns that object.
        """
        ...


OpenRun = Callable[[RunSettings], Attach]
Claim = Callable[[OpenRun], None]


def the_first_island_founds_and_others_take_its_weights(open_run: OpenRun) -> None:
    """Only the first is the founder, and the state is at round 0."""
    attach = open_run(plain_settings(start_islands=2))
    a, b = attach(key=b"a"), attach(key=b"b")
    assert enter(a, "a").is_founder

    second = enter(b, "b")
    assert not second.is_founder
    assert second.position.rounds == (1,)
    assert b.state(0).header.round == 0


def who_makes_up_the_start_begins_with_the_first_step(open_run: OpenRun) -> None:
    """Its step is 0, although the other has made steps before it joined."""
    attach = open_run(plain_settings(start_islands=2))
    a, b = attach(key=b"a"), attach(key=b"b")
    enter(a, "a")
    a.heartbeat(Heartbeat(island="a", incarnation=1, step=4), at_once=True)

    assert enter(b, "b").position.step == 0


def a_round_closes_when_every_member_has_published(open_run: OpenRun) -> None:
    """Updates of 1 and 3 have the mean 2: the anchor goes from 0 to -2."""
    (a, b), (first, second) = _two(open_run)
    a.publish(update_of(a, first, 1.0))
    assert not isinstance(a.outcome(0, 1, wait_s=0.0), Outcome)
    b.publish(update_of(b, second, 3.0))

    assert anchor_of(a) == anchor_of(b) == -2.0
    assert set(verdicts_of(a, 1).values()) == {Verdict.COUNTED}
    assert outcome_of(a, 1).position.rounds == (2,)


def an_outcome_is_the_same_bytes_whoever_asks(open_run: OpenRun) -> None:
    """Every island gets equal bytes, also after another round."""
    (a, b), (first, second) = _two(open_run)
    for round in (1, 2):
        a.publish(update_of(a, first, 1.0, round=round))
        b.publish(update_of(b, second, 3.0, round=round))
    first_agreed, second_agreed = outcome_of(a, 1).agreed, outcome_of(b, 1).agreed

    assert first_agreed.header == second_agreed.header
    assert first_agreed.body.tobytes() == second_agreed.body.tobytes()


def a_roster_is_read_without_the_body(open_run: OpenRun) -> None:
    """Without its body an outcome has the same header, and the same receipts."""
    (a, b), (first, second) = _two(open_run)
    a.publish(update_of(a, first, 1.0))
    b.publish(update_of(b, second, 3.0))
    complete = outcome_of(a, 1)
    short = b.outcome(0, 1, wait_s=0.0, has_body=False)

    assert short is not None
    assert short.agreed.header == complete.agreed.header
    assert (short.agreed.receipt, short.receipt) == (
        complete.agreed.receipt,
        complete.receipt,
    )


def the_order_of_arrival_does_not_matter(open_run: OpenRun) -> None:
    """Updates are summed in the order of islands' names."""
    bodies = []
    for order in ((0, 1), (1, 0)):
        exchanges, joined = _two(open_run)
        for index in order:
            value = (0.1, 0.7)[index]
            exchanges[index].publish(update_of(exchanges[index], joined[index], value))
        bodies.append(outcome_of(exchanges[0], 1).agreed.body.tobytes())

    assert bodies[0] == bodies[1]


def a_repeat_is_the_same_publication(open_run: OpenRun) -> None:
    """It counts once, and raises no error before or after the round is closed."""
    (a, b), (first, second) = _two(open_run)
    again = update_of(a, first, 1.0)
    assert a.publish(again) is Reception.STAGED
    assert a.publish(again) is Reception.STAGED
    b.publish(update_of(b, second, 3.0))
    assert a.publish(again) is Reception.COMMITTED

    assert anchor_of(a) == -2.0


def the_first_update_stands(open_run: OpenRun) -> None:
    """A different one for the same round is refused, and the first one counts."""
    (a, b), (first, second) = _two(open_run)
    a.publish(update_of(a, first, 1.0))
    with raises(Refused):
        a.publish(update_of(a, first, 9.0))
    b.publish(update_of(b, second, 3.0))

    assert anchor_of(a) == -2.0


def an_update_for_a_later_round_counts_nowhere(open_run: OpenRun) -> None:
    """It is refused or deferred, and does not count in the open round."""
    (a, b), (first, second) = _two(open_run)
    with suppress(Refused):
        a.publish(update_of(a, first, 9.0, round=2))
    a.publish(update_of(a, first, 1.0))
    b.publish(update_of(b, second, 3.0))

    assert anchor_of(a) == -2.0
    b.publish(update_of(b, second, 5.0, round=2))
    assert not isinstance(b.outcome(0, 2, wait_s=0.0), Outcome)


def an_update_on_another_base_is_refused_in_the_roster(open_run: OpenRun) -> None:
    """The roster has the reason, and the mean is that of the others."""
    (a, b), (first, second) = _two(open_run)
    a.publish(update_of(a, first, 1.0))
    b.publish(update_of(b, second, 9.0, base=b"\1" * 16))

    entry = roster_of(a, 1).entry("b")
    assert entry is not None
    assert entry.verdict is Verdict.REFUSED
    assert entry.reason.startswith("base")
    assert anchor_of(a) == -1.0


def a_round_without_a_counted_update_is_void(open_run: OpenRun) -> None:
    """The round number increases, and the weights do not change."""
    (a, b), (first, second) = _two(open_run)
    before = a.state(0).header.base
    for exchange, joined in ((a, first), (b, second)):
        frame = update_of(exchange, joined, 0.0)
        refused = replace(
            frame.header, elements=0, body_bytes=0, pieces=(), refused="not finite"
        )
        exchange.publish(Frame(refused, np.empty(0, np.uint8)))

    assert outcome_of(a, 1).agreed.header.elements == 0
    assert a.state(0).header.base == before
    assert a.state(0).header.round == 1


def a_departing_update_counts_after_its_owner_has_gone(open_run: OpenRun) -> None:
    """The roster counts the update of an island that has left."""
    (a, b), (first, second) = _two(open_run)
    b.publish(update_of(b, second, 3.0, kind=FrameKind.DEPARTING))
    b.leave("b", second.incarnation)
    a.publish(update_of(a, first, 1.0))

    assert anchor_of(a) == -2.0


def who_leaves_is_not_waited_for(open_run: OpenRun) -> None:
    """The round closes without its update, and leaving twice is no error."""
    (a, b), (first, second) = _two(open_run)
    a.publish(update_of(a, first, 1.0))
    b.leave("b", second.incarnation)
    b.leave("b", second.incarnation)

    assert anchor_of(a) == -1.0


def a_later_life_fences_the_earlier(open_run: OpenRun) -> None:
    """It has the same slot and the next incarnation; the earlier gets LeaseLost."""
    attach = open_run(plain_settings(start_islands=2))
    a, b, again = attach(key=b"a"), attach(key=b"b"), attach(key=b"b")
    enter(a, "a")
    before = enter(b, "b")
    stale = update_of(b, before, 3.0)
    b.leave("b", before.incarnation)
    after = enter(again, "b")

    assert (after.incarnation, after.slot) == (before.incarnation + 1, before.slot)
    with raises(LeaseLost):
        b.publish(stale)


def a_live_name_cannot_be_taken(open_run: OpenRun) -> None:
    """An island with another key cannot join under it."""
    attach = open_run(plain_settings(start_islands=2))
    enter(attach(key=b"a"), "a")

    with raises(UsageError):
        enter(attach(key=b"a stranger's"), "a")


def a_name_that_no_path_can_hold_is_refused(open_run: OpenRun) -> None:
    """A name with a backslash cannot join."""
    attach = open_run(plain_settings())

    with raises(UsageError):
        enter(attach(key=b"a"), "a\\b")


def a_full_run_refuses_more(open_run: OpenRun) -> None:
    """With `max_islands` members a join fails, until one leaves."""
    attach = open_run(plain_settings(max_islands=1))
    a, b = attach(key=b"a"), attach(key=b"b")
    first = enter(a, "a")
    with raises(UsageError):
        enter(b, "b")
    a.leave("a", first.incarnation)

    assert not enter(b, "b").is_founder


def another_model_is_refused(open_run: OpenRun) -> None:
    """An island with other shapes cannot join."""
    attach = open_run(plain_settings())
    enter(attach(key=b"a"), "a")

    with raises(ModelError):
        enter(attach(key=b"b"), "b", model=vector_model({"w": (4,)}))


def frames_of_another_run_or_fragment_are_refused(open_run: OpenRun) -> None:
    """Each is refused, and the round counts the others."""
    (a, b), (first, second) = _two(open_run)
    frame = update_of(a, first, 9.0)
    for other in (
        replace(frame.header, run="another"),
        replace(frame.header, fragment=7),
    ):
        with raises(Refused):
            a.publish(Frame(other, frame.body))
    a.publish(update_of(a, first, 1.0))
    b.publish(update_of(b, second, 3.0))

    assert anchor_of(a) == -2.0


def a_body_that_does_not_verify_changes_nothing(open_run: OpenRun) -> None:
    """It raises `CorruptError`, and the correct body can follow."""
    (a, b), (first, second) = _two(open_run)
    good = update_of(a, first, 1.0)
    with raises(CorruptError):
        a.publish(Frame(good.header, good.body ^ np.uint8(1)))
    a.publish(good)
    b.publish(update_of(b, second, 3.0))

    assert anchor_of(a) == -2.0


def below_the_quorum_a_round_stays_open(open_run: OpenRun) -> None:
    """It closes when enough islands have published, whichever they are."""
    attach = open_run(plain_settings(start_islands=2, quorum=2))
    a, b, c = (attach(key=key) for key in (b"a", b"b", b"c"))
    first, second = enter(a, "a"), enter(b, "b")
    a.publish(update_of(a, first, 1.0))
    b.leave("b", second.incarnation)
    assert not isinstance(a.outcome(0, 1, wait_s=0.0), Outcome)
    c.publish(update_of(c, enter(c, "c"), 3.0))

    assert anchor_of(a) == -2.0


def no_round_opens_beyond_the_last(open_run: OpenRun) -> None:
    """A request for it raises `RunEnded`."""
    attach = open_run(plain_settings(end_rounds=1))
    a = attach(key=b"a")
    a.publish(update_of(a, enter(a, "a"), 1.0))

    assert outcome_of(a, 1).position.last_round == 1
    with raises(RunEnded):
        a.outcome(0, 2, wait_s=0.0)


def rosters_are_kept_for_good(open_run: OpenRun) -> None:
    """A body may be collected after some rounds; the roster remains."""
    attach = open_run(plain_settings())
    a = attach(key=b"a")
    joined = enter(a, "a")
    for round in range(1, 8):
        a.publish(update_of(a, joined, 1.0, round=round))

    assert verdicts_of(a, 1) == {"a": Verdict.COUNTED}
    assert outcome_of(a, 7).has_body


def progress_goes_on_over_the_lives_of_an_island(open_run: OpenRun) -> None:
    """A later incarnation joins with the counted progress of the earlier ones."""
    attach = open_run(plain_settings())
    a = attach(key=b"a")
    joined = enter(a, "a")
    done = TrainingProgress(inner_steps=5, tokens=70)
    a.publish(update_of(a, joined, 1.0, progress=done))
    a.leave("a", joined.incarnation)
    after = enter(attach(key=b"a"), "a")

    assert (after.inner_steps, after.tokens) == (5, 70)


def impossible_progress_is_refused_in_the_roster(open_run: OpenRun) -> None:
    """The other island counts, and the run does not end by tokens never trained."""
    attach = open_run(plain_settings(start_islands=2, end_tokens=1_000))
    a, b = attach(key=b"a"), attach(key=b"b")
    first, second = enter(a, "a"), enter(b, "b")
    a.publish(
        update_of(a, first, 1.0, progress=TrainingProgress(inner_steps=1, tokens=10))
    )
    much = TrainingProgress(inner_steps=2**64 - 1, tokens=2**64 - 1)
    b.publish(update_of(b, second, 3.0, progress=much))

    assert verdicts_of(a, 1) == {"a": Verdict.COUNTED, "b": Verdict.REFUSED}
    entry = roster_of(a, 1).entry("b")
    assert entry is not None
    assert entry.reason.startswith("progress: inner_steps=18446744073709551615")
    assert anchor_of(a) == -1.0
    assert outcome_of(a, 1).position.tokens == 10
    assert outcome_of(a, 1).position.last_round is None


def a_weight_beyond_the_tokens_made_is_refused(open_run: OpenRun) -> None:
    """An island cannot dominate the mean by claiming a weight."""
    settings = plain_settings(start_islands=2).to_dict()
    settings["outer"]["weight"] = "tokens"
    attach = open_run(RunSettings.from_dict(settings))
    a, b = attach(key=b"a"), attach(key=b"b")
    first, second = enter(a, "a"), enter(b, "b")
    progress = TrainingProgress(inner_steps=1, tokens=10)
    a.publish(update_of(a, first, 1.0, weight=10, progress=progress))
    b.publish(update_of(b, second, 3.0, weight=2**64 - 1, progress=progress))

    assert verdicts_of(a, 1) == {"a": Verdict.COUNTED, "b": Verdict.REFUSED}
    assert anchor_of(a) == -1.0


def a_refused_norm_never_becomes_usual(open_run: OpenRun) -> None:
    """It is refused however often it is repeated, and the other island counts."""
    (a, b), (first, second) = _two(open_run)
    for round in range(1, 13):
        is_giant = round > 5
        a.publish(update_of(a, first, 1.0, round=round))
        b.publish(update_of(b, second, 1e6 if is_giant else 1.0, round=round))

        verdict = Verdict.REFUSED if is_giant else Verdict.COUNTED
        assert verdicts_of(a, round) == {"a": Verdict.COUNTED, "b": verdict}
    entry = roster_of(a, 12).entry("b")
    assert entry is not None
    assert "limits.max_update_norm=10" in entry.reason


def a_newcomer_is_judged_by_the_norms_of_others(open_run: OpenRun) -> None:
    """Its first update is refused although its round has no median."""
    attach = open_run(plain_settings())
    a, b = attach(key=b"a"), attach(key=b"b")
    first = enter(a, "a")
    for round in range(1, 6):
        a.publish(update_of(a, first, 1.0, round=round))
    second = enter(b, "b")
    b.publish(update_of(b, second, 1e6, round=6))
    a.publish(update_of(a, first, 1.0, round=6))
    if "b" not in verdicts_of(a, 6):  # not waited for before the next opening
        b.publish(update_of(b, second, 1e6, round=7))
        a.publish(update_of(a, first, 1.0, round=7))
    last = 7 if isinstance(a.outcome(0, 7, wait_s=0.0), Outcome) else 6

    assert verdicts_of(a, last) == {"a": Verdict.COUNTED, "b": Verdict.REFUSED}


def an_update_that_could_overflow_the_outer_step_is_refused(open_run: OpenRun) -> None:
    """Also in the first round, without earlier norms; the state stays finite."""
    (a, b), (first, second) = _two(open_run)
    a.publish(update_of(a, first, 1.0))
    b.publish(update_of(b, second, 3e38))

    assert verdicts_of(a, 1) == {"a": Verdict.COUNTED, "b": Verdict.REFUSED}
    entry = roster_of(a, 1).entry("b")
    assert entry is not None
    assert "the outer step could overflow" in entry.reason
    assert anchor_of(a) == -1.0


def tokens_end_a_run_before_its_last_round(open_run: OpenRun) -> None:
    """The run ends at `end_rounds` or `end_tokens`, whichever comes first."""
    attach = open_run(plain_settings(end_rounds=9, end_tokens=100))
    a = attach(key=b"a")
    joined = enter(a, "a")
    done = TrainingProgress(inner_steps=2, tokens=60)
    a.publish(update_of(a, joined, 1.0, progress=done))
    assert outcome_of(a, 1).position.last_round == 9
    done = TrainingProgress(inner_steps=4, tokens=120)
    a.publish(update_of(a, joined, 1.0, round=2, progress=done))

    assert outcome_of(a, 2).position.last_round == 2
    with raises(RunEnded):
        a.outcome(0, 3, wait_s=0.0)


def rounds_end_a_run_before_its_tokens(open_run: OpenRun) -> None:
    """The tokens of the last round do not change the last round."""
    attach = open_run(plain_settings(end_rounds=1, end_tokens=100))
    a = attach(key=b"a")
    done = TrainingProgress(inner_steps=2, tokens=120)
    a.publish(update_of(a, enter(a, "a"), 1.0, progress=done))

    assert outcome_of(a, 1).position.last_round == 1


def a_heartbeat_says_where_the_run_is(open_run: OpenRun) -> None:
    """The reply has the open round of each fragment, as an outcome does."""
    attach = open_run(plain_settings())
    a = attach(key=b"a")
    joined = enter(a, "a")
    a.publish(update_of(a, joined, 1.0))
    outcome_of(a, 1)

    beat = Heartbeat(island="a", incarnation=joined.incarnation, step=4)
    assert a.heartbeat(beat).rounds == (2,)


def a_slow_island_gets_a_shorter_window(open_run: OpenRun) -> None:
    """Rosters have its window, and so has the reply when its next incarnation joins."""
    settings = plain_settings(start_islands=2).with_values(
        {"sync.dynamic_local_updates": True}
    )
    attach = open_run(settings)
    a, b = attach(key=b"a"), attach(key=b"b")
    first, second = enter(a, "a"), enter(b, "b")
    assert (first.window, second.window) == (0, 0)
    for exchange, joined, step_s in ((a, first, 0.5), (b, second, 2.0)):
        beat = Heartbeat(
            island=joined.island, incarnation=joined.incarnation, step=4, step_s=step_s
        )
        exchange.heartbeat(beat, at_once=True)
    b.publish(update_of(b, second, 3.0))
    a.publish(update_of(a, first, 1.0))

    # 100 * 0.5 s / 2 s inner steps; 0 stands for 100, which is `sync_every`.
    assert roster_of(a, 1).windows == roster_of(b, 1).windows == {"a": 0, "b": 25}
    b.leave("b", second.incarnation)
    assert enter(attach(key=b"b"), "b").window == 25


EXCHANGE_CLAIMS: tuple[Claim, ...] = (
    the_first_island_founds_and_others_take_its_weights,
    who_makes_up_the_start_begins_with_the_first_step,
    a_round_closes_when_every_member_has_published,
    an_outcome_is_the_same_bytes_whoever_asks,
    a_roster_is_read_without_the_body,
    the_order_of_arrival_does_not_matter,
    a_repeat_is_the_same_publication,
    the_first_update_stands,
    an_update_for_a_later_round_counts_nowhere,
    an_update_on_another_base_is_refused_in_the_roster,
    a_round_without_a_counted_update_is_void,
    a_departing_update_counts_after_its_owner_has_gone,
    who_leaves_is_not_waited_for,
    a_later_life_fences_the_earlier,
    a_live_name_cannot_be_taken,
    a_name_that_no_path_can_hold_is_refused,
    a_full_run_refuses_more,
    another_model_is_refused,
    frames_of_another_run_or_fragment_are_refused,
    a_body_that_does_not_verify_changes_nothing,
    below_the_quorum_a_round_stays_open,
    no_round_opens_beyond_the_last,
    rosters_are_kept_for_good,
    progress_goes_on_over_the_lives_of_an_island,
    impossible_progress_is_refused_in_the_roster,
    a_weight_beyond_the_tokens_made_is_refused,
    a_refused_norm_never_becomes_usual,
    a_newcomer_is_judged_by_the_norms_of_others,
    an_update_that_could_overflow_the_outer_step_is_refused,
    tokens_end_a_run_before_its_last_round,
    rounds_end_a_run_before_its_tokens,
    a_heartbeat_says_where_the_run_is,
    a_slow_island_gets_a_shorter_window,
)


def _two(
    open_run: OpenRun,
) -> tuple[tuple[Exchange, Exchange], tuple[JoinReply, JoinReply]]:
    """Return two islands' exchanges and join replies, in a run that has started."""
    attach = open_run(plain_settings(start_islands=2))
    a, b = attach(key=b"a"), attach(key=b"b")
    return (a, b), (enter(a, "a"), enter(b, "b"))
