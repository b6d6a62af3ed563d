"""The rules of every exchange, shown on the one in memory."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from atoll import RunEnded, RunSettings, weights
from atoll.errors import (
    CorruptError,
    LeaseLost,
    ModelError,
    Refused,
    SettingsError,
    UsageError,
)
from atoll.exchange import Frame, MemoryRun
from atoll.protocol import Heartbeat, JoinReply, JoinRequest
from atoll.settings import SyncSection
from atoll.testing import vector_model
from atoll.testing.fixtures import MODEL, OUTER
from atoll.testing.fixtures import anchor_of as anchor
from atoll.testing.fixtures import enter as join
from atoll.testing.fixtures import update_of as update
from atoll.weights import FragmentState
from atoll.wire import FrameKind, TrainingProgress, Verdict, codec, with_body


def make_run(weight: str = "uniform", **run: object) -> MemoryRun:
    """Return a run of plain averaging: one fragment, fp32 both ways, lr 1."""
    return MemoryRun(
        RunSettings.from_dict(
            {
                "run": run,
                "wire": {"up": "fp32", "down": "fp32"},
                "outer": {"optimizer": "sgd", "lr": 1.0, "weight": weight},
            }
        )
    )


def verdicts(run: MemoryRun, round: int) -> dict[str, Verdict]:
    outcome = run.outcome(0, round, wait_s=0)
    assert outcome is not None
    roster = outcome.agreed.header.roster
    assert roster is not None
    return {entry.island: entry.verdict for entry in roster.entries}


def test_an_asynchronous_run_is_refused() -> None:
    """No time passes in a run in memory, so that its rounds cannot close by time."""
    with pytest.raises(SettingsError, match=r"mode='async' does not work in a Memory"):
        MemoryRun(RunSettings(sync=SyncSection(mode="async")))


def test_a_round_closes_when_every_member_has_published() -> None:
    """The outcome is there with the last update, and not before."""
    run = make_run(start_islands=2)
    a, b = join(run, "a"), join(run, "b")
    run.publish(update(run, a, 1.0))
    assert run.outcome(0, 1, wait_s=0) is None

    run.publish(update(run, b, 3.0))

    # Pseudo-gradients 1 and 3, mean 2, lr 1: the anchor goes from 0 to -2.
    assert anchor(run) == -2.0
    assert verdicts(run, 1) == {"a": Verdict.COUNTED, "b": Verdict.COUNTED}


def test_the_order_of_arrival_does_not_matter() -> None:
    """Any order of publication gives the same agreed bytes."""
    bodies = []
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        run = make_run(start_islands=3)
        members = [join(run, name) for name in "abc"]
        frames = [
            update(run, member, value)
            for member, value in zip(members, (0.1, 0.7, 1e-3), strict=True)
        ]
        for index in order:
            run.publish(frames[index])
        outcome = run.outcome(0, 1, wait_s=0)
        assert outcome is not None
        bodies.append(outcome.agreed.body.tobytes())

    assert len(set(bodies)) == 1


def test_a_repeat_is_the_same_publication() -> None:
    """Publishing twice, before and after the commit, counts once."""
    run = make_run(start_islands=2)
    a, b = join(run, "a"), join(run, "b")
    frame = update(run, a, 1.0)
    run.publish(frame)
    run.publish(frame)
    run.publish(update(run, b, 3.0))
    run.publish(frame)

    assert anchor(run) == -2.0
    assert run.outcome(0, 2, wait_s=0) is None


def test_the_first_update_stands() -> None:
    """Another update of the same island for the same round is refused."""
    run = make_run(start_islands=2)
    a, _ = join(run, "a"), join(run, "b")
    run.publish(update(run, a, 1.0))

    with pytest.raises(Refused, match=r"Another update of island 'a' stands"):
        run.publish(update(run, a, 2.0))


def test_who_leaves_is_not_waited_for() -> None:
    """A member that leaves without publishing does not hold up the others."""
    run = make_run(start_islands=2)
    a, b = join(run, "a"), join(run, "b")
    run.publish(update(run, a, 1.0))
    run.leave("b", b.incarnation)

    assert anchor(run) == -1.0


def test_a_departing_update_counts_after_its_owner_has_gone() -> None:
    """It counts in its own round, and one for the round after in that."""
    run = make_run(start_islands=2)
    a, b = join(run, "a"), join(run, "b")
    run.publish(update(run, b, 3.0, kind=FrameKind.DEPARTING))
    run.publish(update(run, b, 5.0, round=2, kind=FrameKind.DEPARTING))
    run.leave("b", b.incarnation)
    run.publish(update(run, a, 1.0))
    assert anchor(run) == -2.0

    run.publish(update(run, a, 1.0, round=2))

    # The second departing update still names the founding base: mean of 5 and 1.
    assert anchor(run) == -5.0


def test_a_newcomer_is_a_candidate_from_the_next_opening() -> None:
    """The open round does not wait for it, but counts it if it publishes earlier."""
    run = make_run()
    a = join(run, "a")
    b = join(run, "b")
    run.publish(update(run, a, 1.0))
    assert verdicts(run, 1) == {"a": Verdict.COUNTED}

    run.publish(update(run, a, 1.0, round=2))

    assert run.outcome(0, 2, wait_s=0) is None
    run.publish(update(run, b, 1.0, round=2))
    assert verdicts(run, 2) == {"a": Verdict.COUNTED, "b": Verdict.COUNTED}


def test_the_first_round_waits_for_start_islands() -> None:
    """One island of two publishes in vain until the other has joined."""
    run = make_run(start_islands=2)
    a = join(run, "a")
    run.publish(update(run, a, 1.0))
    assert run.outcome(0, 1, wait_s=0) is None

    b = join(run, "b")
    run.publish(update(run, b, 1.0))

    assert verdicts(run, 1) == {"a": Verdict.COUNTED, "b": Verdict.COUNTED}


def test_below_the_quorum_a_round_stays_open() -> None:
    """With quorum 2 the round of a lone survivor waits for another island."""
    run = make_run(start_islands=2, quorum=2)
    a, b = join(run, "a"), join(run, "b")
    run.publish(update(run, a, 1.0))
    run.leave("b", b.incarnation)
    assert run.outcome(0, 1, wait_s=0) is None

    c = join(run, "c")
    run.publish(update(run, c, 3.0))

    assert anchor(run) == -2.0


def test_an_update_from_another_base_is_refused_and_the_run_goes_on() -> None:
    """It cannot contaminate the mean; the roster says why."""
    run = make_run(start_islands=2)
    a, b = join(run, "a"), join(run, "b")
    run.publish(update(run, a, 1.0))
    run.publish(update(run, b, 100.0, base=b"x" * 16))

    assert anchor(run) == -1.0
    assert verdicts(run, 1)["b"] is Verdict.REFUSED


def test_an_update_far_beyond_the_median_norm_is_refused() -> None:
    """From three islands on, ten times the median is the limit."""
    run = make_run(start_islands=3)
    members = [join(run, name) for name in "abc"]
    for member, value in zip(members, (1.0, 1.0, 11.0), strict=True):
        run.publish(update(run, member, value))

    # Norms are sqrt(3) times 1, 1 and 11; the median times 10 is sqrt(3) times 10.
    assert verdicts(run, 1)["c"] is Verdict.REFUSED
    assert anchor(run) == -1.0


def test_a_round_whose_every_update_was_refused_is_void() -> None:
    """State unchanged, round number used."""
    run = make_run()
    a = join(run, "a")
    before = run.state(0).header
    empty = np.empty(0, np.uint8)
    header = replace(
        update(run, a, 1.0).header,
        elements=0,
        norm=0.0,
        refused="non-finite: w",
        body_bytes=0,
        pieces=(),
    )
    run.publish(Frame(header, empty))

    after = run.state(0).header
    assert (after.base, after.round) == (before.base, before.round + 1)
    outcome = run.outcome(0, 1, wait_s=0)
    assert outcome is not None
    assert outcome.agreed.header.elements == 0


def test_finite_updates_whose_sum_overflows_make_a_void_round() -> None:
    """Nobody's infinity reaches the anchor."""
    run = make_run(start_islands=2)
    a, b = join(run, "a"), join(run, "b")
    run.publish(update(run, a, 3e38))
    run.publish(update(run, b, 3e38))

    assert anchor(run) == 0.0
    assert set(verdicts(run, 1).values()) == {Verdict.REFUSED}


