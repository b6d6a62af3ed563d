"""Asynchronous rounds in a bucket: updates stand until a roster lists them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from atoll.errors import CorruptError, UsageError
from atoll.exchange import Frame
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.keys import UpdateKey
from atoll.exchange.bucket.move import MoveOut
from atoll.exchange.bucket.view import BEAT_S
from atoll.protocol import Reception
from atoll.run_client.store import StoreRunClient
from atoll.store import Data, FileStore, Item, MemoryStore, Store
from atoll.testing.fixtures import (
    anchor_of,
    outcome_of,
    roster_of,
)
from atoll.wire import FrameKind, pack, update_digest
from tests.exchange.bucket.lagoon import GRACE_S, Lagoon, asynchronous


def test_an_update_counts_in_the_round_that_is_open_when_it_is_read() -> None:
    """Sealed for round 1, in the roster of round 3: age 2, at the key of its label."""
    lagoon = Lagoon("a", "b")
    slow = lagoon.frame("b", 6.0, round=1)
    lagoon.publish("a", 1.0, round=1)
    assert lagoon.close("a", 1) == {"a": 0}
    lagoon.publish("a", 1.0, round=2)
    assert lagoon.close("a", 2) == {"a": 0}
    assert lagoon.exchanges["b"].publish(slow) is Reception.STAGED
    lagoon.publish("a", 2.0, round=3)

    assert lagoon.close("a", 3) == {"a": 0, "b": 2}
    assert f"arrivals/0/{keys.slug('b')}.1.1" in lagoon.arrivals()
    # Two single updates with a share of 1/2 of 1, then a mean of 4 with a share of 1.
    assert anchor_of(lagoon.exchanges["b"]) == -0.5 - 0.5 - 4.0


def test_a_round_closes_a_grace_after_its_first_update() -> None:
    """By the clock of the island that closes it, and without the islands that train."""
    lagoon = Lagoon("a", "b")
    lagoon.publish("a", 1.0, round=1)
    lagoon.time.sleep(GRACE_S - 0.5)
    assert lagoon.exchanges["a"].outcome(0, 1, wait_s=0.0) is None
    lagoon.time.sleep(0.5)

    assert lagoon.ages("a", 1) == {"a": 0}


def test_a_round_closes_at_once_when_nobody_is_missing() -> None:
    """The last of the live islands closes it as it publishes."""
    lagoon = Lagoon("a", "b")
    lagoon.publish("a", 1.0, round=1)
    lagoon.publish("b", 3.0, round=1)

    assert lagoon.ages("b", 1) == {"a": 0, "b": 0}


def test_a_round_waits_for_its_quorum_beyond_the_grace() -> None:
    """Two updates are asked for, and the second one comes late."""
    lagoon = Lagoon("a", "b", "c", settings=asynchronous(islands=3, quorum=2))
    lagoon.publish("a", 1.0, round=1)
    lagoon.time.sleep(5 * GRACE_S)
    assert lagoon.exchanges["a"].outcome(0, 1, wait_s=0.0) is None
    lagoon.publish("b", 1.0, round=1)

    assert lagoon.ages("a", 1) == {"a": 0, "b": 0}


def test_the_frame_of_a_round_has_its_share_of_the_buffer() -> None:
    """Of 4, one update of age 0 and one of age 1 with the factor 1/2: 1.5 / 4."""
    settings = asynchronous(islands=2, staleness="inverse", buffer=4)
    lagoon = Lagoon("a", "b", settings=settings)
    late = lagoon.frame("b", 1.0, round=1)
    lagoon.publish("a", 1.0, round=1)
    lagoon.close("a", 1)
    lagoon.exchanges["b"].publish(late)
    lagoon.publish("a", 1.0, round=2)

    outers = [
        outcome_of(lagoon.exchanges["a"], round).agreed.header.outer for round in (1, 2)
    ]
    shares = [(outer.share, outer.buffer) for outer in outers if outer]
    assert shares == [(0.25, 4), (0.375, 4)]


def test_a_repeat_of_a_listed_update_changes_nothing() -> None:
    """Counted or refused: rosters tell its label, and nothing is listed twice."""
    lagoon = Lagoon("a", "b")
    counted = lagoon.publish("a", 1.0, round=1)
    refused = lagoon.publish("b", 1.0, round=1, weight=5)
    assert lagoon.ages("a", 1) == {"a": 0, "b": 0}

    assert lagoon.exchanges["a"].publish(counted) is Reception.COMMITTED
    assert lagoon.exchanges["b"].publish(refused) is Reception.COMMITTED


def test_the_rest_of_a_farewell_follows_the_flight() -> None:
    """Of one island two rosters have an update each, in the order of their labels."""
    lagoon = Lagoon("a", "b")
    flight = lagoon.publish("b", 1.0, round=1)
    rest = lagoon.frame("b", 5.0, round=2, kind=FrameKind.DEPARTING)
    assert lagoon.exchanges["b"].publish(rest) is Reception.STAGED
    lagoon.exchanges["b"].leave("b", 1)
    lagoon.publish("a", 3.0, round=1)
    assert lagoon.ages("a", 1) == {"a": 0, "b": 0}
    lagoon.hold("a")
    lagoon.publish("a", 3.0, round=2)

    assert lagoon.ages("a", 2) == {"a": 0, "b": 0}
    digests = [
        entry.digest
        for round in (1, 2)
        if (entry := roster_of(lagoon.exchanges["a"], round).entry("b"))
    ]
    assert digests == [update_digest(flight.header), update_digest(rest.header)]


class Hiding(MemoryStore):
    """A store whose lists miss some keys: they lag behind."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.hidden: set[str] = set()

    def items(self, prefix: str) -> list[Item]:
        return [
            item for item in self._store.items(prefix) if item.key not in self.hidden
        ]

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        return self._store.get(key, first, size)

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        return self._store.put_new(key, parts)

    def put(self, key: str, parts: Sequence[Data]) -> None:
        self._store.put(key, parts)

    def remove(self, keys: Iterable[str]) -> None:
        self._store.remove(keys)


