"""What one life of an island in a bucket is given: ports that tell what they see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from atoll.exchange import Exchange, Frame, Outcome
from atoll.exchange.bucket import Lookout, documents
from atoll.exchange.bucket.documents import parse
from atoll.protocol import Reception
from atoll.simulate.invariants.bucket import ROSTER, BucketReferee
from atoll.simulate.invariants.watch import Ports
from atoll.simulate.process import Process
from atoll.simulate.timing import GreenletTiming
from atoll.simulate.world import Troubles
from atoll.store import Data, Item, Store, Traits


class WatchedStore:
    """A store that tells which rosters go to it, maybe late. Implements `Store`."""

    def __init__(
        self,
        inner: Store,
        referee: BucketReferee,
        process: Process,
        troubles: Troubles,
    ) -> None:
        self._inner, self._referee, self._process = inner, referee, process
        self._troubles = troubles
        self.lookout: Lookout | None = None

    @property
    def traits(self) -> Traits:
        return self._inner.traits

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        if ROSTER.fullmatch(key) and self.lookout is not None:
            document = parse(documents.ROSTER, b"".join(parts), key=key)
            self._referee.closers.decided(self._process, document, self.lookout)
            self._linger()
        return self._inner.put_new(key, parts)

    def _linger(self) -> None:
        """Let time pass between a decision and its roster, while a plan says so."""
        if self._troubles.roster_lags:
            self._process.scheduler.sleep(max(self._troubles.roster_lags))

    def put(self, key: str, parts: Sequence[Data]) -> None:
        self._inner.put(key, parts)

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        return self._inner.get(key, first, size)

    def items(self, prefix: str) -> list[Item]:
        return self._inner.items(prefix)

    def remove(self, keys: Iterable[str]) -> None:
        self._inner.remove(keys)


class WatchedExchange:
    """An exchange that tells what an island says and learns. Implements `Exchange`."""

    def __init__(self, inner: Exchange, timing: GreenletTiming, ports: Ports) -> None:
        self._inner, self._timing = inner, timing
        self._life, self._learn = ports.life, ports.learn
        self.join = inner.join
        self.heartbeat = inner.heartbeat

    def publish(self, frame: Frame) -> Reception:
        if not frame.header.kind.is_update:
            return self._inner.publish(frame)
        self._life.published(frame)
        reception = self._inner.publish(frame)
        self._life.acknowledged(frame, reception)
        return reception

    def outcome(self, fragment: int, round: int, *, wait_s: float) -> Outcome | None:
        outcome = self._inner.outcome(fragment, round, wait_s=wait_s)
        if outcome is not None:
            self._learn(outcome)
        return outcome

    def state(self, fragment: int) -> Frame:
        frame = self._inner.state(fragment)
        self._learn(frame)
        return frame

    def leave(self, island: str, incarnation: int) -> None:
        try:
            self._inner.leave(island, incarnation)
        finally:
            self._timing.is_over = True
