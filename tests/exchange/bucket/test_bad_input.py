"""What a run in a store does with what does not belong there."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from atoll import RunSettings
from atoll.errors import CorruptError, UsageError
from atoll.exchange.bucket import BucketReader, StoreExchange, documents, keys
from atoll.exchange.bucket.create import make_run, require_able
from atoll.exchange.bucket.view import BEAT_S
from atoll.island import Host
from atoll.protocol import JoinRequest
from atoll.runtime import SystemClock, SystemRuntime
from atoll.store import MemoryStore, ProbedStore, RetryingStore, Store
from atoll.testing import VectorView, vector_model
from atoll.wire import blake3_digest
from tests.exchange.bucket.lagoon import Lagoon, asynchronous
from tests.store.buckets import Settings, rclone, s3_store

MODEL = vector_model({"h.0.w": (300,), "h.1.w": (200,)})
URL = "s3://atoll/run"


def settings(islands: int = 2, **more: object) -> RunSettings:
    return RunSettings.from_dict(
        {
            "run": {"name": "reef", "start_islands": islands, "end_rounds": 4},
            "sync": {"sync_every": 3, "num_fragments": 2},
            **more,
        }
    )


@dataclass
class Islands:
    """Islands in threads that meet in a store."""

    store: Store
    digests: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    failures: list[Exception] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, name: str) -> None:
        thread = threading.Thread(target=self._live, args=(name,))
        self._threads.append(thread)
        thread.start()

    def end(self) -> dict[str, tuple[bytes, ...]]:
        """Return the digests that each ended with; the first failure is raised."""
        for thread in self._threads:
            thread.join(timeout=100)
        for failure in self.failures:
            raise failure
        return self.digests

    def _live(self, name: str) -> None:
        runtime = SystemRuntime(SystemClock())
        try:
            reader = BucketReader.open(self.store, runtime, url=URL)
            exchange = StoreExchange(reader, key=name.encode(), nonce=name.encode())
            self.digests[name] = _train(exchange, name)
        except Exception as exc:  # told by who waits for this thread
            self.failures.append(exc)
        finally:
            runtime.close()


def _train(exchange: StoreExchange, name: str) -> tuple[bytes, ...]:
    view, rng = VectorView(fill=0.5), np.random.default_rng(ord(name[0]))
    request = JoinRequest(model=MODEL, island=name)
    host = Host(exchange, view, request)
    while not host.has_ended:
        for local in view.local:
            local -= rng.standard_normal(local.size, np.float32)
        host.stepped()
    host.leave()
    return tuple(slot.read_digest() for slot in host.slots)


def trained(store: Store, *names: str) -> dict[str, tuple[bytes, ...]]:
    islands = Islands(store)
    for name in names:
        islands.start(name)
    return islands.end()


def opened(store: Store) -> BucketReader:
    return BucketReader.open(store, SystemRuntime(), url=URL)


def edited(store: Store, key: str, **changes: object) -> None:
    """Change a document and its digest, as somebody who knows the format would."""
    said = json.loads(bytes(store.get(key)))
    said["document"] |= changes
    del said["digest"]
    rest = b'",' + json.dumps(said, separators=(",", ":")).encode()[1:]
    digest = blake3_digest(rest).hex().encode()
    store.put(key, [b'{"digest":"' + digest + rest])


def test_a_url_without_a_run_names_the_command() -> None:
    """Nobody makes a run by joining."""
    store = MemoryStore()
    with pytest.raises(UsageError, match=f"Make one first: `atoll init {URL} RUN"):
        opened(store)

    assert store.items("") == []


def test_settings_edited_by_hand_are_refused() -> None:
    """By their fingerprint: the old ones, or a command, are the way out."""
    store = MemoryStore()
    make_run(store, settings(), url=URL)
    said = json.loads(bytes(store.get(keys.SETTINGS)))["document"]["settings"]
    text = json.dumps(said).replace('"sync_every": 3', '"sync_every": 5')
    assert text != json.dumps(said)
    edited(store, keys.SETTINGS, settings=json.loads(text))

    with pytest.raises(CorruptError, match="a user has edited them"):
        opened(store)


def test_a_document_changed_with_an_editor_is_refused() -> None:
    """Its digest is that of the bytes that were put; nobody has to remove it."""
    store = MemoryStore()
    make_run(store, settings(), url=URL)
    said = json.loads(bytes(store.get(keys.SETTINGS)))
    store.put(keys.SETTINGS, [json.dumps(said).encode()])

    with pytest.raises(
        CorruptError, match=r"settings/0 cannot be read: it does not begin with its dig"
    ):
        opened(store)


def test_settings_exchanged_after_the_founding_are_refused() -> None:
    """Whole and well-formed, they are not those that the run was founded with."""
    store, other = MemoryStore(), MemoryStore()
    run = make_run(store, settings(), url=URL)
    trained(store, "a", "b")
    theirs = settings(sync={"sync_every": 5, "num_fragments": 2})
    make_run(other, theirs, url=URL)
    store.put(keys.SETTINGS, [other.get(keys.SETTINGS)])
    edited(store, keys.SETTINGS, run=run.run)

    with pytest.raises(CorruptError, match=r"the run was founded with .* has edited"):
        opened(store)


def test_settings_that_are_none_are_refused_by_key() -> None:
    """What to do is in the message."""
    store = MemoryStore()
    store.put(keys.SETTINGS, [b"\x00\x01 not ours"])

    with pytest.raises(
        CorruptError, match=r"settings/0 cannot be read: .* do not remove"
    ):
        opened(store)


def test_objects_of_another_run_are_refused() -> None:
    """Two runs cannot share a URL, and both are named."""
    store, other = MemoryStore(), MemoryStore()
    ours = make_run(store, settings(), url=URL).run
    theirs = make_run(other, settings(), url=URL).run
    trained(other, "a", "b")
    store.put(keys.RUN, [other.get(keys.RUN)])

    with pytest.raises(
        CorruptError, match=rf"run.json belongs to run '{theirs}', and this is '{ours}'"
    ):
        opened(store)


def put_strange_objects(store: Store) -> None:
    """Put what belongs nowhere, where islands look."""
    other = MemoryStore()
    make_run(other, settings(), url=URL)
    trained(other, "a", "b")
    frame = bytes(other.get(other.items("rounds/0/4/up/")[0].key))
    member = bytes(other.get(other.items(keys.MEMBERS)[0].key))
    for key, data in {
        "members/zz-0123456789ab.1": b"not a document",
        "members/zz-0123456789ab.7": member,
        "members/readme": b"hello",
        "rounds/0/1/up/zz-0123456789ab.1": b"ATOL, but not really a frame",
        "rounds/0/2/up/zz-0123456789ab.1": frame,
        "rounds/0/3/up/zz-0123456789ab.2": frame[: len(frame) // 2],
        "rounds/1/1/up/readme.txt": b"hello",
        "rounds/1/2/up/zz-0123456789ab.3": b"",
        "backup/notes.txt": b"somebody's own",
    }.items():
        store.put(key, [data])


def test_what_does_not_belong_there_is_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Beside members and updates: told by its key, and the rounds go on without it."""
    store = MemoryStore()
    make_run(store, settings(), url=URL)
    put_strange_objects(store)
    with caplog.at_level(logging.WARNING, logger="atoll"):
        found = trained(store, "a", "b")

    assert found["a"] == found["b"]
    told = " ".join(each.getMessage() for each in caplog.records)
    assert "members/zz-0123456789ab.7 is ignored: " in told
    assert "it is the object of 'members/a-" in told
    assert "rounds/0/1/up/zz-0123456789ab.1 is ignored: " in told
    assert "rounds/0/2/up/zz-0123456789ab.1 holds the update frame of island" in told
    assert bytes(store.get("backup/notes.txt")) == b"somebody's own"


