"""The way from an island to a run in an object store."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from atoll.clock import Clock
from atoll.errors import UsageError
from atoll.exchange.bucket import Lookout, StoreExchange, ThreadTiming
from atoll.exchange.bucket.making import require_able
from atoll.exchange.bucket.sight import BEAT_S, LEASE_S
from atoll.island.environment import Surroundings
from atoll.island.keys import island_key
from atoll.store import Counted, Patient, Probed, Ranged, open_store

LEAVE_S = 20.0
"""How long an island that leaves waits for a store that does not answer."""

log = logging.getLogger("atoll")


class Reliable(Ranged):
    """A store that is asked again when it fails, with requests that are counted."""

    def __init__(self, url: str, timing: ThreadTiming) -> None:
        self.counted = Counted(open_store(url))
        super().__init__(Probed(Patient(self.counted, pause=timing.pause)))

    def costs(self) -> dict[str, float]:
        """Return what it was asked, under the names that loggers see."""
        requests = self.counted.requests
        return {
            "atoll/store_requests": requests.total,
            "atoll/store_bytes_up": requests.bytes_up,
            "atoll/store_bytes_down": requests.bytes_down,
            "atoll/store_usd": requests.usd,
        }


@dataclass(frozen=True)
class Meeting:
    """An exchange over a store, and the time and threads that it uses."""

    exchange: StoreExchange
    store: Reliable
    _timing: ThreadTiming

    @property
    def costs(self) -> Callable[[], dict[str, float]]:
        return self.store.costs

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Bound the time of a farewell, and end the background after it."""
        self._timing.close_after(LEAVE_S)
        try:
            yield
        finally:
            self._timing.close()
            self.store.close()


def meet(
    url: str, *, island: str | None, surroundings: Surroundings, clock: Clock
) -> Meeting:
    """Return the way to a run in a store, which has said what it is.

    Raises:
        UsageError: there is no run, or the store cannot keep one; the way out is named.
        StoreDenied: a permission is missing.
        Unreachable: the store does not answer.
    """
    timing = ThreadTiming(clock)
    store = Reliable(url, timing)
    try:
        lookout = Lookout.open(store, timing, url=url)
        settings = lookout.sight.settings
        require_able(lookout.store, settings, url=url)
    except BaseException:
        timing.close()
        store.close()
        raise
    beat_s = _beat_s(surroundings.heartbeat_s)
    log.info(
        "adopted the settings of run %s: fingerprint %s, epoch %d, heartbeat %g s",
        lookout.run,
        settings.fingerprint[:12],
        lookout.sight.state.epoch,
        beat_s,
    )
    key = secrets.token_bytes(32)
    if island is not None:
        key = island_key(surroundings.keys, run=lookout.run, island=island)
    nonce = secrets.token_bytes(16)
    exchange = StoreExchange(lookout, key=key, nonce=nonce, beat_s=beat_s)
    return Meeting(exchange, store, timing)


def _beat_s(given_s: float | None) -> float:
    if given_s is None:
        return BEAT_S
    if not 0.0 < given_s <= LEASE_S / 2:
        raise UsageError(
            f"ATOLL_HEARTBEAT_S={given_s:g} does not keep a lease of {LEASE_S:g} s: "
            f"two heartbeats must fit. Give at most {LEASE_S / 2:g}, or leave it out."
        )
    return given_s
