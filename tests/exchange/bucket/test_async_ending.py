"""The end of an asynchronous run in a bucket: a last round for each fragment."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll import RunSettings
from atoll.errors import RunEnded, SettingsError
from atoll.exchange.bucket import BucketReader, documents, keys
from atoll.exchange.bucket.documents import ControlDocument
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.states import States
from atoll.exchange.bucket.view import BEAT_S
from atoll.protocol import Reception
from atoll.run_client import Action, Command
from atoll.run_client.store import StoreObserver, write_control
from atoll.store import FileStore
from atoll.testing.fixtures import roster_of
from atoll.wire import TrainingProgress
from tests.exchange.bucket.lagoon import GRACE_S, Lagoon, asynchronous


def ending(**run: object) -> RunSettings:
    """Return asynchronous settings with an end."""
    settings = asynchronous(islands=2)
    return settings.with_values({f"run.{key}": value for key, value in run.items()})


def last_rounds(lagoon: Lagoon, name: str) -> tuple[int, ...] | None:
    reader = lagoon.exchanges[name]._reader
    reader.read_controls()
    return reader.view.state.last_rounds


def stop_at(lagoon: Lagoon, *rounds: int, number: int = 1) -> None:
    """Put the control by which a run ends, as another closer or an operator does."""
    control = ControlDocument(
        run=lagoon.joined["a"].run, action="stop", values={}, last_rounds=rounds
    )
    key = keys.control(number)
    lagoon.store.put_new(key, documents.packed(documents.CONTROL, control, key))


def test_the_round_before_the_last_decides_the_end() -> None:
    """With two rounds, the one that is open after the first is the last."""
    lagoon = Lagoon("a", "b", settings=ending(end_rounds=2))
    lagoon.publish("a", 1.0, round=1)
    lagoon.close("a", 1)

    assert last_rounds(lagoon, "b") == (2,)
    control = documents.fetch(lagoon.store, documents.CONTROL, keys.control(1))
    assert (control.action, control.last_rounds) == ("stop", (2,))


def test_the_last_round_waits_for_every_live_island_beyond_the_grace() -> None:
    """And no round opens after it."""
    lagoon = Lagoon("a", "b", settings=ending(end_rounds=2))
    slow = lagoon.frame("b", 6.0, round=1)
    lagoon.publish("a", 1.0, round=1)
    lagoon.close("a", 1)
    lagoon.publish("a", 1.0, round=2)
    lagoon.time.sleep(10 * GRACE_S)
    assert lagoon.exchanges["a"].outcome(0, 2, wait_s=0.0) is None
    lagoon.exchanges["b"].publish(slow)

    assert lagoon.ages("a", 2) == {"a": 0, "b": 1}
    with pytest.raises(RunEnded):
        lagoon.exchanges["b"].outcome(0, 3, wait_s=0.0)
    late = lagoon.frame("b", 1.0, round=3)
    assert lagoon.exchanges["b"].publish(late) is Reception.COMMITTED


def test_tokens_that_have_counted_end_the_run() -> None:
    """The open round is the last as soon as a roster has enough of them."""
    settings = ending(end_tokens=2)
    lagoon = Lagoon("a", "b", settings=settings)
    for round in (1, 2, 3):
        progress = TrainingProgress(inner_steps=round, tokens=round)
        frame = lagoon.frame("a", 1.0, round=round, progress=progress)
        lagoon.exchanges["a"].publish(frame)
        lagoon.close("a", round)
        if last_rounds(lagoon, "a"):
            break

    assert last_rounds(lagoon, "a") == (3,)


def test_a_roster_whose_closer_did_not_know_the_end_is_not_the_last() -> None:
    """It has waited for nobody: every reader makes the next round the last."""
    lagoon = Lagoon("a", "b")
    lagoon.publish("a", 1.0, round=1)
    lagoon.time.sleep(GRACE_S)
    reader = lagoon.exchanges["a"]._reader
    reader.poll_controls = lambda: None  # type: ignore[method-assign]  # not seen yet
    stop_at(lagoon, 1)
    lagoon.hold("a")
    assert lagoon.ages("a", 1) == {"a": 0}

    assert last_rounds(lagoon, "b") == (1,)
    lagoon.exchanges["b"]._reader.read_rosters(0)
    assert last_rounds(lagoon, "a") == last_rounds(lagoon, "b") == (2,)


def test_of_two_ends_the_first_one_stands() -> None:
    """Two islands may decide at the same time."""
    lagoon = Lagoon("a", "b")
    stop_at(lagoon, 3)
    stop_at(lagoon, 5, number=2)

    assert last_rounds(lagoon, "a") == last_rounds(lagoon, "b") == (3,)


@pytest.mark.parametrize("rounds", [(), (1, 2)])
def test_an_end_of_other_fragments_is_void(rounds: tuple[int, ...]) -> None:
    """Atoll did not put it: the run continues."""
    lagoon = Lagoon("a", "b")
    stop_at(lagoon, *rounds)

    assert last_rounds(lagoon, "a") is None


def test_an_operator_stops_a_run_with_its_open_rounds(tmp_path: Path) -> None:
    """Asked again, it ends as it was decided; `end_rounds=none` lets it go on."""
    lagoon = Lagoon("a", "b", store=FileStore(tmp_path / "store"))
    lagoon.publish("a", 1.0, round=1)
    lagoon.close("a", 1)
    with StoreObserver(str(tmp_path / "store"), clock=lagoon.time) as observer:
        _, first = write_control(observer, Command(action=Action.STOP))
        _, second = write_control(observer, Command(action=Action.STOP))
        assert first.last_rounds == second.last_rounds == (2,)
        assert last_rounds(lagoon, "b") == (2,)
        values = {"run.end_rounds": None}
        write_control(observer, Command(action=Action.SET, values=values))

    assert last_rounds(lagoon, "b") is None


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_last_round_closes_below_the_quorum_when_nobody_is_left(
    mode: str, tmp_path: Path
) -> None:
    """The other island has left; without a stop the round waits for a quorum."""
    settings = asynchronous(islands=2, quorum=2)
    if mode == "sync":
        unset = {"async.grace_s": None, "async.buffer": None}
        settings = settings.with_values({"sync.mode": "sync", **unset})
    store = FileStore(tmp_path / "store")
    lagoon = Lagoon("a", "b", store=store, settings=settings)
    for name in "ab":
        lagoon.publish(name, 1.0, round=1)
    lagoon.hold("a")
    lagoon.exchanges["b"].leave("b", 1)
    lagoon.publish("a", 3.0, round=2)
    lagoon.time.sleep(5 * BEAT_S)
    assert lagoon.exchanges["a"].outcome(0, 2, wait_s=0.0) is None
    with StoreObserver(str(tmp_path / "store"), clock=lagoon.time) as observer:
        write_control(observer, Command(action=Action.STOP))
    lagoon.time.sleep(BEAT_S)

    assert lagoon.ages("a", 2) == {"a": 0}
    with pytest.raises(RunEnded, match="Round 3 will not open"):
        lagoon.exchanges["a"].outcome(0, 3, wait_s=0.0)


def test_tokens_below_what_has_counted_end_the_run(tmp_path: Path) -> None:
    """An operator sets them; the round that is open then is the last."""
    lagoon = Lagoon("a", "b", store=FileStore(tmp_path / "store"))
    some = TrainingProgress(inner_steps=3, tokens=30)
    lagoon.publish("a", 1.0, round=1, progress=some)
    lagoon.close("a", 1)
    with StoreObserver(str(tmp_path / "store"), clock=lagoon.time) as observer:
        for tokens, expected in ((31, None), (30, (2,))):
            values = {"run.end_tokens": tokens}
            write_control(observer, Command(action=Action.SET, values=values))
            assert last_rounds(lagoon, "a") == expected
    lagoon.publish("a", 1.0, round=2)
    lagoon.publish("b", 1.0, round=2)

    assert lagoon.ages("a", 2) == {"a": 0, "b": 0}
    with pytest.raises(RunEnded, match="Round 3 will not open"):
        lagoon.exchanges["b"].outcome(0, 3, wait_s=0.0)


def test_a_decay_by_rounds_is_no_setting_of_an_asynchronous_run(tmp_path: Path) -> None:
    """An operator is told, and a document of somebody else changes nothing."""
    lagoon = Lagoon("a", store=FileStore(tmp_path / "store"))
    values = {"run.decay_round": 9}
    with (
        StoreObserver(str(tmp_path / "store"), clock=lagoon.time) as observer,
        pytest.raises(SettingsError, match=r"decay_round=9 .* Use run\.end_tokens"),
    ):
        write_control(observer, Command(action=Action.SET, values=values))
    control = ControlDocument(run=lagoon.joined["a"].run, action="set", values=values)
    lagoon.store.put_new(
        keys.control(1), documents.packed(documents.CONTROL, control, keys.control(1))
    )

    assert last_rounds(lagoon, "a") is None
    reader = lagoon.exchanges["a"]._reader
    assert len(reader.view.controls) == 1
    assert reader.view.settings.run.decay_round is None


def test_a_run_whose_islands_have_left_ends_at_once(tmp_path: Path) -> None:
    """No island will publish for its open round, and no update stands."""
    lagoon = Lagoon("a", store=FileStore(tmp_path / "store"))
    lagoon.publish("a", 1.0, round=1)
    lagoon.exchanges["a"].leave("a", 1)
    with StoreObserver(str(tmp_path / "store"), clock=lagoon.time) as observer:
        _, control = write_control(observer, Command(action=Action.STOP))

    assert control.last_rounds == (1,)
    assert list(roster_of(lagoon.exchanges["a"], 1).counted)


def test_who_begins_at_the_state_of_the_last_round_knows_the_end() -> None:
    """Its roster says whether the closer knew that it was the last."""
    settings = asynchronous(islands=1).with_values({"run.end_rounds": 11})
    lagoon = Lagoon("a", settings=settings)
    for round in range(1, 12):
        lagoon.hold("a")
        lagoon.publish("a", 1.0, round=round)
    lagoon.exchanges["a"].publish(lagoon.exchanges["a"].state(0))
    reader = BucketReader.open(lagoon.store, lagoon.time, url="a test's store")
    States(reader, Outcomes(reader, None)).begin(0)

    assert lagoon.store.items(keys.states(0))
    assert reader.view.state.last_rounds == (11,)
    assert reader.view.state.never_opens(12, fragment=0)
