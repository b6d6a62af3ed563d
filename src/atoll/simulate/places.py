"""Where islands meet in virtual time: at a coordinator, or in a bucket."""

from __future__ import annotations

from typing import Protocol

from atoll.exchange import CoordinatorExchange, Exchange
from atoll.exchange.bucket.sight import LEASE_S as BUCKET_LEASE_S
from atoll.protocol.membership import LEASE_S
from atoll.settings import RunSettings
from atoll.simulate.bucket_way import BucketWay
from atoll.simulate.hosts import CoordinatorHost, Wire
from atoll.simulate.invariants import Watch
from atoll.simulate.invariants.bucket import BucketReferee
from atoll.simulate.invariants.coordinator import CoordinatorReferee
from atoll.simulate.invariants.life import WatchedLine
from atoll.simulate.invariants.liveness import longest_silence_s, longest_wait_s
from atoll.simulate.invariants.referee import Referee
from atoll.simulate.invariants.watch import Ports
from atoll.simulate.lives import Conditions, Way
from atoll.simulate.process import Process
from atoll.simulate.store import Bucket
from atoll.simulate.world import World
from atoll.weights import lay_out


class Place(Protocol):
    """Where rounds are decided, and how islands get there."""

    @property
    def way(self) -> Way: ...

    lease_s: float

    def silence_s(self, *, step_s: float) -> float:
        """Return how long a connected quorum may go without a commit."""
        ...

    def referee(self, watch: Watch) -> Referee: ...

    def open(self) -> None:
        """Let it begin, before the first island does."""
        ...


class AtCoordinator:
    """A coordinator decides. Implements `Place` and `Way`."""

    lease_s = LEASE_S

    def __init__(self, world: World, settings: RunSettings) -> None:
        self._world, self._settings = world, settings
        self._coordinator = CoordinatorHost(world, settings)
        self.open = self._coordinator.start

    @property
    def way(self) -> Way:
        return self

    def silence_s(self, *, step_s: float) -> float:
        return longest_silence_s(self._settings, step_s=step_s)

    def referee(self, watch: Watch) -> Referee:
        return CoordinatorReferee(self._world, self._coordinator, watch)

    def exchange(self, process: Process, number: int, ports: Ports) -> Exchange:
        line = WatchedLine(Wire(self._world, process), ports.life, ports.learn)
        exchange = CoordinatorExchange(
            line, key=process.name.encode(), nonce=str(number).encode()
        )
        ports.life.kept = lambda: len(exchange._unconfirmed)
        return exchange


class InBucket:
    """Rosters in a store decide. Implements `Place`."""

    lease_s = BUCKET_LEASE_S

    def __init__(
        self,
        world: World,
        settings: RunSettings,
        conditions: Conditions,
        *,
        islands: int,
    ) -> None:
        self._world, self._settings, self._islands = world, settings, islands
        self._layout = lay_out(conditions.model, settings)
        self._bucket = Bucket(world)
        self._way = BucketWay(world, self._bucket, settings)
        self.open = self._way.open

    @property
    def way(self) -> Way:
        return self._way

    def silence_s(self, *, step_s: float) -> float:
        return longest_wait_s(self._settings, step_s=step_s, islands=self._islands)

    def referee(self, watch: Watch) -> Referee:
        referee = BucketReferee(
            self._world, self._bucket, self._settings, self._layout, watch
        )
        self._way.referee = referee
        return referee