@pytest.mark.parametrize("step_s", [0, -0.5, None])
def test_a_document_with_an_impossible_pace_is_ignored(
    step_s: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The island's update still counts, and the lease that it had goes on."""
    dynamic = asynchronous().with_values({"sync.dynamic_local_updates": True})
    lagoon = Lagoon("a", "b", settings=dynamic)
    lagoon.publish("b", 1.0, round=1)
    key = next(
        item.key for item in lagoon.store.items(keys.MEMBERS) if "/b-" in item.key
    )
    beat = json.loads(bytes(lagoon.store.get(key)))["document"]["beat"]
    edited(lagoon.store, key, beat=beat | {"step_s": step_s}, beats=99)
    with caplog.at_level(logging.WARNING, logger="atoll"):
        lagoon.time.sleep(BEAT_S)
    lagoon.publish("a", 3.0, round=1)

    assert f"{key} is ignored: " in caplog.text
    assert f"step_s={step_s} must be a finite number above 0.0" in caplog.text
    assert lagoon.ages("a", 1) == {"a": 0, "b": 0}


def test_a_foreign_roster_stops_the_run_by_its_key() -> None:
    """Nobody can say how that round went: its key is named, and what to do."""
    store = MemoryStore()
    make_run(store, settings(), url=URL)
    store.put(keys.roster(0, 2), [b"somebody's notes"])

    with pytest.raises(CorruptError, match=r"rounds/0/2/roster cannot be read"):
        trained(store, "a", "b")


@pytest.mark.parametrize("data", [b"somebody's notes", b""])
def test_something_else_at_an_islands_own_key_is_named(data: bytes) -> None:
    """The island cannot publish there, and says what to remove."""
    store = MemoryStore()
    make_run(store, settings(1), url=URL)
    store.put(keys.update(0, 2, "a", 1), [data])

    with pytest.raises(
        CorruptError, match=r"up/a-\w+\.1 holds no update.* Remove that"
    ):
        trained(store, "a")


def test_a_foreign_mean_is_made_again() -> None:
    """The right bytes follow from the updates, whoever makes them."""
    store = MemoryStore()
    make_run(store, settings(4), url=URL)
    store.put(keys.mean(0, 2, 0), [b"somebody's notes"])
    found = trained(store, "a", "b", "c", "d")

    assert len(set(found.values())) == 1
    assert bytes(store.get(keys.mean(0, 2, 0))) == b"somebody's notes"


def test_a_store_that_puts_over_needs_a_decider(weak: Settings) -> None:
    """Without one nothing is made there; the remedy is in the message."""
    store = ProbedStore(s3_store(weak))
    with pytest.raises(UsageError, match=r"--set store.decider=NAME"):
        make_run(store, settings(), url=URL)

    assert store.items("") == []
    assert not store.traits.has_put_new
    require_able(store, settings(store={"decider": "a"}), url=URL)


def test_with_a_decider_a_run_meets_where_objects_are_replaced(
    weak: Settings,
) -> None:
    """Its rosters are the decider's, and all hold the same weights."""
    store = ProbedStore(RetryingStore(s3_store(weak)))
    make_run(store, settings(store={"decider": "b"}), url=URL)
    islands = Islands(store)
    islands.start("b")
    runtime = SystemRuntime()
    while not any(item.key == keys.RUN for item in store.items("")):
        runtime.sleep(0.1)
    islands.start("a")
    found = islands.end()

    assert found["a"] == found["b"]
    assert documents.fetch(store, documents.ROSTER, keys.roster(0, 4)).round == 4


def test_nobody_but_the_decider_founds() -> None:
    """While it is away the run waits: another does not even found it."""
    store, runtime = MemoryStore(), SystemRuntime()
    make_run(store, settings(1, store={"decider": "b"}), url=URL)
    islands = Islands(store)
    islands.start("a")
    while not store.items(keys.MEMBERS):
        runtime.sleep(0.01)
    assert store.items("founding/") == []
    islands.start("b")
    found = islands.end()

    assert found["a"] == found["b"]
    founded = documents.fetch(store, documents.RUN, keys.RUN)
    assert founded.founding == b"b".hex()


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A bucket of rclone, which puts over what is there."""
    home: Path = tmp_path_factory.mktemp("weak") / "home"
    with rclone(home) as where:
        yield where