def test_a_late_list_does_not_put_the_rest_before_the_flight() -> None:
    """It shows the departing update only: the one before it is read by its key."""
    lagoon = Lagoon("a", "b")
    lagoon.publish("b", 1.0, round=1)
    lagoon.exchanges["b"].publish(
        lagoon.frame("b", 5.0, round=2, kind=FrameKind.DEPARTING)
    )
    late = Hiding(lagoon.store)
    late.hidden.add(keys.arrival(0, UpdateKey.of(1, "b", 1)))
    lagoon.enter("c", store=late)
    lagoon.time.sleep(BEAT_S)
    lagoon.hold("c")
    lagoon.publish("c", 3.0, round=1)

    assert lagoon.close("c", 1) == {"b": 0, "c": 0}
    lagoon.publish("c", 3.0, round=2)
    assert lagoon.close("c", 2) == {"b": 0, "c": 0}


def test_an_island_returns_when_its_earlier_update_is_listed() -> None:
    """Alone it closes the round itself; so it knows which of its work has counted."""
    lagoon = Lagoon("a", settings=asynchronous(islands=1, quorum=1))
    lagoon.publish("a", 1.0, round=1)
    frame = lagoon.frame("a", 2.0, round=2)
    key = keys.arrival(0, UpdateKey.of(2, "a", 1))
    lagoon.store.put_new(key, [*packed_frame(frame)])  # and it dies
    joined = lagoon.joined["a"]
    lagoon.enter("a")

    assert lagoon.joined["a"].incarnation == joined.incarnation + 1
    assert lagoon.joined["a"].spoken_for == ()
    assert lagoon.joined["a"].position.rounds == (3,)
    entry = roster_of(lagoon.exchanges["a"], 2).entry("a")
    assert entry is not None
    assert (entry.incarnation, entry.digest) == (1, update_digest(frame.header))


def packed_frame(frame: Frame) -> Iterable[bytes]:
    return pack(frame.header), frame.body.tobytes()


def test_an_earlier_incarnation_that_its_successor_does_not_name_never_counts() -> None:
    """It wakes after its successor has joined: its update changes nothing."""
    lagoon = Lagoon("a", "b")
    frame = lagoon.frame("b", 9.0, round=1)
    lagoon.enter("b")
    lagoon.time.sleep(BEAT_S)
    key = keys.arrival(0, UpdateKey.of(1, "b", 1))
    lagoon.store.put_new(key, [*packed_frame(frame)])
    lagoon.publish("a", 1.0, round=1)

    assert lagoon.close("a", 1) == {"a": 0}


