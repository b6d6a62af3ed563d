"""Fixtures of contracts and tests: an expected error, small runs, and a store's time.

The small run has one fragment of three elements and starts at zero. Outer SGD with lr 1
and fp32 both ways move the anchor by minus the mean of the updates, exactly: updates of
1 and 3 take it from 0 to -2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from heapq import heappop, heappush
from typing import Any, TypeVar

import numpy as np

from atoll.data import Ask, Claim
from atoll.exchange import Exchange, Frame, Outcome
from atoll.exchange.bucket import BucketReader, StoreExchange
from atoll.exchange.bucket.create import make_run
from atoll.exchange.bucket.view import BEAT_S
from atoll.island.numpy_model import vector_model
from atoll.protocol import JoinReply, JoinRequest, ModelSpec
from atoll.settings import RunSettings
from atoll.store import Store
from atoll.weights import FragmentState
from atoll.wire import FrameKind, Header, OuterValues, Roster, Verdict, with_body


@contextmanager
def raises(kind: type[BaseException]) -> Iterator[None]:
    """Fail unless the block raises an error of a kind. Needs no test framework."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


MODEL = vector_model({"w": (3,)})
OUTER = OuterValues(optimizer="sgd", lr=1.0, momentum=0.0)


def plain_settings(**run: object) -> RunSettings:
    """Return the settings of plain averaging; `run` is the run file's `[run]`."""
    return RunSettings.from_dict(
        {
            "run": run,
            "wire": {"up": "fp32", "down": "fp32"},
            "outer": {"optimizer": "sgd", "lr": 1.0},
        }
    )


def enter(exchange: Exchange, island: str, *, model: ModelSpec = MODEL) -> JoinReply:
    """Join, and found the run with zeros if this island is its founder."""
    joined = exchange.join(JoinRequest(model=model, island=island))
    if joined.is_founder:
        state = FragmentState.found(np.zeros(3, np.float32), "sgd")
        header, body = state.to_frame(
            run=joined.run,
            fragment=0,
            outer=OUTER,
            island=island,
            incarnation=joined.incarnation,
        )
        exchange.publish(Frame(header, body))
    return joined


def update_of(
    exchange: Exchange,
    joined: JoinReply,
    value: float,
    *,
    round: int = 1,
    **fields: object,
) -> Frame:
    """Return an update of three equal values, based on the run's present state."""
    body = np.full(3, value, np.float32).view(np.uint8)
    header = Header(
        kind=FrameKind.UPDATE,
        run=joined.run,
        fragment=0,
        round=round,
        island=joined.island,
        incarnation=joined.incarnation,
        base=exchange.state(0).header.base,
        elements=3,
        norm=float(np.sqrt(3.0) * abs(value)),
    )
    return Frame(replace(with_body(header, body), **fields), body)  # type: ignore[arg-type]


def anchor_of(exchange: Exchange) -> float:
    """Return the first element of the run's anchor; all three are equal."""
    return float(exchange.state(0).body.view(np.float32)[0])


def outcome_of(exchange: Exchange, round: int) -> Outcome:
    """Return a round's outcome, which must exist."""
    outcome = exchange.outcome(0, round, wait_s=0.0)
    assert isinstance(outcome, Outcome), f"round {round} has no outcome yet"
    return outcome


def roster_of(exchange: Exchange, round: int) -> Roster:
    """Return the roster of a round that is over."""
    roster = outcome_of(exchange, round).agreed.header.roster
    assert roster is not None
    return roster


def verdicts_of(exchange: Exchange, round: int) -> dict[str, Verdict]:
    """Return the verdict on each island's update."""
    return {entry.island: entry.verdict for entry in roster_of(exchange, round).entries}


T = TypeVar("T")


class WaitingTime:
    """Time that moves only during `sleep`, which also makes the calls that are due.

    All islands of a test share one. Implements `Runtime` in the thread of the test:
    spawned calls run immediately.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._count = itertools.count()
        self._due: list[tuple[float, int, float, Callable[[], None]]] = []

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        until_s = self._now_s + seconds
        while self._due and self._due[0][0] <= until_s:
            self._now_s, _, every_s, act = heappop(self._due)
            self._plan(every_s, act)
            act()
        self._now_s = max(self._now_s, until_s)

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        self._plan(seconds, act)

    def spawn(self, act: Callable[[], object], *, name: str) -> None:
        act()

    def future(self) -> Future[Any]:
        return Future()

    def gather(self, acts: Sequence[Callable[[], T]]) -> list[T]:
        return [act() for act in acts]

    def _plan(self, seconds: float, act: Callable[[], None]) -> None:
        heappush(self._due, (self._now_s + seconds, next(self._count), seconds, act))


class Unhurried(StoreExchange):
    """Waits for a heartbeat before it reads, so that it sees the others' updates."""

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        self._runtime.sleep(BEAT_S)
        return super().outcome(fragment, round, wait_s=wait_s, has_body=has_body)

    def state(self, fragment: int) -> Frame:
        self._runtime.sleep(BEAT_S)
        return super().state(fragment)

    def claim(self, ask: Ask) -> Claim:
        self._runtime.sleep(BEAT_S)
        return super().claim(ask)


class StoreRun:
    """A run in a store; call it to attach an island."""

    def __init__(self, store: Store, settings: RunSettings) -> None:
        self.store, self.time = store, WaitingTime()
        self._incarnations = itertools.count(1)
        make_run(store, settings, url="a test's store")

    def __call__(self, *, key: bytes) -> StoreExchange:
        """Return the exchange for one incarnation of an island that holds `key`."""
        reader = BucketReader.open(self.store, self.time, url="a test's store")
        nonce = next(self._incarnations).to_bytes(16, "little")
        return Unhurried(reader, key=key, nonce=nonce)