def test_weights_by_tokens() -> None:
    """With weights 1 and 3 the mean of 8 and 4 is 5."""
    run = make_run("tokens", start_islands=2)
    a, b = join(run, "a"), join(run, "b")
    for island, value, tokens in ((a, 8.0, 1), (b, 4.0, 3)):
        made = TrainingProgress(inner_steps=1, tokens=tokens)
        run.publish(update(run, island, value, weight=tokens, progress=made))

    assert anchor(run) == -5.0


def test_a_later_life_fences_the_earlier() -> None:
    """After leaving and joining again, the old incarnation can do nothing."""
    run = make_run(start_islands=2)
    old, _ = join(run, "a"), join(run, "b")
    run.leave("a", old.incarnation)
    new = join(run, "a")
    assert (new.incarnation, new.slot) == (old.incarnation + 1, old.slot)

    with pytest.raises(LeaseLost, match=r"Incarnation 1"):
        run.publish(update(run, old, 1.0))
    with pytest.raises(LeaseLost):
        run.heartbeat(Heartbeat(island="a", incarnation=1, step=5))
    run.leave("a", old.incarnation)
    run.publish(update(run, new, 1.0))


def test_a_live_name_cannot_be_taken() -> None:
    """The second island of a name is refused, with the way out."""
    run = make_run()
    join(run, "a")

    with pytest.raises(UsageError, match=r"'a' is live.*another name"):
        join(run, "a")


