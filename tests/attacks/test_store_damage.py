"""Bytes in a store that change after they were put: noticed, named and mended.

Time is virtual. Every reader of a damaged bucket ends with the bits of the undamaged
run, or with an error or a warning that names the object.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from atoll import RunSettings
from atoll.cli import main
from atoll.errors import AtollError, CorruptError
from atoll.exchange import Frame
from atoll.exchange.bucket import BucketReader, StoreExchange, documents, keys
from atoll.exchange.bucket.create import archive_in
from atoll.exchange.bucket.documents import ControlDocument, RunDocument, packed
from atoll.exchange.bucket.large_objects import ConstantObjects
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.states import BucketHistory, States
from atoll.protocol import Heartbeat, HeldRound, JoinReply, TensorSpec
from atoll.simulate import FaultPlan, simulate
from atoll.simulate.scheduler import TraceEvent
from atoll.store import FileStore, MemoryStore, Store
from atoll.testing.fixtures import (
    MODEL,
    OUTER,
    StoreRun,
    WaitingTime,
    enter,
    plain_settings,
    update_of,
)
from atoll.weights import FragmentState
from atoll.wire import pack, verify_body

URL = "a damaged bucket"
ROUNDS = 5
STATE_ROUND = 2
DAMAGES = ("flip", "cut", "swap", "remove")
KINDS = (
    *("settings/", "run.json", "founding/", "control/", "slots/", "members/"),
    *("roster", "up/", "mean/", "states/"),
)


class Islands:
    """Islands of one run, driven one after the other."""

    def __init__(self, store: Store, islands: int) -> None:
        self.store = store
        self.run = StoreRun(store, plain_settings(start_islands=islands))
        self.time = self.run.time
        self.exchanges: list[StoreExchange] = []
        self.joined: list[JoinReply] = []
        self.states: list[FragmentState] = []
        for number in range(islands):
            self.add(f"i{number}")

    def add(self, name: str) -> None:
        """Let an island join, and take the run's state."""
        reader = BucketReader.open(self.store, self.time, url=URL)
        nonce = f"{name} {len(self.exchanges)}".encode()
        exchange = StoreExchange(reader, key=name.encode(), nonce=nonce)
        self.joined.append(enter(exchange, name))
        self.exchanges.append(exchange)
        self.states.append(state_of(exchange))
        self.beat(len(self.states) - 1)

    def beat(self, number: int) -> None:
        """Say what an island holds, as its host does."""
        joined, state = self.joined[number], self.states[number]
        holds = (HeldRound(state.round, state.digest),)
        beat = Heartbeat(
            island=joined.island, incarnation=joined.incarnation, step=0, holds=holds
        )
        self.exchanges[number].heartbeat(beat)

    def publish(self, number: int, round: int) -> None:
        exchange, joined = self.exchanges[number], self.joined[number]
        base = self.states[number].digest
        update = update_of(exchange, joined, number + 0.5 * round, round=round)
        assert update.header.base == base
        exchange.publish(update)

    def take(self, number: int, round: int) -> bool:
        """Take an outcome as islands do: its mean, or the run's state.

        Return whether the island was asked to write its state.
        """
        exchange, state = self.exchanges[number], self.states[number]
        outcome = StoreExchange.outcome(exchange, 0, round, wait_s=0.0)
        assert outcome is not None, f"round {round} is open"
        if outcome.has_body:
            verify_body(outcome.agreed.header, outcome.agreed.body)
            state.apply(outcome.agreed.header, outcome.agreed.body)
        else:
            self.states[number] = state_of(exchange)
        self.beat(number)
        return outcome.position.lost == (0,)

    def round(self, round: int) -> None:
        for number in range(len(self.exchanges)):
            self.publish(number, round)
        for number in range(len(self.exchanges)):
            self.take(number, round)

    def write_state(self) -> None:
        run = self.joined[0].run
        frame = self.states[0].to_frame(run=run, fragment=0, outer=OUTER)
        self.exchanges[0].publish(Frame(*frame))

    def leave(self) -> None:
        for exchange, joined in zip(self.exchanges, self.joined, strict=True):
            exchange.leave(joined.island, joined.incarnation)

    @property
    def digests(self) -> set[bytes]:
        return {state.digest for state in self.states}


def state_of(exchange: StoreExchange) -> FragmentState:
    frame = exchange.state(0)
    verify_body(frame.header, frame.body)
    return FragmentState.from_frame(frame.header, frame.body)


