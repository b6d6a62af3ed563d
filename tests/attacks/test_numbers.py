"""Numbers that an island claims of itself, and that cannot be."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import UsageError
from atoll.exchange import CoordinatorExchange
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import fetch, packed
from atoll.exchange.calls import HeartbeatCall, JoinCall
from atoll.protocol import Heartbeat, HeldRound, JoinRequest, Stats
from atoll.store import MemoryStore
from atoll.testing.fixtures import MODEL, StoreRun, anchor_of, enter, plain_settings
from atoll.wire import FrameKind, TrainingProgress, Verdict
from tests.attacks.conftest import Serve
from tests.attacks.islands import islands_of, status_of
from tests.coordinator.apart import serving_apart
from tests.coordinator.serving import calling

U64_MAX = 2**64 - 1
MADE = TrainingProgress(inner_steps=1, tokens=10)


@pytest.mark.parametrize("kind", [FrameKind.UPDATE, FrameKind.DEPARTING])
@pytest.mark.parametrize(
    "made",
    [
        TrainingProgress(inner_steps=1, tokens=U64_MAX),
        TrainingProgress(inner_steps=U64_MAX, tokens=10),
        TrainingProgress(inner_steps=U64_MAX, tokens=U64_MAX),
    ],
)
def test_claimed_progress_does_not_end_the_run(
    serve: Serve, made: TrainingProgress, kind: FrameKind
) -> None:
    """An update of 2^64 - 1 tokens is refused, and the run goes on without it."""
    coordinator = serve(start_islands=2, end_tokens=1_000_000)
    with islands_of(coordinator, "a", "b") as (a, b):
        a.publish(1.0, round=1, progress=MADE)
        b.publish(3.0, round=1, progress=made, kind=kind)
        entry = a.roster(1).entry("b")

        assert entry is not None
        assert entry.verdict is Verdict.REFUSED
        assert entry.reason.startswith("progress: ")
        assert a.outcome(1).position.tokens == 10
        assert a.outcome(1).position.last_round is None
        assert "progress: " in str(status_of(coordinator)["islands"])


def weighted(**run: Any) -> dict[str, Any]:
    settings = plain_settings(**run).to_dict()
    settings["outer"]["weight"] = "tokens"
    return settings


@pytest.mark.parametrize("weight", [11, 2**32, U64_MAX])
def test_a_claimed_weight_does_not_make_one_island_the_mean(
    tmp_path: Path, weight: int
) -> None:
    """With 10 tokens made, a weight of more than 10 is refused."""
    settings = weighted(start_islands=2)
    with (
        serving_apart(tmp_path / "run", settings) as coordinator,
        islands_of(coordinator, "a", "b") as (a, b),
    ):
        a.publish(1.0, round=1, weight=10, progress=MADE)
        b.publish(3.0, round=1, weight=weight, progress=MADE)
        entry = a.roster(1).entry("b")

        assert entry is not None
        assert entry.verdict is Verdict.REFUSED
        assert entry.reason.startswith(f"weight: {weight} exceeds 10")
        assert anchor_of(a.exchange) == -1.0


def test_tokens_cannot_be_counted_again_as_weight(tmp_path: Path) -> None:
    """What weighed in round 1 is not part of the weight of round 2."""
    with (
        serving_apart(tmp_path / "run", weighted()) as coordinator,
        islands_of(coordinator, "a") as (a,),
    ):
        a.publish(1.0, round=1, weight=10, progress=MADE)
        a.outcome(1)
        later = TrainingProgress(inner_steps=2, tokens=15)
        a.publish(1.0, round=2, weight=15, progress=later)
        entry = a.roster(2).entry("a")

        assert entry is not None
        assert entry.reason.startswith("weight: 15 exceeds 5")


def test_tokens_end_a_run_that_has_a_last_round_too(tmp_path: Path) -> None:
    """Whichever comes first; a coordinator that starts again agrees."""
    settings = plain_settings(end_rounds=9, end_tokens=100).to_dict()
    directory = tmp_path / "run"
    with (
        serving_apart(directory, settings) as coordinator,
        islands_of(coordinator, "a") as (a,),
    ):
        a.publish(1.0, round=1, progress=TrainingProgress(inner_steps=5, tokens=50))
        assert a.outcome(1).position.last_round == 9
        a.publish(1.0, round=2, progress=TrainingProgress(inner_steps=9, tokens=100))
        assert a.outcome(2).position.last_round == 2

    with serving_apart(directory, settings) as coordinator:
        assert status_of(coordinator)["last_round"] == 2
        assert status_of(coordinator)["state"] == "ended"


def test_an_incarnation_leaves_room_for_its_owner(serve: Serve) -> None:
    """A life that claims 2^64 - 1 is refused, and the name's next life joins."""
    coordinator = serve()
    with islands_of(coordinator, "a") as (a,):
        a.exchange.leave("a", 1)
    request = JoinRequest(model=MODEL, island="a", incarnation=U64_MAX)
    heard = calling(coordinator, JoinCall(request, b"another key", b"nonce"))

    assert heard.status == 410
    assert b"claims incarnation 18446744073709551615" in heard.body
    with coordinator.line() as line:
        owner = CoordinatorExchange(line, key=b"a", nonce=b"next")
        assert owner.join(JoinRequest(model=MODEL, island="a")).incarnation == 2


