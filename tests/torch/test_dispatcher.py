"""A marked method runs on every rank, with arguments of the declared types alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from atoll.errors import CorruptError, UsageError
from atoll.torch.ranks.channel import LEADER, Message, RankChannel
from atoll.torch.ranks.dispatcher import (
    ENCODINGS,
    OnlyLeader,
    RankDispatcher,
    Thread,
    on_all_ranks,
)
from atoll.weights.state import OuterStep
from atoll.wire import OuterValues, Verdict

pytestmark = pytest.mark.torch

Called = list[tuple[object, ...]]


@dataclass(eq=False)
class Part:
    """A rank's part of something that has a number."""

    number: int
    rank: int


class Parts:
    """An object that every rank has one of."""

    def __init__(self, ranks: RankDispatcher) -> None:
        self.ranks, self.called = ranks, Called()
        self.parts = [Part(number, ranks.orders.rank) for number in range(3)]
        ranks.refer(Part, lambda part: part.number, lambda number: self.parts[number])
        ranks.register(self)

    @on_all_ranks(Thread.BACKGROUND)
    def change(self, part: Part, verdict: Verdict, *, share: float) -> str:
        self.called.append((part, verdict, share))
        return f"by {part.rank}"

    @on_all_ranks(Thread.BACKGROUND)
    def scatter(self, whole: OnlyLeader[list[int]], in_flight: Part | None) -> None:
        self.called.append((whole, in_flight))

    @on_all_ranks(Thread.AT_ONCE, combine=max)
    def highest(self, add: int) -> int:
        return add + self.ranks.orders.rank

    @on_all_ranks(Thread.TRAINING)
    def train(self, number: int) -> None:
        self.called.append((number,))
        if self.ranks.orders.rank == number:
            raise UsageError(f"rank {number} cannot")

    def secret(self) -> None:
        self.called.append(("secret",))


class Island:
    """Two ranks as threads of this process, over gloo."""

    def __init__(self) -> None:
        with ThreadPoolExecutor(2) as both:
            stores = [dist.HashStore(), dist.HashStore()]  # type: ignore[attr-defined]
            self.leader, self.other = both.map(
                lambda rank: Parts(RankDispatcher(*channels(stores, rank))), range(2)
            )
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def train(self, number: int) -> list[object]:
        """Make a collective call of `train`; return how it ended on both ranks."""
        calls = self.leader.ranks.collective

        def lead() -> Message:
            with calls.collective_call("train", 0, lambda: {"round": 7}):
                self.leader.train(number)
            return {}

        entry = {"call": "train", "steps": 0}
        with ThreadPoolExecutor(2) as both:
            other = both.submit(ended, lambda: self.other.ranks.take_part(entry))
            return [both.submit(ended, lead).result(), other.result()]

    def close(self) -> None:
        self.leader.ranks.background.notify({"do": "bye"})
        self._thread.join()

    def _work(self) -> None:
        ranks = self.other.ranks
        while "method" in (order := ranks.works.receive_message(LEADER)):
            ranks.works.send_message(LEADER, ranks.answer(order))


def channels(stores: list[Any], rank: int) -> list[RankChannel]:
    timeout = timedelta(seconds=20)
    return [
        RankChannel(dist.ProcessGroupGloo(store, rank, 2, timeout))  # type: ignore[arg-type]
        for store in stores
    ]


def ended(call: Callable[[], Message]) -> object:
    """Return what a call returned, or its error."""
    try:
        return call()
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"


@pytest.fixture
def island() -> Iterator[Island]:
    two = Island()
    yield two
    two.close()


def test_a_call_runs_on_every_rank_with_its_own_part(island: Island) -> None:
    """Parts go as their numbers, values as they are; the leader's result returns."""
    leader, other = island.leader, island.other

    result = leader.change(leader.parts[2], Verdict.LATE, share=0.1)

    assert result == "by 0"
    assert leader.called == [(leader.parts[2], Verdict.LATE, 0.1)]
    assert other.called == [(other.parts[2], Verdict.LATE, 0.1)]


def test_what_only_the_leader_has_is_none_elsewhere(island: Island) -> None:
    """Whole values stay; an optional part is found, or is None on both."""
    leader, other = island.leader, island.other

    leader.scatter([1, 2], leader.parts[1])
    leader.scatter([3], None)

    assert leader.called == [([1, 2], leader.parts[1]), ([3], None)]
    assert other.called == [(None, other.parts[1]), (None, None)]


def test_results_of_all_ranks_can_be_combined(island: Island) -> None:
    """The most of two ranks, of which the second has one more."""
    assert island.leader.highest(4) == 5


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_a_collective_call_reaches_both_ranks(
    failing: int, island: Island
) -> None:
    """No rank goes on alone, whichever has failed."""
    assert island.train(failing) == [f"UsageError: rank {failing} cannot"] * 2


def test_a_collective_call_ends_with_the_leaders_conclusion(island: Island) -> None:
    """The other rank gets it, and both have made the call."""
    assert island.train(5) == [{}, {"do": "resume", "round": 7}]
    assert island.leader.called == island.other.called == [(5,)]


@pytest.mark.parametrize(
    ("method", "arguments", "match"),
    [
        ("Parts.secret", {}, r"'Parts\.secret', which no rank has"),
        ("Parts.highest", {"add": "4"}, r"add='4'.*not a int"),
        ("Parts.highest", {"add": True}, r"add=True.*a bool, not a int"),
        ("Parts.highest", {}, r"with \[\], and it takes \['add'\]"),
        ("Parts.highest", {"add": 1, "more": 2}, r"it takes \['add'\]"),
        (
            "Parts.change",
            {"part": 3, "verdict": "LATE", "share": 0.5},
            r"part=3: IndexError",
        ),
        (
            "Parts.change",
            {"part": 0, "verdict": "GONE", "share": 0.5},
            r"verdict='GONE'",
        ),
    ],
)
def test_a_call_that_no_method_takes_is_refused(
    method: str, arguments: Message, match: str, island: Island
) -> None:
    """The name and every argument are checked before anything runs."""
    order = {"method": method, "arguments": arguments}

    with pytest.raises(CorruptError, match=match):
        island.leader.ranks.background.execute(order, lambda: None)

    assert island.other.called == []


def test_an_outer_step_reaches_the_other_ranks_as_it_is() -> None:
    """Each rank steps its part with the same share, at the same place of a buffer."""
    step = OuterStep(
        outer=OuterValues(
            optimizer="nesterov", lr=0.5, momentum=0.875, share=0.25, buffer=4
        ),
        count=2,
        is_first=False,
        is_last=False,
    )
    encoding = ENCODINGS[OuterStep]

    assert encoding.decode(json.loads(json.dumps(encoding.encode(step)))) == step