def test_a_full_run_refuses_more() -> None:
    """max_islands counts live islands."""
    run = make_run(max_islands=1)
    a = join(run, "a")
    with pytest.raises(UsageError, match=r"max_islands=1"):
        join(run, "b")
    run.leave("a", a.incarnation)

    assert join(run, "b").slot == 1


def test_another_model_is_refused_by_name_and_both_sides() -> None:
    """The message names the tensor, and what either side has."""
    run = make_run()
    join(run, "a")

    with pytest.raises(ModelError, match=r"'w'.*shape 3 .*run.*shape 4 .*this island"):
        join(run, "b", model=vector_model({"w": (4,)}))
    with pytest.raises(ModelError, match=r"'v'.*in this island.*absent from the run"):
        join(run, "b", model=vector_model({"w": (3,), "v": (1,)}))
    with pytest.raises(ModelError, match=r"dtype float32.*dtype bfloat16"):
        join(run, "b", model=vector_model({"w": (3,)}, dtype="bfloat16"))


def test_the_next_island_founds_when_the_founder_leaves_first() -> None:
    """A founder that dies before its weights arrive leaves an empty run."""
    run = make_run()
    founder = run.join(JoinRequest(model=MODEL, island="a"))
    replies: list[JoinReply] = []
    waiting = threading.Thread(target=lambda: replies.append(join(run, "b")))
    waiting.start()
    run.leave("a", founder.incarnation)
    waiting.join(timeout=30)

    assert replies[0].is_founder


def test_frames_of_another_run_fragment_or_round_change_nothing() -> None:
    """Each is refused by name."""
    run = make_run()
    a = join(run, "a")
    frame = update(run, a, 1.0)
    foreign = Frame(replace(frame.header, run="elsewhere"), frame.body)
    with pytest.raises(Refused, match=r"belongs to run 'elsewhere'"):
        run.publish(foreign)
    with pytest.raises(Refused, match=r"Fragment 7 does not exist"):
        run.publish(update(run, a, 1.0, fragment=7))
    with pytest.raises(Refused, match=r"Round 2 .* cannot be published yet"):
        run.publish(update(run, a, 1.0, round=2))

    assert run.outcome(0, 1, wait_s=0) is None


def test_a_body_that_does_not_verify_changes_nothing() -> None:
    """One flipped bit is found before anything is staged."""
    run = make_run()
    a = join(run, "a")
    frame = update(run, a, 1.0)
    frame.body[0] ^= 1

    with pytest.raises(CorruptError):
        run.publish(frame)
    assert run.outcome(0, 1, wait_s=0) is None


