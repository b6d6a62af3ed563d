"""Islands of one asynchronous run in a bucket, in one thread."""

from __future__ import annotations

from atoll import RunSettings
from atoll.exchange import Frame
from atoll.exchange.bucket import BucketReader, StoreExchange, keys
from atoll.exchange.bucket.view import BEAT_S
from atoll.protocol import Heartbeat, HeldRound, JoinReply
from atoll.store import MemoryStore, Store
from atoll.testing.fixtures import StoreRun, enter, roster_of, update_of

GRACE_S = 2.0


def asynchronous(
    *, islands: int = 2, quorum: int = 1, staleness: str = "none", buffer: int = 2
) -> RunSettings:
    """Return the settings of plain averaging with asynchronous rounds."""
    return RunSettings.from_dict(
        {
            "run": {"start_islands": islands, "quorum": quorum},
            "sync": {"mode": "async"},
            "async": {"grace_s": GRACE_S, "buffer": buffer, "staleness": staleness},
            "wire": {"up": "fp32", "down": "fp32"},
            "outer": {"optimizer": "sgd", "lr": 1.0},
        }
    )


class Lagoon:
    """Islands of one asynchronous run in a bucket, in one thread."""

    def __init__(
        self,
        *names: str,
        settings: RunSettings | None = None,
        store: Store | None = None,
    ) -> None:
        self.store = store or MemoryStore()
        self.run = StoreRun(self.store, settings or asynchronous(islands=len(names)))
        self.time = self.run.time
        self.exchanges: dict[str, StoreExchange] = {}
        self.joined: dict[str, JoinReply] = {}
        for name in names:
            self.enter(name)
        self.time.sleep(BEAT_S)  # each reads the documents of the others

    def enter(self, name: str, *, store: Store | None = None) -> StoreExchange:
        """Let an island join, or join again."""
        self.run.store = store or self.store
        number = len(self.exchanges).to_bytes(16, "little")
        reader = BucketReader.open(self.run.store, self.time, url="a test's store")
        exchange = StoreExchange(reader, key=name.encode(), nonce=number)
        self.joined[name] = enter(exchange, name)
        self.exchanges[name] = exchange
        return exchange

    def frame(self, name: str, value: float, *, round: int, **fields: object) -> Frame:
        return update_of(
            self.exchanges[name], self.joined[name], value, round=round, **fields
        )

    def publish(
        self, name: str, value: float, *, round: int, **fields: object
    ) -> Frame:
        """Publish an update, based on the run's present state."""
        frame = self.frame(name, value, round=round, **fields)
        self.exchanges[name].publish(frame)
        return frame

    def close(self, name: str, round: int) -> dict[str, int]:
        """Let the grace pass, and an island close a round; return its ages."""
        self.time.sleep(GRACE_S)
        self.hold(name)
        return self.ages(name, round)

    def hold(self, name: str) -> None:
        """Let an island take all outcomes, as it does while its update stands."""
        exchange, joined = self.exchanges[name], self.joined[name]
        header = exchange.state(0).header
        exchange.heartbeat(
            Heartbeat(
                island=name,
                incarnation=joined.incarnation,
                step=1,
                holds=(HeldRound(header.round, header.base),),
            )
        )

    def ages(self, name: str, round: int) -> dict[str, int]:
        entries = roster_of(self.exchanges[name], round).entries
        return {entry.island: entry.age for entry in entries}

    def arrivals(self) -> list[str]:
        return [item.key for item in self.store.items(keys.ARRIVALS)]