def exported(store: Store) -> bytes:
    """Return the digest of what `atoll export` reads."""
    reader = BucketReader.open(store, WaitingTime(), url=URL)
    reader.members.read()
    states = States(reader, Outcomes(reader, None))
    states.begin(0)
    return states.read(0).digest


def exported_at(store: Store, round: int) -> bytes:
    """Return the digest of what `atoll export --round` reads."""
    reader = BucketReader.open(store, WaitingTime(), url=URL)
    reader.members.read()
    outcomes = Outcomes(reader, None)
    States(reader, outcomes).begin(0)
    return BucketHistory(reader, outcomes).state(0, round).digest


def joined(store: Store) -> bytes:
    """Return the digest of what an island takes that joins now."""
    reader = BucketReader.open(store, WaitingTime(), url=URL)
    exchange = StoreExchange(reader, key=b"late", nonce=b"late")
    enter(exchange, "late")
    return state_of(exchange).digest


READERS: tuple[Callable[[Store], bytes], ...] = (exported, joined)


def copied(store: Store) -> MemoryStore:
    copy = MemoryStore()
    for item in store.items(""):
        copy.put(item.key, [bytes(store.get(item.key))])
    return copy


def finished(islands: int, *, has_state: bool = True) -> tuple[MemoryStore, bytes]:
    """Return the bucket of a run whose islands have left, and its last digest."""
    store = MemoryStore()
    run = Islands(store, islands)
    said = ControlDocument(run=run.joined[0].run, action="save", values={})
    store.put(keys.control(1), packed(documents.CONTROL, said, keys.control(1)))
    run.time.sleep(7.0)
    for round in range(1, ROUNDS + 1):
        run.round(round)
        if has_state and round == STATE_ROUND:
            run.write_state()
    run.leave()
    (digest,) = run.digests
    return store, digest


def flipped(whole: bytes, bit: int) -> bytes:
    changed = bytearray(whole)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def damage(store: Store, key: str, how: str, rng: random.Random) -> None:
    """Damage the object at a key."""
    whole = bytes(store.get(key))
    kind = re.sub(r"[^/]*[0-9][^/]*", "", key)
    others = [
        data
        for item in store.items("")
        if re.sub(r"[^/]*[0-9][^/]*", "", item.key) == kind
        and (data := bytes(store.get(item.key))) != whole
    ]
    if how == "remove":
        store.remove([key])
    elif how == "swap" and others:
        store.put(key, [rng.choice(others)])
    elif how == "cut":
        store.put(key, [whole[: rng.randrange(len(whole))]])
    else:
        store.put(key, [flipped(whole, rng.randrange(8 * len(whole)))])


def own_key(run: Islands, number: int, round: int) -> str:
    joined = run.joined[number]
    return keys.update(0, round, joined.island, joined.incarnation)


@pytest.mark.parametrize("reader", READERS)
def test_every_bit_of_a_roster_is_guarded(reader: Callable[[Store], bytes]) -> None:
    """A flipped bit of a decision changes nothing for anybody: it is refused by key."""
    whole_store, digest = finished(2, has_state=False)
    assert reader(copied(whole_store)) == digest
    key = keys.roster(0, 3)
    whole = bytes(whole_store.get(key))
    rng = random.Random(3)
    # Every bit is judged by the parser alone, and some of each byte's by the reader.
    for bit in range(8 * len(whole)):
        with pytest.raises(CorruptError, match=key):
            documents.parse(documents.ROSTER, flipped(whole, bit), key=key)
    for bit in sorted(rng.sample(range(8 * len(whole)), 200)):
        store = copied(whole_store)
        store.put(key, [flipped(whole, bit)])
        with pytest.raises(CorruptError, match=f"{key} cannot be read.* do not remove"):
            reader(store)


def test_a_roster_at_another_key_is_refused() -> None:
    """It verifies, and says where it belongs."""
    store, _ = finished(2, has_state=False)
    store.put(keys.roster(0, 4), [bytes(store.get(keys.roster(0, 3)))])

    with pytest.raises(CorruptError, match=r"roster cannot be read: .*'rounds/0/3/ros"):
        exported(store)


def test_a_roster_of_another_history_is_refused() -> None:
    """It verifies and has the right key, but it does not follow the one before it."""
    store, _ = finished(2, has_state=False)
    key = keys.roster(0, 4)
    real = documents.fetch_roster(store, key)
    forged = documents.RosterDocument(
        run=real.run,
        fragment=0,
        round=4,
        epoch=0,
        base=real.base,
        outer=real.outer,
        shards=(),
        roster=real.roster,
        before=b"\0" * 32,
    )
    store.put(key, packed(documents.ROSTER, forged, key))

    with pytest.raises(CorruptError, match=r"roster follows an object with digest 000"):
        exported(store)