def test_no_round_opens_beyond_the_last() -> None:
    """Waiting for it says that the run has ended."""
    run = make_run(end_rounds=1)
    a = join(run, "a")
    run.publish(update(run, a, 1.0))

    with pytest.raises(RunEnded, match=r"ended with round 1"):
        run.outcome(0, 2, wait_s=0)


def test_the_run_ends_by_tokens() -> None:
    """The round in which the counted tokens reach end_tokens is the last."""
    run = make_run(end_tokens=100)
    a = join(run, "a")
    for round, tokens in ((1, 60), (2, 120)):
        frame = update(run, a, 1.0, round=round)
        progress = replace(frame.header.progress, tokens=tokens)
        run.publish(Frame(replace(frame.header, progress=progress), frame.body))

    position = run.heartbeat(Heartbeat(island="a", incarnation=1, step=2))
    assert (position.tokens, position.last_round) == (120, 2)


def test_the_outcome_is_the_same_bytes_whoever_asks() -> None:
    """Asking twice gives one immutable frame with the outer values it was made with."""
    run = make_run()
    a = join(run, "a")
    run.publish(update(run, a, 1.0))
    first, second = run.outcome(0, 1, wait_s=0), run.outcome(0, 1, wait_s=0)
    assert first is not None
    assert second is not None

    assert first.agreed.header == second.agreed.header
    assert first.agreed.header.outer == OUTER
    assert codec(first.agreed.header.codec).name == "fp32"


def hostile_updates(run: MemoryRun, joined: JoinReply) -> list[tuple[Frame, str]]:
    """Return updates that verify, and are not what the fragment takes."""
    good = update(run, joined, 1.0)
    blank = replace(good.header, pieces=(), body_bytes=0)
    longer = np.zeros(20, np.uint8)
    nan = np.full(3, np.nan, np.float32).view(np.uint8)
    return [
        (Frame(with_body(replace(blank, elements=5), longer), longer), "5 elements"),
        (Frame(replace(good.header, weight=2**40), good.body), "weight=1099511627776"),
        (Frame(replace(good.header, norm=0.0), good.body), "norm is 0"),
        (Frame(with_body(blank, nan), nan), "element 0"),
    ]


@pytest.mark.parametrize("case", range(4))
def test_an_update_the_fragment_cannot_count_hurts_nobody_else(case: int) -> None:
    """Its sender is told, nothing is staged, and the others' round goes on."""
    run = make_run(start_islands=2)
    a, b = join(run, "a"), join(run, "b")
    frame, reason = hostile_updates(run, b)[case]
    with pytest.raises((Refused, CorruptError), match=reason):
        run.publish(frame)
    run.publish(update(run, a, 1.0))
    run.publish(update(run, b, 3.0))

    assert anchor(run) == -2.0


def test_a_state_of_another_shape_cannot_found_a_run() -> None:
    """The founder is told, and the next island founds."""
    run = make_run()
    founder = run.join(JoinRequest(model=MODEL, island="a"))
    state = FragmentState.found(np.zeros(5, np.float32), "sgd")
    header, body = state.to_frame(
        run=founder.run, fragment=0, outer=OUTER, island="a", incarnation=1
    )
    with pytest.raises(Refused, match="cannot found fragment 0"):
        run.publish(Frame(header, body))
    run.leave("a", 1)

    assert join(run, "b").is_founder


def test_who_never_took_part_does_not_start_the_run() -> None:
    """A founder that failed counts for nothing, and has no slot."""
    run = make_run(start_islands=2)
    failed = run.join(JoinRequest(model=MODEL, island="a"))
    run.leave("a", failed.incarnation)
    b = join(run, "b")
    run.publish(update(run, b, 1.0))

    assert b.slot == 0
    assert run.outcome(0, 1, wait_s=0) is None


def test_progress_goes_on_over_the_lives_of_an_island() -> None:
    """A later life is told what the earlier ones have counted."""
    run = make_run()
    a = join(run, "a")
    frame = update(run, a, 1.0)
    progress = replace(frame.header.progress, inner_steps=7, tokens=40)
    run.publish(Frame(replace(frame.header, progress=progress), frame.body))
    run.leave("a", a.incarnation)
    again = join(run, "a")

    assert (again.inner_steps, again.tokens) == (7, 40)


