"""A run in a store tells its past from its islands' pasts and its rosters."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.errors import StoreDenied, UsageError
from atoll.exchange.bucket import keys
from atoll.exchange.bucket.documents import MemberDocument, fetch
from atoll.exchange.bucket.own_past import (
    EVERY_ROUNDS,
    MAX_COMMITS,
    MAX_ROWS,
    OWN_PAST,
    OwnPastWriter,
)
from atoll.island import join_run
from atoll.protocol import Heartbeat, Stats
from atoll.run_client import open_run
from atoll.run_client.store import StoreRunClient
from atoll.store import CountedStore, MemoryStore
from atoll.testing import VectorView
from tests.cli import stores
from tests.run_client.conftest import END_ROUNDS

ISLANDS = ("a", "b", "c")


def train(url: str, name: str) -> None:
    """Train an island to the end, with a loss that falls by a tenth a step."""
    host = join_run(url, VectorView(), stores.MODEL, island=name)
    host.counters.note_anchor(1, 1.25, {})
    while not host.has_ended:
        loss = 10.0 - host.counters.inner_steps / 10
        host.counters.note_report(7, loss, {}, count="a number")
        host.count_tokens(7)
        host.stepped()
    host.leave()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, user: None) -> Path:
    """Return the directory of a run that three islands have trained to its end."""
    directory = tmp_path_factory.mktemp("bucket") / "run"
    url = stores.made(directory, end_rounds=END_ROUNDS, max_islands=3)
    threads = [threading.Thread(target=train, args=(url, name)) for name in ISLANDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return directory


def test_a_bucket_tells_what_its_islands_did(ended: Path) -> None:
    """Progress, marks, rounds and joins, after all islands have left."""
    with closing(open_run(str(ended))) as client:
        document = client.status().document
        history = client.history(columns="loss,tokens,inner_steps")
        events = client.events()
        again = client.history(after=history["cursor"])

    rows = {row["island"]: row for row in document["islands"]}
    curves = history["curves"]["islands"]
    for name in ISLANDS:
        assert rows[name]["tokens"] == 7 * rows[name]["inner_steps"] > 0
        assert curves[name]["tokens"][-1] == rows[name]["tokens"]
        assert curves[name]["inner_steps"][-1] == rows[name]["inner_steps"]
        assert rows[name]["as_of_unix_s"] is not None
    names = [event.name for event in events]
    assert names.count("island_joined") == names.count("island_left") == 3
    assert names.count("round_committed") == END_ROUNDS * 2
    assert len(history["rounds"]) == END_ROUNDS * 2
    counted = sum(row["marks"].count("#") for row in history["rounds"])
    assert counted == sum(row["counted"] for row in history["rounds"]) > 0
    assert history["curves"]["anchor"] == {"eval_loss": [[1, 1.25]]}
    assert document["recent"][-1]["round"] == END_ROUNDS
    assert not again["is_whole"]
    assert again["notes"] == again["rounds"] == []


def test_every_client_tells_the_same(ended: Path) -> None:
    """Another process that looks later makes the same past of the same objects."""
    stories = []
    for _ in range(2):
        with closing(open_run(str(ended))) as client:
            stories.append((client.history(), [e.as_dict() for e in client.events()]))

    assert stories[0] == stories[1]


def test_pages_of_a_bucket_are_all_its_events(ended: Path) -> None:
    """By 5 from the end to the beginning, each event once; or only those of a kind."""
    with closing(open_run(str(ended))) as client:
        page = client.older_events(limit=5)
        pages = [page.events]
        while page.before is not None:
            page = client.older_events(page.before, limit=5)
            pages.insert(0, page.events)
        joins = client.older_events(kind="island_joined", island="b").events

        assert [event for events in pages for event in events] == client.events()
        assert [event.fields["island"] for event in joins] == ["b"]
        with pytest.raises(UsageError, match="before='x:1' is no cursor"):
            client.older_events("x:1")


def test_a_damaged_past_is_left_out(ended: Path) -> None:
    """One object is torn and one is gone: the third island has its curves still."""
    pasts = sorted((ended / "past").iterdir())
    kept = {path: path.read_bytes() for path in pasts[:2]}
    try:
        pasts[0].write_bytes(kept[pasts[0]][:100])
        pasts[1].unlink()
        with closing(StoreRunClient(str(ended))) as client:
            history = client.history()
            status = client.status()
    finally:
        for path, data in kept.items():
            path.write_bytes(data)

    tokens = {
        name: max(x or 0 for x in columns["tokens"])
        for name, columns in history["curves"]["islands"].items()
        if any(columns["tokens"])
    }
    assert len(tokens) == 1
    assert status.round == END_ROUNDS


class DeniedStore(MemoryStore):
    """A store to which this user may not write."""

    def put(self, key: str, parts: object) -> None:
        raise StoreDenied(f"{key} may not be put. Ask for the permission.")


MEMBER = MemberDocument(
    run="lagoon-000000000000",
    slot=2,
    key=b"",
    nonce=b"",
    opened=(),
    stands=(),
    beats=0,
    has_left=False,
    beat=Heartbeat(island="a", incarnation=3, step=0),
)


def stats_at(beat: int) -> Stats:
    """Return large numbers, which grow with each heartbeat; the loss is 2 and 4."""
    return Stats(
        version="0.1.0",
        seconds=6.0 * beat,
        inner_steps=10**12 + beat,
        tokens=10**15 + 1000 * beat,
        loss=2.0 if beat % 2 else 4.0,
        loss_is_finite=True,
        wait_s=beat / 7,
        bytes_up=10**15 + beat,
        bytes_down=10**15 + beat,
    )


def test_an_own_past_is_bounded_and_keeps_its_totals() -> None:
    """After 20,000 heartbeats and 2,000 rounds it has 64 kB at most."""
    store, now = CountedStore(MemoryStore()), [1_700_000_000.0]
    writer = OwnPastWriter(store, lambda: now[0])
    for beat in range(20_000):
        now[0] += 6.0
        number = beat // 10 + 1
        writer.note(MEMBER, stats_at(beat), [number] * 8)
    left = replace(MEMBER, has_left=True)
    writer.note(left, stats_at(20_000), [2001] * 8)
    key = keys.past("a", 3)
    past = fetch(store, OWN_PAST, key, run=MEMBER.run)

    assert len(bytes(store.get(key))) <= 64 * 1024
    assert len(past.rows) <= MAX_ROWS
    assert len(past.commits) <= MAX_COMMITS
    assert past.rows[-1].tokens == 10**15 + 1000 * 20_000
    assert past.has_left
    assert sum(row.losses for row in past.rows) == 20_001
    assert all(row.loss == 3.0 for row in past.rows[:-1] if row.losses > 1)
    # One put for every ten rounds, the first one, and the farewell.
    assert store.requests.puts <= 2000 / EVERY_ROUNDS + 2


def test_a_past_that_cannot_be_put_costs_nothing() -> None:
    """The island continues, and its next past has everything."""
    writer = OwnPastWriter(DeniedStore(), lambda: 1_700_000_000.0)
    writer.note(MEMBER, stats_at(1), [1])
    writer.note(MEMBER, stats_at(2), [2])
