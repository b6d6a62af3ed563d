"""Connections that close, or do not open, while an island follows its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest

from atoll.errors import RunMoved, Unreachable
from atoll.exchange import CoordinatorExchange, Frame, Outcome
from atoll.exchange.base import Constants
from atoll.island.join import FollowingExchange, RunLocation
from atoll.protocol import (
    Heartbeat,
    JoinReply,
    JoinRequest,
    ModelSpec,
    Position,
    Reception,
    Stats,
)
from atoll.testing.fixtures import anchor_of, enter, update_of
from atoll.wire import FrameKind
from tests.exchange.test_contract import DirectLine
from tests.exchange.test_relocation import URL, Journey, beat, begun


class Closable:
    """A location whose threads fail when it was closed. Implements `RunLocation`."""

    def __init__(self, inner: RunLocation) -> None:
        self._inner, self.is_closed = inner, False
        self.stats: Callable[[], Stats] | None = None
        self.unconfirmed = inner.unconfirmed
        self.moved: Callable[[RunMoved], None] | None = None
        self.before_state: Callable[[], object] = lambda: None

    def _open(self) -> RunLocation:
        if self.is_closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        return self._inner

    def join(self, request: JoinRequest) -> JoinReply:
        return self._open().join(request)

    def heartbeat(self, beat: Heartbeat, *, at_once: bool = False) -> Position:
        return self._open().heartbeat(beat, at_once=at_once)

    def keep(self, joined: JoinReply, model: ModelSpec, constants: Constants) -> None:
        self._open().keep(joined, model, constants)

    def publish(self, frame: Frame) -> Reception:
        return self._open().publish(frame)

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        return self._open().outcome(fragment, round, wait_s=wait_s, has_body=has_body)

    def state(self, fragment: int) -> Frame:
        self.before_state()
        return self._open().state(fragment)

    def leave(self, island: str, incarnation: int) -> None:
        self._open().leave(island, incarnation)

    def follow(self) -> None:
        """Do what a heartbeat in the background does when it learns of a move."""
        assert self.moved is not None
        self.moved(RunMoved("The run has moved.", target=URL))


def closable(it: Journey) -> Closable:
    line = DirectLine(it.service)
    return Closable(CoordinatorExchange(line, key=b"a", nonce=b"once"))


def no_time(seconds: float) -> NoReturn:
    raise Unreachable("There is no time left.")


def test_who_gives_up_on_the_way_does_not_go_back() -> None:
    """The place before is closed for good; later calls go the rest of the way."""
    it, is_there = begun(), False
    place = closable(it)

    def open(target: str) -> RunLocation:
        place.is_closed = True
        if not is_there:
            raise Unreachable("Nobody answers yet.")
        return it.meet(b"a", b"once")

    a = FollowingExchange(place, open, pause=no_time)
    joined = enter(a, "a")
    beat(a, joined, 0)
    update = update_of(a, joined, 1.0)
    it.move()
    for _ in range(2):
        with pytest.raises(Unreachable, match="no time left"):
            a.publish(update)
    is_there = True

    assert a.publish(update) is Reception.COMMITTED  # with what was kept
    assert anchor_of(a) == -1.0


def test_a_call_whose_way_is_closed_under_it_is_made_again() -> None:
    """Another thread follows meanwhile, and what fails at the old place is nothing."""
    it = begun()
    place = closable(it)

    def open(target: str) -> RunLocation:
        place.is_closed = True
        return it.meet(b"a", b"once")

    a = FollowingExchange(place, open, pause=no_time)
    enter(a, "a")
    it.move()
    place.before_state = place.follow

    assert anchor_of(a) == 0.0
    assert place.is_closed


class Slow(Closable):
    """A location that does not yet know an update while it publishes it."""

    def publish(self, frame: Frame) -> Reception:
        if frame.header.kind is FrameKind.STATE:
            return super().publish(frame)
        self.unconfirmed = {}
        self.follow()
        return Reception.STAGED


def test_an_update_whose_island_follows_meanwhile_is_published_again() -> None:
    """It was put at the old place after the move, which nobody reads there."""
    it = begun()
    place = Slow(CoordinatorExchange(DirectLine(it.service), key=b"a", nonce=b"once"))
    a = FollowingExchange(place, lambda _: it.meet(b"a", b"once"), pause=no_time)
    joined = enter(a, "a")
    beat(a, joined, 0)
    update = update_of(a, joined, 1.0)
    it.move()

    assert a.publish(update) is Reception.COMMITTED
    assert anchor_of(a) == -1.0


def test_what_fails_where_the_run_is_is_told() -> None:
    """A fault of this machine is nobody's move."""
    it = begun()
    place = closable(it)
    a = FollowingExchange(place, never, pause=no_time)
    enter(a, "a")
    place.is_closed = True

    with pytest.raises(RuntimeError, match="after shutdown"):
        a.state(0)


def never(target: str) -> NoReturn:
    raise AssertionError("the run has not moved")
