"""The way of islands to a run in a bucket: the real exchange over a simulated store."""

from __future__ import annotations

import random

from atoll.errors import Unreachable
from atoll.exchange import Exchange
from atoll.exchange.bucket import Lookout, StoreExchange, documents, keys
from atoll.exchange.bucket.documents import SettingsDocument, packed
from atoll.exchange.bucket.pauses import TRIES
from atoll.settings import RunSettings
from atoll.simulate.invariants.bucket import BucketReferee
from atoll.simulate.invariants.bucket_ports import WatchedExchange, WatchedStore
from atoll.simulate.invariants.watch import Ports
from atoll.simulate.process import Process
from atoll.simulate.store import Bucket, SimStore
from atoll.simulate.timing import GreenletTiming
from atoll.simulate.world import World
from atoll.store import Patient

STATE_ROUNDS = 3
"""States come often, so that much is collected even in a short run."""


class BucketWay:
    """Attaches islands to a bucket. Implements `Way`."""

    def __init__(self, world: World, bucket: Bucket, settings: RunSettings) -> None:
        self._world, self._bucket, self._settings = world, bucket, settings
        self.referee: BucketReferee

    def open(self) -> None:
        """Make the run, as `atoll init` does, under a name that does not vary."""
        said = SettingsDocument(
            run="run", fingerprint=self._settings.fingerprint, settings=self._settings
        )
        settings = packed(documents.SETTINGS, said, keys.SETTINGS)
        self._bucket.objects[keys.SETTINGS] = b"".join(settings)
        self._bucket.changed_s[keys.SETTINGS] = 0.0
        self._bucket.begin()

    def exchange(self, process: Process, number: int, ports: Ports) -> Exchange:
        timing = GreenletTiming(self._world, process)
        store = SimStore(self._world, process)
        rng = random.Random(f"{self._world.scheduler.seed} {process.name} {number}")
        patient = Patient(store, pause=timing.pause, tries=TRIES, rng=rng)
        watched = WatchedStore(patient, self.referee, process, self._bucket.troubles)
        lookout = self._lookout(watched, timing)
        watched.lookout = lookout
        store.is_locked = lookout.lock._is_owned  # type: ignore[attr-defined]
        exchange = StoreExchange(
            lookout,
            key=process.name.encode(),
            nonce=f"{process.name}.{number}".encode(),
            state_rounds=STATE_ROUNDS,
        )
        ports.life.kept = lambda: len(exchange._outcomes.own)
        return WatchedExchange(exchange, timing, ports)

    def _lookout(self, store: WatchedStore, timing: GreenletTiming) -> Lookout:
        """Open the run; who starts an island starts it again if no store answers."""
        while True:
            try:
                return Lookout.open(store, timing, url="the simulated store")
            except Unreachable:
                timing.pause(1.0)