@pytest.mark.parametrize("round", [1, 3, ROUNDS])
@pytest.mark.parametrize("reader", READERS)
def test_a_roster_that_is_gone_is_missed(
    reader: Callable[[Store], bytes], round: int
) -> None:
    """Even the last one: who has read it says so in its own document."""
    store, _ = finished(2, has_state=False)
    store.remove([keys.roster(0, round)])

    with pytest.raises(CorruptError, match=f"{keys.roster(0, round)} is gone"):
        reader(store)


@pytest.mark.parametrize("islands", [2, 4])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_committed_update_is_put_again_by_its_owner(
    islands: int, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All take the same bits, and whoever met the damage names its key."""
    calm = Islands(MemoryStore(), islands)
    run = Islands(MemoryStore(), islands)
    for round in (1, 2):
        calm.round(round)
    for number in range(islands):
        run.publish(number, 1)
    key = own_key(run, 1, 1)
    with caplog.at_level(logging.WARNING, logger="atoll"):
        damage(run.store, key, how, random.Random(7))
        for number in (0, *range(2, islands), 1):
            run.take(number, 1)
    run.round(2)

    assert run.digests == calm.digests
    told = " ".join(record.getMessage() for record in caplog.records)
    assert f"{key} is gone or damaged since round 1" in told
    assert f"{key} is put there from this island's memory" in told
    assert exported(run.store) in calm.digests


def test_without_the_owner_the_others_put_the_mean(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of up to three islands every one has the whole mean, until all have taken it."""
    calm, run = Islands(MemoryStore(), 3), Islands(MemoryStore(), 3)
    calm.round(1)
    for number in range(3):
        run.publish(number, 1)
    run.take(1, 1)
    run.take(0, 1)
    run.exchanges[1].leave("i1", 1)
    with caplog.at_level(logging.WARNING, logger="atoll"):
        damage(run.store, own_key(run, 1, 1), "flip", random.Random(1))
        reader = run.exchanges[2]._reader
        reader.updates.by_round.clear()  # what it has read while it looked
        run.take(2, 1)

    assert run.digests == calm.digests
    assert any("rounds/0/1/mean/0 is put" in r.getMessage() for r in caplog.records)


def test_when_nobody_has_a_copy_the_key_is_named() -> None:
    """Nothing is guessed: whoever cannot verify the update stops."""
    run = Islands(MemoryStore(), 2)
    for number in (1, 0):
        run.publish(number, 1)
    run.exchanges[1].leave("i1", 1)
    key = own_key(run, 1, 1)
    damage(run.store, key, "flip", random.Random(1))
    run.exchanges[0]._reader.updates.by_round.clear()

    with pytest.raises(CorruptError, match=f"{key} is gone or damaged.*Restore this"):
        run.take(0, 1)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("how", DAMAGES)
def test_who_comes_late_takes_a_state_instead_of_a_damaged_update(
    reader: Callable[[Store], bytes], how: str
) -> None:
    """A state has the rounds up to its own; after it the object is named."""
    whole, digest = finished(2)
    rng = random.Random(how)
    early, late = (
        next(i.key for i in whole.items(keys.updates(0, round))) for round in (1, 4)
    )
    store = copied(whole)
    damage(store, early, how, rng)
    assert reader(store) == digest

    store = copied(whole)
    damage(store, late, how, rng)
    with pytest.raises(CorruptError, match=f"{late} is gone or damaged"):
        exported(store)


def test_who_comes_late_goes_on_when_islands_have_written_a_state() -> None:
    """It asks for one by its document, and does not have to be started again."""
    run = Islands(MemoryStore(), 2)
    run.round(1)
    for number in range(2):
        run.publish(number, 2)
    for exchange in run.exchanges:
        exchange._outcomes._last_means.clear()  # as when all had taken it
    damage(run.store, own_key(run, 1, 1), "flip", random.Random(1))

    def goes_on() -> None:
        assert [run.take(number, 2) for number in range(2)] == [True, True]
        run.write_state()

    reader = BucketReader.open(run.store, run.time, url=URL)
    late = StoreExchange(reader, key=b"late", nonce=b"late")
    enter(late, "late")
    begun_s = run.time.now_s()
    has_gone_on: list[bool] = []

    def act() -> None:
        if not has_gone_on and run.time.now_s() > begun_s + 20.0:
            has_gone_on.append(True)
            goes_on()

    run.time.every(1.0, act)
    assert state_of(late).digest in run.digests


def test_a_damaged_state_is_passed_over() -> None:
    """The older one and the means after it, or the first weights, lead there too."""
    whole, digest = finished(2)
    for item in whole.items(keys.STATES):
        for how in DAMAGES:
            store = copied(whole)
            damage(store, item.key, how, random.Random(how))
            assert exported(store) == digest
            assert exported_at(store, 3) == exported_at(copied(whole), 3)


def test_first_weights_of_another_founder_are_refused() -> None:
    """They verify and belong to this run: `run.json` names the right ones."""
    run = Islands(MemoryStore(), 1)
    (item,) = run.store.items("founding/")
    state = FragmentState.found(np.ones(3, np.float32), "sgd")
    header, body = state.to_frame(
        run=run.joined[0].run,
        fragment=0,
        outer=OUTER,
    )
    run.store.put(item.key, [pack(header), body.data])

    with pytest.raises(CorruptError, match=f"{item.key} does not hold the first"):
        exported(run.store)


def test_a_founded_run_is_not_founded_again() -> None:
    """If `run.json` is gone nobody founds the run anew with other weights."""
    store, _ = finished(2)
    store.remove([keys.RUN])
    with pytest.raises(CorruptError, match=r"run.json is gone, and the run had been"):
        joined(store)

    run = Islands(MemoryStore(), 1)
    run.time.sleep(7.0)
    run.store.remove([keys.RUN])
    with pytest.raises(CorruptError, match=r"run.json is gone.* there is members/i0"):
        run.add("b")


def test_a_run_whose_settings_are_gone_is_not_made_again(tmp_path: Path) -> None:
    """`atoll init` at its URL would give it other ones."""
    store, _ = finished(2)
    store.remove([keys.SETTINGS])
    with pytest.raises(CorruptError, match=r"settings/0 is gone from .* run.json is"):
        exported(store)
    with pytest.raises(CorruptError, match=r"settings/0 is gone"):
        StoreRun(store, plain_settings())


def test_a_control_word_that_is_gone_is_missed() -> None:
    """Rosters say how many their writers had read, and so do islands."""
    store, _ = finished(2)
    store.remove([keys.control(1)])
    for round in range(1, ROUNDS + 1):
        assert documents.fetch_roster(store, keys.roster(0, round)).controls == 1

    with pytest.raises(CorruptError, match=r"control/1 is gone"):
        exported(store)


def test_a_bundle_and_a_constant_are_named_by_their_keys() -> None:
    """Both lie under their own digests."""
    store, digest = MemoryStore(), "ab" * 32
    store.put(keys.bundle(digest), [b"something else"])
    with pytest.raises(CorruptError, match=rf"bundle/{digest} was altered"):
        archive_in(store, digest)

    constant = TensorSpec(
        name="mask", shape=(4,), dtype="uint8", role="constant", digest=digest
    )
    founded = RunDocument(
        run="run", fingerprint="", founding="f00d", model=MODEL, constants=(digest,)
    )
    store.put(keys.constant_part("f00d", digest, 0), [b"1234"])
    with pytest.raises(CorruptError, match=rf"founding/f00d/constants/{digest}/0"):
        list(ConstantObjects(store, founded).parts(constant))


@pytest.fixture(scope="module")
def buckets() -> dict[int, tuple[MemoryStore, bytes]]:
    return {islands: finished(islands) for islands in (2, 4)}


@pytest.mark.parametrize("seed", range(200))
def test_a_damaged_bucket_is_read_right_or_the_object_is_named(
    seed: int,
    buckets: dict[int, tuple[MemoryStore, bytes]],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """Exporters and newcomers of a finished run: one damage of 200."""
    rng = random.Random(f"finished {seed}")
    whole, digest = buckets[rng.choice((2, 4))]
    store: Store = copied(whole)
    if seed % 10 == 0:
        store = FileStore(tmp_path)
        for item in whole.items(""):
            store.put(item.key, [bytes(whole.get(item.key))])
    kind = KINDS[seed % len(KINDS)]
    found = [item.key for item in store.items("") if kind in item.key]
    key = rng.choice(found or [item.key for item in store.items("")])
    damage(store, key, rng.choice(DAMAGES), rng)
    with caplog.at_level(logging.WARNING, logger="atoll"):
        for reader in READERS:
            named, ended = "", b""
            caplog.clear()
            try:
                ended = reader(store)
            except AtollError as exc:
                named = str(exc)
            named += " ".join(record.getMessage() for record in caplog.records)
            assert ended in (b"", digest)
            assert ended or key in named


def _settings(islands: int) -> RunSettings:
    return RunSettings.from_dict(
        {
            "run": {"start_islands": islands, "quorum": 2, "end_rounds": 8},
            "sync": {"sync_every": 3, "overlap_steps": 1},
            "wire": {"up": "e3m0", "down": "int8"},
            "limits": {"deadline_max_s": 20.0},
        }
    )


def _running_damage(rng: random.Random) -> tuple[int, FaultPlan]:
    """Draw a damage to a bucket in which islands train, with or without a death."""
    islands, round = rng.choice((2, 4)), rng.randint(1, 7)
    below = f"rounds/0/{round}/"
    prefix = rng.choice(
        (
            *(f"{below}up/", f"{below}up/", f"{below}roster", f"{below}mean/"),
            *("states/0/3/", "states/0/6/", "members/", "run.json"),
            *("founding/", "slots/", "settings/"),
        )
    )
    how, plan = rng.choice(("flip", *DAMAGES)), FaultPlan()
    if rng.random() < 0.5:
        at_s = round_to(rng.uniform(10.0, 40.0))
        plan = plan.kill("i1", at_s=at_s, back_after_s=2.0)
    if how == "remove" and prefix.endswith("roster"):
        # Before anybody has read it, nobody can know that there was one.
        return islands, plan.damage("store", how=how, prefix=prefix, at_round=round + 2)
    at_s = round_to(rng.choice((1.0, rng.uniform(1.0, 50.0))))
    return islands, plan.damage("store", how=how, prefix=prefix, at_s=at_s)


def round_to(value: float) -> float:
    return float(f"{value:.4g}")


@pytest.mark.parametrize("block", range(10))
def test_islands_that_train_on_a_damaged_bucket_end_alike_or_name_the_object(
    block: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Real islands in virtual time: 20 damages of 200 for each block of seeds."""
    for seed in range(20 * block, 20 * block + 20):
        caplog.clear()
        islands, plan = _running_damage(random.Random(f"running {seed}"))
        trace: list[TraceEvent] = []
        with caplog.at_level(logging.WARNING, logger="atoll"):
            result = simulate(
                _settings(islands),
                islands=islands,
                faults=plan,
                seed=4,
                store=True,
                trace=trace.append,
            )
        told = [e.detail for e in trace if (e.subject, e.action) == ("store", "damage")]
        named = " ".join(record.getMessage() for record in caplog.records)
        named += " ".join(map(str, result.failures.values()))
        where = f"seed {seed}: {told}, {result.violations}"
        if not result.violations:
            assert len(set(result.digests.values())) == 1, where
            continue
        # The run stops at the first island that does: by a name, and nothing else.
        assert all(isinstance(e, CorruptError) for e in result.failures.values()), where
        assert len(result.failures) == len(result.violations) == 1, where
        assert told, where
        assert told[0].split(" ", 1)[1] in named, where


def test_a_calm_run_in_a_bucket_keeps_its_bits() -> None:
    """Digests that version 0.1.0 gives for the same seed."""
    found = {
        islands: set(
            simulate(
                _settings(islands), islands=islands, seed=4, store=True
            ).digests.values()
        )
        for islands in (2, 4)
    }

    assert found == {
        2: {"3b3d0bbc334856425500588e824c83c6"},
        4: {"1f8ce0e8df9d5093850470f0cc5331e6"},
    }


@pytest.fixture
def on_disk(tmp_path: Path) -> tuple[Path, FileStore]:
    whole, _ = finished(2, has_state=False)
    store = FileStore(tmp_path / "bucket")
    for item in whole.items(""):
        store.put(item.key, [bytes(whole.get(item.key))])
    return tmp_path / "bucket", store


@pytest.mark.parametrize("verb", ["export", "status", "doctor", "inspect"])
def test_commands_exit_with_5_and_name_the_object(
    on_disk: tuple[Path, FileStore], verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The remedy is to restore that object, and never to remove it."""
    place, store = on_disk
    key = keys.roster(0, 3)
    store.put(key, [flipped(bytes(store.get(key)), 2000)])
    words = {
        "export": ["export", str(place), str(place.with_name("out.safetensors"))],
        "status": ["status", str(place)],
        "doctor": ["doctor", str(place)],
        "inspect": ["inspect", f"{place}/{key}"],
    }[verb]
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr()

    assert ended.value.code == 5
    assert verb == "inspect" or key in said.out + said.err
    assert "remove it;" not in said.out + said.err