def test_an_incarnation_planted_in_a_store_is_passed_over() -> None:
    """A member document of life 2^64 - 1 does not keep the owner of the name out."""
    run = StoreRun(MemoryStore(), plain_settings())
    enter(run(key=b"a"), "a")
    store = run.store
    document = fetch(store, documents.MEMBER, keys.member("a", 1))
    last = replace(document, beat=replace(document.beat, incarnation=U64_MAX))
    key = keys.member("a", U64_MAX)
    store.put(key, packed(documents.MEMBER, last, key))

    assert enter(run(key=b"a"), "a").incarnation == 2


def test_a_step_planted_in_a_store_does_not_move_the_schedule() -> None:
    """Who joins begins where the rounds are, not where a document claims to be."""
    run = StoreRun(MemoryStore(), plain_settings())
    enter(run(key=b"a"), "a")
    key = keys.member("a", 1)
    document = fetch(run.store, documents.MEMBER, key)
    ahead = replace(document, beats=1, beat=replace(document.beat, step=U64_MAX))
    run.store.put(key, packed(documents.MEMBER, ahead, key))
    joined = enter(run(key=b"b"), "b")

    assert joined.position.step <= 4 * plain_settings().sync.sync_every


@pytest.mark.parametrize(
    "claimed",
    [
        {"tokens": U64_MAX},
        {"bytes_up": 2**63},
        {"seconds": 1e300},
        {"wait_s": 1.7e308},
    ],
)
def test_statistics_that_cannot_be_are_refused(
    serve: Serve, claimed: dict[str, float]
) -> None:
    """They would spoil every sum; the status stays readable."""
    coordinator = serve()
    with islands_of(coordinator, "a") as (a,):
        stats = Stats(**claimed)  # type: ignore[arg-type]
        beat = Heartbeat(island="a", incarnation=1, step=1, stats=stats)
        with pytest.raises(UsageError, match=next(iter(claimed))):
            a.exchange.heartbeat(beat, at_once=True)

        (shown,) = status_of(coordinator)["islands"]
        assert (shown["tokens"], shown["wait_s"]) == (None, None)


@pytest.mark.parametrize("held", [0, 2**63])
def test_a_step_that_cannot_be_is_refused(serve: Serve, held: int) -> None:
    """The schedule of those who join later does not depend on it.

    A claim to hold a later round does not make it possible.
    """
    coordinator = serve()
    with islands_of(coordinator, "a"):
        holds = (HeldRound(held, bytes(16)),)
        beat = Heartbeat(island="a", incarnation=1, step=U64_MAX, holds=holds)
        heard = calling(coordinator, HeartbeatCall(beat))

        assert (heard.status, heard.error) == (409, "refused")
        said = heard.body.decode()
        assert re.search(r"reports step 1844|holds round 9223", said)
        assert status_of(coordinator)["islands"][0]["step"] == 0