def test_a_new_reader_knows_from_the_state_which_updates_are_listed() -> None:
    """Rosters before the state are not read, and arrivals are still there."""
    lagoon = Lagoon("a", settings=asynchronous(islands=1))
    for round in range(1, 12):
        lagoon.hold("a")
        lagoon.publish("a", 1.0, round=round)
        outcome = outcome_of(lagoon.exchanges["a"], round)
        for fragment in outcome.position.lost:
            lagoon.exchanges["a"].publish(lagoon.exchanges["a"].state(fragment))
    assert lagoon.store.items(keys.states(0))
    assert len(lagoon.arrivals()) == 11
    new = lagoon.enter("b")

    assert lagoon.joined["b"].position.rounds == (12,)
    assert lagoon.joined["b"].counted == (None,)
    assert new._reader.view.state.rounds[0].staged == {}


def test_collected_are_the_updates_that_older_states_contain() -> None:
    """Of 31 rounds, three states: the updates up to the middle one are gone."""
    lagoon = Lagoon("a", settings=asynchronous(islands=1))
    for round in range(1, 32):
        lagoon.hold("a")
        lagoon.publish("a", 1.0, round=round)
        outcome = outcome_of(lagoon.exchanges["a"], round)
        for fragment in outcome.position.lost:
            lagoon.exchanges["a"].publish(lagoon.exchanges["a"].state(fragment))
    states = sorted(
        int(item.key.split("/")[2])
        for item in lagoon.store.items(keys.states(0))
        if item.key.endswith(keys.COMPLETE)
    )
    labels = sorted(
        update.round for key in lagoon.arrivals() if (update := keys.arrival_of(key))
    )

    assert len(states) == 2
    assert labels == list(range(states[0] + 1, 32))
    assert anchor_of(lagoon.enter("b")) == -31 * 0.5


def test_an_island_that_stood_still_takes_a_state_instead_of_updates() -> None:
    """It has read the first roster, and none since: those are gone, not damaged."""
    lagoon = Lagoon("a", "b", settings=asynchronous(islands=2))
    lagoon.publish("a", 1.0, round=1)
    lagoon.close("a", 1)
    lagoon.exchanges["b"]._reader.read_rosters(0)
    for round in range(2, 64):
        lagoon.publish("a", 1.0, round=round)
        lagoon.close("a", round)
        outcome = outcome_of(lagoon.exchanges["a"], round)
        for fragment in outcome.position.lost:
            lagoon.exchanges["a"].publish(lagoon.exchanges["a"].state(fragment))
    assert keys.arrival(0, UpdateKey.of(1, "a", 1)) not in lagoon.arrivals()

    assert not outcome_of(lagoon.exchanges["b"], 1).has_body
    assert anchor_of(lagoon.exchanges["b"]) == anchor_of(lagoon.exchanges["a"])


def test_an_update_that_stands_is_never_collected() -> None:
    """However old: it counts when its island is back among the documents."""
    lagoon = Lagoon("a", "b", settings=asynchronous(islands=2))
    stray = keys.arrival(0, UpdateKey.of(1, "nobody", 1))
    frame = lagoon.frame("b", 1.0, round=1)
    lagoon.store.put_new(stray, [*packed_frame(frame)])
    for round in range(1, 42):
        lagoon.publish("a", 1.0, round=round)
        lagoon.close("a", round)
        outcome = outcome_of(lagoon.exchanges["a"], round)
        for fragment in outcome.position.lost:
            lagoon.exchanges["a"].publish(lagoon.exchanges["a"].state(fragment))

    assert stray in lagoon.arrivals()


def test_a_damaged_update_is_put_again_by_its_owner() -> None:
    """The request names its age, so its owner finds it by the label in its key."""
    lagoon = Lagoon("a", "b")
    slow = lagoon.frame("b", 6.0, round=1)
    lagoon.publish("a", 1.0, round=1)
    lagoon.close("a", 1)
    lagoon.exchanges["b"].publish(slow)
    key = keys.arrival(0, UpdateKey.of(1, "b", 1))
    whole = bytes(lagoon.store.get(key))
    lagoon.publish("a", 1.0, round=2)
    lagoon.store.put(key, [whole[:-1] + b"?"])
    lagoon.exchanges["a"]._reader.updates.by_round.clear()

    assert lagoon.ages("a", 2) == {"a": 0, "b": 1}
    assert bytes(lagoon.store.get(key)) == whole


