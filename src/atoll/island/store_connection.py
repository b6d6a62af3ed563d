"""The connection of an island to a run in an object store."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from atoll import store
from atoll.errors import UsageError
from atoll.exchange.bucket import BucketReader, StoreExchange
from atoll.exchange.bucket.create import require_able, require_there
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.states import States
from atoll.exchange.bucket.view import BEAT_S, LEASE_S
from atoll.island.environment import CredentialPaths
from atoll.island.identity import connection_key
from atoll.island.progress import LinkMeter
from atoll.retry import LEAVE_S, STORE_OUTAGE
from atoll.runtime import Clock, SystemRuntime

log = logging.getLogger("atoll")


class RetriedStore:
    """A store whose failed requests are retried, and whose requests are counted."""

    def __init__(self, url: str, runtime: SystemRuntime) -> None:
        self._meter = LinkMeter(runtime)
        self.counted = store.CountedStore(store.open_store(url), meter=self._meter)
        self._patient = store.RetryingStore(self.counted, sleep=runtime.sleep)
        self.store = store.RangedStore(store.ProbedStore(self._patient))

    def use_long_retries(self) -> None:
        """Retry for minutes from now on: an outage must not end an island."""
        self._patient.policy = STORE_OUTAGE

    def costs(self) -> dict[str, float]:
        """Return requests, bytes and the link, under the names that loggers see."""
        requests = self.counted.requests
        return {
            **self._meter.metrics(),
            "atoll/store_requests": requests.total,
            "atoll/store_bytes_up": requests.bytes_up,
            "atoll/store_bytes_down": requests.bytes_down,
            "atoll/store_usd": requests.usd,
        }

    def close(self) -> None:
        """Finish the requests in progress, and end the threads."""
        self.store.close()


@dataclass(frozen=True)
class StoreConnection:
    """An exchange over a store, and the time and threads that it uses."""

    exchange: StoreExchange
    reliable: RetriedStore
    _runtime: SystemRuntime

    @property
    def costs(self) -> Callable[[], dict[str, float]]:
        return self.reliable.costs

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Bound the time that leaving takes, and end the threads after it."""
        self._runtime.close_after(LEAVE_S)
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """End the threads. Safe to repeat."""
        self._runtime.close()
        self.reliable.close()


def connect_store(
    url: str,
    *,
    island: str | None,
    paths: CredentialPaths,
    clock: Clock,
    key: bytes | None = None,
    nonce: bytes | None = None,
) -> StoreConnection:
    """Return a connection to a run in a store, with the settings of the run.

    `key` and `nonce` are those of an incarnation that has begun at another address.

    Raises:
        UsageError: there is no run, or the store cannot keep one; with a remedy.
        StoreDenied: a permission is missing.
        Unreachable: the store does not answer.
    """
    require_there(url)
    runtime = SystemRuntime(clock)
    reliable = RetriedStore(url, runtime)
    try:
        reader = BucketReader.open(reliable.store, runtime, url=url)
        settings = reader.view.settings
        require_able(reader.store, settings, url=url)
        beat_s = _beat_s(paths.heartbeat_s)
    except BaseException:
        runtime.close()
        reliable.close()
        raise
    log.info(
        "adopted the settings of run %s: fingerprint %s, epoch %d, heartbeat %g s",
        reader.run,
        settings.fingerprint[:12],
        reader.view.state.epoch,
        beat_s,
    )
    if key is None:
        key = connection_key(island, run=reader.run, paths=paths)
    nonce = nonce or secrets.token_bytes(16)
    reliable.use_long_retries()
    exchange = StoreExchange(
        reader, key=key, nonce=nonce, beat_s=beat_s, unix_s=time.time
    )
    return StoreConnection(exchange, reliable, runtime)


@contextmanager
def open_read_only(url: str, *, clock: Clock) -> Iterator[tuple[BucketReader, States]]:
    """Open a run in a store and its states for reading, without joining the run.

    Raises what `connect_store` does.
    """
    require_there(url)
    runtime = SystemRuntime(clock)
    reliable = RetriedStore(url, runtime)
    try:
        reader = BucketReader.open(reliable.store, runtime, url=url)
        states = States(reader, Outcomes(reader, None))
        if reader.read_founding():
            for fragment in range(len(reader.view.layout)):
                states.begin(fragment)
        yield reader, states
    finally:
        runtime.close()
        reliable.close()


def _beat_s(given_s: float | None) -> float:
    if given_s is None:
        return BEAT_S
    if not 0.0 < given_s <= LEASE_S / 2:
        raise UsageError(
            f"ATOLL_HEARTBEAT_S={given_s:g} does not keep a lease of {LEASE_S:g} s: "
            f"two heartbeats must fit. Give at most {LEASE_S / 2:g}, or unset it."
        )
    return given_s
