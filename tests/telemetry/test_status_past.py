"""A status with its past: shares and rates of the last rounds, and the end in sight."""

from __future__ import annotations

import pytest

from atoll.telemetry import Past, with_past
from tests.telemetry.statuses import island, status
from tests.telemetry.streams import BEGIN_UNIX_S, Stream

ROUND_S = 60.0


def past_of(stream: Stream) -> Past:
    """Return the fold of all events so far."""
    past = Past()
    for event in stream.made:
        past.add(event)
    return past


def trained(rounds: int, *, first_wait_s: float = 0.0) -> Stream:
    """Return rounds of a minute in which a waits for 6 s of it, and b for 18 s.

    Both have waited for `first_wait_s` before the first round.
    """
    stream = Stream()
    stream.start()
    for slot, name in enumerate("ab"):
        stream.join(name, slot)
    stream.at_unix_s += first_wait_s
    for number in range(1, rounds + 1):
        stream.at_unix_s += ROUND_S
        for name, wait_s in (("a", 6.0), ("b", 18.0)):
            seconds = first_wait_s + ROUND_S * number
            waited_s = first_wait_s + wait_s * number
            stream.report(name, 10 * number, 1.5, seconds=seconds, wait_s=waited_s)
        stream.commit(0, number, "##", tokens=6000 * number)
    return stream


def shown(past: Past, *, rounds: int, now_unix_s: float) -> dict[str, object]:
    """Return the status of a run after some rounds."""
    rows = island("a", wait_share=0.99), island("b", wait_share=0.99)
    document = status(*rows, round=rounds, last_round=40, end_tokens=None)
    return with_past(document, past, {}, now_unix_s=now_unix_s)


def test_the_largest_and_the_mean_share_have_two_names() -> None:
    """Of 6 s and 18 s in a minute: 0.3 is the largest, 0.2 the mean."""
    stream = trained(12)
    document = shown(past_of(stream), rounds=12, now_unix_s=stream.at_unix_s)

    assert document["stall_share"] == pytest.approx(0.3)
    assert document["stall_share_mean"] == pytest.approx(0.2)
    assert document["utilisation"] == pytest.approx(0.8)


def test_an_hour_of_waiting_at_the_start_is_forgotten() -> None:
    """The shares are those of the last ten rounds, not of all time since the join."""
    stream = trained(12, first_wait_s=3600.0)
    document = shown(past_of(stream), rounds=12, now_unix_s=stream.at_unix_s)

    assert document["stall_share"] == pytest.approx(0.3)
    assert document["stall_share_mean"] == pytest.approx(0.2)


def test_rate_and_end_are_those_of_the_last_rounds() -> None:
    """6,000 tokens a minute; 28 rounds of a minute are left."""
    stream = trained(12)
    document = shown(past_of(stream), rounds=12, now_unix_s=stream.at_unix_s)

    assert document["tokens_per_s"] == pytest.approx(100.0)
    assert document["usual_round_s"] == ROUND_S
    assert document["last_commit_unix_s"] == BEGIN_UNIX_S + 12 * ROUND_S
    assert document["ends_unix_s"] == pytest.approx(stream.at_unix_s + 28 * ROUND_S)
    assert document["ends_by"] == "rounds"


def test_no_end_is_estimated_from_few_rounds() -> None:
    """Five spans of rounds are needed."""
    stream = trained(5)
    document = shown(past_of(stream), rounds=5, now_unix_s=stream.at_unix_s)

    assert document["ends_unix_s"] is None


def test_values_of_an_earlier_process_have_their_time() -> None:
    """After a restart nothing is 0 that was not reported as 0."""
    stream = trained(12)
    before = past_of(stream).islands
    stream.start(was_clean=False)
    unknown = dict.fromkeys(("loss", "tokens", "inner_steps", "bytes_up", "round"))
    counts = dict.fromkeys(("counted", "late", "refused"), 0)
    document = with_past(
        status(island("a", **unknown, **counts)),
        past_of(stream),
        before,
        now_unix_s=stream.at_unix_s,
    )
    (row,) = document["islands"]

    assert (row["loss"], row["tokens"], row["inner_steps"]) == (1.5, 1200, 120)
    assert (row["counted"], row["bytes_up"], row["round"]) == (12, 12_000, 12)
    assert row["as_of_unix_s"] == stream.at_unix_s
    assert document["starts"] == 2