def test_commands_of_users_know_asynchronous_runs(tmp_path: Path) -> None:
    """Status shows an update that is two rounds old, and exports are of any round."""
    lagoon = Lagoon("a", "b", store=FileStore(tmp_path / "store"))
    slow = lagoon.frame("b", 6.0, round=1)
    for round in (1, 2):
        lagoon.publish("a", 1.0, round=round)
        lagoon.close("a", round)
    lagoon.exchanges["b"].publish(slow)
    lagoon.publish("a", 2.0, round=3)
    client = StoreRunClient(str(tmp_path / "store"))
    rows = {row["island"]: row for row in client.status().document["islands"]}
    client.export(tmp_path / "newest")
    client.export(tmp_path / "second", round=2)
    newest, second = (
        load_file(tmp_path / name)["w"][0] for name in ("newest", "second")
    )

    assert (rows["a"]["counted"], rows["b"]["counted"]) == (3, 1)
    assert (rows["a"]["age"], rows["b"]["age"]) == (0.0, 2.0)
    assert (newest, second) == (-5.0, -1.0)
    assert all(check.is_ok for check in client.checks())
    client.close()


def test_an_asynchronous_run_does_not_move_out_of_a_bucket() -> None:
    """Receipts would need more rosters than come along."""
    lagoon = Lagoon("a")

    with pytest.raises(UsageError, match=r"An asynchronous run cannot move yet"):
        MoveOut.open(lagoon.store, lagoon.time, url="a test's store")


def test_a_roster_without_the_share_of_its_buffer_is_refused() -> None:
    """In an asynchronous run every outer step has one; in another none has."""
    lagoon = Lagoon("a", "b")
    lagoon.publish("a", 1.0, round=1)
    lagoon.close("a", 1)
    key = keys.roster(0, 1)
    document = documents.fetch_roster(lagoon.store, key)
    bare = replace(document, outer=document.outer.in_state(0))
    lagoon.store.put(key, documents.packed(documents.ROSTER, bare, key))

    with pytest.raises(CorruptError, match=r"rounds/0/1/roster has no share"):
        lagoon.enter("c")


FOREIGN_KEYS = (
    "arrivals/0/a",
    "arrivals/0/a.1",
    "arrivals/0/.1.1",
    "arrivals/0/a.1.01",
    "arrivals/0/a.one.1",
    "arrivals/0/a.1.-1",
    f"arrivals/0/a.1.{10**20}",
)


@pytest.mark.parametrize("key", FOREIGN_KEYS)
def test_a_key_that_names_no_update_is_ignored(key: str) -> None:
    """It is neither read nor removed."""
    assert keys.arrival_of(key) is None
    lagoon = Lagoon("a", "b")
    lagoon.store.put(key, [b"x"])
    lagoon.publish("a", 1.0, round=1)

    assert lagoon.close("a", 1) == {"a": 0}
    assert key in lagoon.arrivals()


def test_the_key_of_an_update_is_read_as_it_is_written() -> None:
    """Slug, incarnation and label, for any name of an island."""
    update = UpdateKey.of(12, "Tōkyō 1.7", 3)

    assert keys.arrival_of(keys.arrival(4, update)) == update


def test_an_update_at_the_key_of_another_label_is_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A copy does not count twice: it is reported once, with its key."""
    lagoon = Lagoon("a", "b")
    frame = lagoon.frame("b", 1.0, round=1)
    copied = keys.arrival(0, UpdateKey.of(0, "b", 1))
    lagoon.store.put(copied, [*packed_frame(frame)])
    lagoon.publish("a", 1.0, round=1)

    assert lagoon.close("a", 1) == {"a": 0}
    assert caplog.text.count(copied) == 1


def test_an_update_of_a_round_that_is_not_open_yet_waits_for_it() -> None:
    """Its island has read a roster that this one has not: it does not count before."""
    lagoon = Lagoon("a", "b")
    frame = lagoon.frame("b", 1.0, round=2)
    lagoon.store.put(keys.arrival(0, UpdateKey.of(2, "b", 1)), [*packed_frame(frame)])
    lagoon.publish("a", 1.0, round=1)
    assert lagoon.close("a", 1) == {"a": 0}
    lagoon.publish("a", 1.0, round=2)

    assert lagoon.ages("a", 2) == {"a": 0, "b": 0}
