"""Updates that must last are written while everybody else is served."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from atoll.coordinator import Service
from atoll.coordinator.threads import ThreadedService
from atoll.disk import Data
from atoll.exchange import Frame
from atoll.exchange.calls import HeartbeatCall, JoinCall
from atoll.protocol import Heartbeat, JoinReply, JoinRequest, Position, Reception
from atoll.simulate import SimDisk
from atoll.testing.fixtures import MODEL, plain_settings
from atoll.wire import FrameKind
from tests.coordinator.apart import StillClock
from tests.coordinator.desk import join, update

WAIT_S = 30.0
"""Beyond any doubt: nothing here takes that long unless it never ends."""


class SlowDisk:
    """A disk that takes its time for departing updates, until it is let go."""

    def __init__(self, inner: SimDisk) -> None:
        self.inner = inner
        self.append, self.sync, self.read = inner.append, inner.sync, inner.read
        self.names, self.remove = inner.names, inner.remove
        self.free_bytes = inner.free_bytes
        self.is_writing, self.may_end = threading.Event(), threading.Event()

    def write_new(self, name: str, parts: Iterable[Data]) -> None:
        if name.startswith("departing/"):
            self.is_writing.set()
            assert self.may_end.wait(WAIT_S)
        self.inner.write_new(name, parts)


class Desk:
    """An office whose disk is slow, and two islands."""

    def __init__(self) -> None:
        self.disk = SlowDisk(SimDisk())
        settings = plain_settings(start_islands=2)
        self.service = Service.create(self.disk, settings, run="run", now_s=0.0)
        self.office = ThreadedService(
            self.service,
            clock=StillClock(),
            watch=lambda service, now_s: None,
            on_fault=_raise,
        )
        self.a, self.b = join(self.service, "a"), join(self.service, "b")

    def frame(self, joined: JoinReply, kind: FrameKind = FrameKind.UPDATE) -> Frame:
        return update(self.service, joined, 3.0, kind=kind).frame

    def beat(self) -> object:
        beat = Heartbeat(island="a", incarnation=self.a.incarnation, step=0)
        return self.office.ask(HeartbeatCall(beat))


def _raise(exc: Exception) -> None:
    raise exc


@contextmanager
def beside(act: Callable[[], object], disk: SlowDisk) -> Iterator[Future[object]]:
    """Do something until it waits for the disk, and let it end afterwards."""
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(act)
        try:
            assert disk.is_writing.wait(WAIT_S)
            yield done
        finally:
            disk.may_end.set()


def bring(desk: Desk) -> object:
    """A departing update comes."""
    return desk.office.take(desk.frame(desk.b, kind=FrameKind.DEPARTING))


def say(desk: Desk) -> object:
    """An island says of an update that stands that it departs with it."""
    frame = desk.frame(desk.b)
    assert desk.office.take(frame) is Reception.STAGED
    header = desk.frame(desk.b, kind=FrameKind.DEPARTING).header
    return desk.office.offer(header, None)


def come_back(desk: Desk) -> object:
    """A new life of an island joins; the update of its earlier one stands."""
    assert desk.office.take(desk.frame(desk.b)) is Reception.STAGED
    request = JoinRequest(model=MODEL, island="b", after=desk.b.incarnation)
    reply = desk.office.ask(JoinCall(request, b"b", b"2"))
    assert isinstance(reply, JoinReply)
    return Reception.STAGED if reply.spoken_for == (0,) else reply


@pytest.mark.parametrize("depart", [bring, say, come_back])
def test_a_heartbeat_does_not_wait_for_who_departs(
    depart: Callable[[Desk], object],
) -> None:
    """However long an update takes to be written, others are answered meanwhile."""
    desk = Desk()
    with beside(lambda: depart(desk), desk.disk) as departed:
        assert isinstance(desk.beat(), Position)
        assert not departed.done()

    assert departed.result() is Reception.STAGED
    # It lasts: its island has gone, and a power cut takes nothing of it.
    desk.disk.inner.crash(is_power_cut=True)
    again = Service.open(desk.disk.inner, now_s=1.0)
    assert list(again.journal.recorded.staged) == [(0, 1, "b")]
    _, body = again.journal.staged(0, 1, "b")
    assert body.view("f4").tolist() == [3.0, 3.0, 3.0]


def test_an_update_whose_round_closes_meanwhile_leaves_nothing() -> None:
    """What was written for nothing is removed with the round."""
    desk = Desk()
    service = desk.service
    with beside(lambda: bring(desk), desk.disk) as departed:
        service.handle(update(service, desk.a, 1.0), 0.0)
        service.handle(update(service, desk.b, 3.0), 0.0)
        desk.office.start()
        desk.office.close()  # which finishes the round
        assert service.state.rounds[0].number == 2

    assert departed.result() is Reception.COMMITTED
    assert service.journal.recorded.staged == {}
    service.journal.compact(0)
    assert desk.disk.names("departing/") == []