def test_who_left_its_work_has_taken_part() -> None:
    """An island that departs before the other joins counts, and starts the run."""
    run = make_run(start_islands=2)
    a = join(run, "a")
    run.publish(update(run, a, 1.0, kind=FrameKind.DEPARTING))
    run.leave("a", a.incarnation)
    b = join(run, "b")
    run.publish(update(run, b, 3.0))

    assert anchor(run) == -2.0


def test_nothing_is_wanted_of_islands_that_wait_for_the_start() -> None:
    """Who waits for start_islands keeps its schedule, however late the others are."""
    settings = {
        "run": {"start_islands": 2},
        "sync": {"num_fragments": 2, "fragment_order": "by_size"},
        "wire": {"up": "fp32", "down": "fp32"},
        "outer": {"optimizer": "sgd", "lr": 1.0},
    }
    run = MemoryRun(RunSettings.from_dict(settings))
    model = vector_model({"v": (3,), "w": (3,)})
    a = run.join(JoinRequest(model=model, island="a"))
    for fragment in range(2):
        state = FragmentState.found(np.zeros(3, np.float32), "sgd")
        header, body = state.to_frame(
            run=a.run, fragment=fragment, outer=OUTER, island="a", incarnation=1
        )
        run.publish(Frame(header, body))
    run.publish(update(run, a, 1.0))
    waits_a = Heartbeat(island="a", incarnation=1, step=1, waits_for=(0, 1))

    assert run.heartbeat(waits_a).wanted == ()

    # Once both are there, and wait for each other's fragments, each is asked for them.
    b = run.join(JoinRequest(model=model, island="b"))
    run.publish(replace_fragment(update(run, b, 3.0), 1, base=run.state(1)))
    run.heartbeat(Heartbeat(island="b", incarnation=1, step=1, waits_for=(1, 1)))
    assert run.heartbeat(waits_a).wanted == (1,)


def test_a_round_whose_commit_failed_is_committed_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller sees the error, and no update of the round is lost."""
    run = make_run(start_islands=2)
    a, b = join(run, "a"), join(run, "b")
    run.publish(update(run, a, 1.0))
    last = update(run, b, 3.0)

    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(weights, "agree", fails)
        for _ in range(2):
            with pytest.raises(MemoryError):
                run.publish(last)
    run.publish(last)

    assert anchor(run) == -2.0
    assert verdicts(run, 1) == {"a": Verdict.COUNTED, "b": Verdict.COUNTED}
    run.publish(update(run, a, 1.0, round=2))
    run.publish(update(run, b, 1.0, round=2))
    assert anchor(run) == -3.0


def test_a_heartbeat_that_arrives_after_its_island_left_hurts_nobody() -> None:
    """It was on its way while another thread said that the island leaves."""
    run = make_run(start_islands=2)
    a, b = join(run, "a"), join(run, "b")
    run.leave("b", b.incarnation)
    run._beats["b"] = Heartbeat(island="b", incarnation=b.incarnation, step=0)
    run.publish(update(run, a, 1.0))

    assert anchor(run) == -1.0


def test_a_round_waits_for_newcomers_after_many_names_that_left() -> None:
    """No number of islands that joined and left makes a round close without one."""
    run = make_run()
    a = join(run, "a")
    for index in range(20):
        idle = join(run, f"idle{index}")
        run.leave(idle.island, idle.incarnation)
    b = join(run, "b")
    run.publish(update(run, a, 1.0))
    run.publish(update(run, a, 1.0, round=2))

    assert run.outcome(0, 2, wait_s=0) is None
    run.publish(update(run, b, 1.0, round=2))
    assert verdicts(run, 2) == {"a": Verdict.COUNTED, "b": Verdict.COUNTED}


def replace_fragment(frame: Frame, fragment: int, *, base: Frame) -> Frame:
    """Return an update of one fragment as one of another that is as large."""
    header = replace(frame.header, fragment=fragment, base=base.header.base)
    return Frame(header, frame.body)
