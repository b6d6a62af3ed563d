"""What every client of a run answers, wherever the run is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from atoll.errors import Refused, UsageError
from atoll.run_client import Action, Command, RunClient
from atoll.run_client.directory import DirectoryRunClient
from atoll.run_client.store import StoreRunClient
from atoll.weights import lay_out
from tests.cli import stores
from tests.run_client.conftest import END_ROUNDS, Ended


def test_a_status_says_how_far_the_run_is(ended: Ended) -> None:
    """The same facts as values and in the document that is printed as JSON."""
    status = ended.client.status(watch=True)

    assert (status.name, status.state, status.round) == ("lagoon", "ended", END_ROUNDS)
    assert status.last_round == END_ROUNDS
    assert status.has_ended
    assert status.is_over
    assert status.reason == f"Round {END_ROUNDS} was the last."
    assert status.run == status.document["run"]
    assert json.loads(json.dumps(status.document)) == status.document


def test_a_status_has_the_metrics_of_every_island(ended: Ended) -> None:
    """By name, with the state and the round of each; they stay known."""
    islands = ended.client.status().islands

    assert sorted(islands) == ["a", "b"]
    assert {row["state"] for row in islands.values()} == {"left"}
    # An island may leave before it has told that it holds the last round.
    held = {END_ROUNDS - 1, END_ROUNDS}
    assert {row["round"] for row in islands.values()} <= held


def test_documents_have_the_same_keys(ended: Ended) -> None:
    """A page of one status is a page of every other."""
    document = ended.client.status().document
    promised = {"run", "name", "state", "why", "since_unix_s", "waits_for", "round"}
    promised |= {"rounds", "last_round", "tokens", "epoch", "quorum", "islands"}
    promised |= {"version", "listening", "started_unix_s", "now_unix_s", "recent"}

    assert promised | {"damage", "cure", "same_data", "stall_share"} <= set(document)


def test_the_settings_are_those_of_the_run(ended: Ended) -> None:
    """Complete, with the defaults."""
    assert ended.client.settings() == stores.settings(end_rounds=END_ROUNDS)


def test_events_are_read_from_a_number_on(ended: Ended) -> None:
    """In a store nobody can wait for the next one, and it says what to do instead."""
    events = ended.client.events()
    names = [event.name for event in events]
    if isinstance(ended.client, StoreRunClient):
        with pytest.raises(UsageError, match="this needs a coordinator"):
            ended.client.events(after=events[-1])
        assert names[0] == "run_founded"
        assert names.count("round_committed") == END_ROUNDS * 2
        return

    assert names[0] == "run_created"
    assert "run_ended" in names
    assert names.count("round_committed") == END_ROUNDS * 2  # of two fragments
    last = events[-3]
    assert ended.client.events(after=last) == events[-2:]


def test_exported_weights_are_those_of_the_islands(
    ended: Ended, tmp_path: Path
) -> None:
    """Bit for bit, with the facts of the file."""
    done: list[tuple[int, int]] = []
    file = tmp_path / "weights.safetensors"
    weights = ended.client.export(file, progress=lambda *work: done.append(work))
    tensors = load_file(file)

    assert (weights.round, weights.rounds) == (END_ROUNDS, [END_ROUNDS] * 2)
    assert (weights.tensors, weights.bytes) == (3, file.stat().st_size)
    assert weights.run == ended.client.status().run
    assert (weights.constants, weights.moved_to) == ([], None)
    assert done[-1][0] == done[-1][1]
    layout = lay_out(stores.MODEL, stores.settings())
    for fragment, anchor in zip(layout, ended.anchors["a"], strict=True):
        for index, tensor in enumerate(fragment.tensors):
            part = anchor[fragment.offsets[index] : fragment.offsets[index + 1]]
            assert tensors[tensor.name].tobytes() == part.tobytes()


def test_weights_of_a_kept_round_are_exported(ended: Ended, tmp_path: Path) -> None:
    """The last round's are the newest; a round that never was is refused."""
    newest, last = tmp_path / "newest", tmp_path / "last"
    ended.client.export(newest)
    assert ended.client.export(last, round=END_ROUNDS).round == END_ROUNDS

    assert newest.read_bytes() == last.read_bytes()
    with pytest.raises(Refused, match="The anchor of round 99 is not kept"):
        ended.client.export(tmp_path / "none", round=99)


def test_every_check_of_a_sound_run_passes(ended: Ended) -> None:
    """Each has a detail to print."""
    checks = list(ended.client.checks())

    assert [check.name for check in checks if not check.is_ok] == []
    assert all(check.detail for check in checks)


def test_a_client_can_be_closed_twice(new: RunClient) -> None:
    """Also before its first call."""
    new.close()
    new.close()


def test_a_new_run_waits_for_its_first_island(new: RunClient, tmp_path: Path) -> None:
    """It has a status and settings, and no weights to export."""
    status = new.status()

    assert (status.state, status.round, status.islands) == ("founding", 0, {})
    assert not status.is_over
    with pytest.raises(Refused, match="has no weights yet"):
        new.export(tmp_path / "none")


def test_a_command_is_in_force_when_its_call_returns(new: RunClient) -> None:
    """Settings are read as they are now, and the reply has the new status."""
    reply = new.control(Command(Action.SET, {"run.quorum": 2, "outer.lr": 0.5}))

    assert reply.status.document["epoch"] == 1
    assert reply.status.document["quorum"] == 2
    assert reply.message
    assert new.settings().run.quorum == 2
    assert new.settings().outer.lr == 0.5
    new.control(Command(Action.STOP))
    assert new.status().has_ended


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (Command(Action.SET, {"sync.sync_every": 3}), "sync.sync_every cannot change"),
        (Command(Action.SET, {"run.quorum": -1}), "run.quorum=-1 must be"),
        (Command(Action.EVICT, island="zoe"), "No island is called 'zoe'"),
    ],
    ids=["fixed", "range", "unknown"],
)
def test_a_wrong_command_changes_nothing(
    new: RunClient, command: Command, message: str
) -> None:
    """The error names the value, on every side."""
    with pytest.raises(UsageError, match=message):
        new.control(command)

    assert new.settings() == stores.settings(end_rounds=END_ROUNDS)


def test_a_directory_accepts_no_command(ended: Ended) -> None:
    """Nobody performs it there: the way to serve the run again is named."""
    if not isinstance(ended.client, DirectoryRunClient):
        return
    with pytest.raises(Refused, match=r"Serve it to control its run: atoll serve"):
        ended.client.control(Command(Action.PAUSE))
    with pytest.raises(Refused, match="no event follows"):
        ended.client.events(is_waiting=True)
