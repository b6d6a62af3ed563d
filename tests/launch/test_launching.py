"""Launches from Python: followed, waited for, found again, undone when they fail."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import atoll.launch
from atoll import RunSettings
from atoll.errors import (
    AtollError,
    CorruptError,
    Refused,
    RemoteError,
    Unreachable,
    UsageError,
)
from atoll.launch import IslandSpec, Launched, Restarts, State, engines, launch
from atoll.launch import launches as launch_records
from atoll.launch.api import SILENT_S, PollRetry, failures, launch_spec
from atoll.launch.bootstrap import bootstrap_argv
from atoll.launch.bootstrap import main as bootstrap
from atoll.launch.credentials import IslandCredentials
from atoll.launch.launches import LaunchRecords, Record
from atoll.launch.spec import resolve
from atoll.security import Secret
from tests.cli.runs import ISLAND, as_user
from tests.launch.faltering import Faltering

BREAKING = """
import time
from atoll.errors import RemoteError
from atoll.launch.registry import open_launcher as open_other

class Breaking:
    def __init__(self): self.inner = open_other("local")
    traits = property(lambda self: self.inner.traits)
    def plan(self, order): return self.inner.plan(order)
    def launch(self, order, *, keep):
        self.inner.launch(order, keep=keep)
        raise RemoteError("the line broke")
    def cancel(self, handle, **more):
        if CANNOT: raise RemoteError("the line is still broken")
        self.inner.cancel(handle, grace_s=0.0)

def open_launcher(options): return Breaking()
"""


MEETING = """
import threading
from atoll.launch.registry import open_launcher as open_other

BOTH = threading.Barrier(2)

class Meeting:
    def __init__(self): self.inner = open_other("local")
    def __getattr__(self, name): return getattr(self.inner, name)
    def launch(self, order, *, keep):
        try:
            BOTH.wait(timeout=2.0)  # for another that wants the same, if it gets here
        except threading.BrokenBarrierError:
            pass
        return self.inner.launch(order, keep=keep)

def open_launcher(options): return Meeting()
"""


@pytest.fixture
def engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], str]]:
    """Makes an engine out of a text, and returns its name."""
    made: list[str] = []

    def make(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(tmp_path)])
        importlib.invalidate_caches()
        made.append(f"{engines.__name__}.{name}")
        return name

    yield make
    for module in made:
        sys.modules.pop(module, None)


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    as_user(monkeypatch, tmp_path / "home", OMP_NUM_THREADS="1")
    monkeypatch.chdir(tmp_path)
    yield
    for record in LaunchRecords().records():
        Launched(record.handle).cancel(grace_s=0.0)


def test_the_face_is_what_was_promised() -> None:
    """Every name of the package is there."""
    assert all(hasattr(atoll.launch, name) for name in atoll.launch.__all__)


@pytest.mark.timeout(300)
def test_islands_are_waited_for_with_their_metrics(tmp_path: Path) -> None:
    """Exit states, last metrics and last lines come together at the end."""
    run = str(tmp_path / "run")
    settings = {"run": {"start_islands": 2, "end_rounds": 3}, "sync": {"sync_every": 4}}
    atoll.init(run, RunSettings.from_dict(settings))
    (tmp_path / "train.py").write_text(ISLAND)
    launched = launch("local", 2, run, ["train.py"], name="far")
    results = launched.wait(250.0)

    assert [each.report.state for each in results] == [State.FINISHED] * 2
    assert [each.metrics["round"] for each in results] == [3, 3]
    assert results[0].last_lines[-1].startswith("far-0 ")
    assert launched.logs().keys() == {"far-0", "far-1"}
    again = Launched(LaunchRecords().of_run(run)[0].handle)
    assert [each.state for each in again.poll()] == [State.FINISHED] * 2


def test_waiting_has_an_end(tmp_path: Path) -> None:
    """After its time it says who runs on, and they do until they are cancelled."""
    spec = IslandSpec(command=("sleep", "600"), run=str(tmp_path / "no"), name="a")
    launched = launch_spec("local", 1, spec)
    with pytest.raises(TimeoutError, match=r"a-0 still run after 0\.1 s"):
        launched.wait(0.1)
    with pytest.raises(UsageError, match=r"a-0 of .* are launched already"):
        launch_spec("local", 2, spec)
    launched.cancel(grace_s=5.0)

    assert launched.wait(60.0)[0].report.state is State.CANCELLED


def test_who_waits_bears_a_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One answer that does not come is no end, and takes no time that was not given."""
    spec = IslandSpec(command=("sleep", "2"), run=str(tmp_path / "no"), name="a")
    launched = launch_spec("local", 1, spec)
    faltering = Launched(launched.handle, Faltering(launched.launcher))
    (result,) = faltering.wait(60.0)

    assert result.report.state is State.FINISHED
    assert "It is away. Retrying." in caplog.text
    away = Launched(launched.handle, Failing(Unreachable("It is away.")))
    with pytest.raises(TimeoutError, match=r"a-0 still run after 0\.1 s"):
        away.wait(0.1)
    for error in (Refused("You may not."), UsageError("It cannot be.")):
        with pytest.raises(type(error)):
            Launched(launched.handle, Failing(error)).wait(60.0)


class Failing:
    """A launcher that always fails in the same way."""

    def __init__(self, error: AtollError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


def test_a_silence_has_an_end() -> None:
    """It is told once, is over with an answer, and too long a one is an error."""
    instants = iter([0.0, SILENT_S, SILENT_S + 1.0, 2 * SILENT_S + 2.0])
    patience = PollRetry(SimpleNamespace(now_s=lambda: next(instants)))
    error = Unreachable("It is away.")
    told = [len(patience.note_failure(error)) for _ in range(2)]
    patience.answered()
    told += [len(patience.note_failure(error))]

    assert told == [1, 0, 1]
    with pytest.raises(Unreachable, match="It is away"):
        patience.note_failure(error)


def test_of_two_launches_of_one_name_one_is_refused(
    engine: Callable[[str, str], str],
) -> None:
    """However close to each other they come: who is second finds what is first."""
    name = engine("meeting", MEETING)
    spec = IslandSpec(command=("sleep", "600"), run="/no/run", name="a")
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(launch_spec, name, 1, spec) for _ in range(2)]
    errors = [each.exception() for each in both if each.exception() is not None]

    assert [type(each) for each in errors] == [UsageError]
    assert "a-0 of /no/run are launched already" in str(errors[0])
    assert len(LaunchRecords().records()) == 1


@pytest.mark.parametrize("cannot", [False, True])
def test_a_launch_that_breaks_leaves_nothing_or_a_handle(
    cannot: bool, engine: Callable[[str, str], str]
) -> None:
    """What was started before the failure is ended; or the book still has it."""
    name = engine(f"breaking_{cannot}".lower(), f"CANNOT = {cannot}\n{BREAKING}")
    spec = IslandSpec(command=("sleep", "600"), run="/no/run", name="a")
    with pytest.raises(RemoteError, match="the line") as caught:
        launch_spec(name, 1, spec)

    records = LaunchRecords().records()
    assert len(records) == cannot
    if cannot:
        assert f"atoll cancel {records[0].handle.id}" in str(caught.value)


def test_what_runs_is_never_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many were launched since: the oldest that are over go."""
    monkeypatch.setattr(launch_records, "MAX_RECORDS", 1)
    spec = IslandSpec(command=("sleep", "600"), run=str(tmp_path / "no"), name="a")
    oldest = launch_spec("local", 1, spec)
    away = replace(oldest.handle, id="away", engine="no_such", begun_at_s=1.0)
    LaunchRecords().keep(Record(away, spec))
    for name in ("b", "c", "d"):
        over = replace(spec, command=("true",), name=name)
        launch_spec("local", 1, over).wait(60.0)
    known = {each.handle.id for each in LaunchRecords().records()}
    names = [each.handle.name for each in LaunchRecords().records()]
    LaunchRecords().forget("away")

    assert {"away", oldest.handle.id} <= known
    assert names == ["a", "a", "c", "d"]


def test_a_damaged_book_is_told(tmp_path: Path) -> None:
    """What cannot be read is named, and nothing is guessed."""
    launch_records = LaunchRecords(tmp_path / "book")
    (tmp_path / "book").mkdir(mode=0o700)
    path = tmp_path / "book" / "a.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps({"handle": {}, "spec": {}}))
    with pytest.raises(CorruptError, match=r"a\.json is no record of a launch"):
        launch_records.records()


def test_a_launch_that_could_not_be_read_again_is_refused(tmp_path: Path) -> None:
    """One that is too large would hide every other one; nothing of it is started."""
    much = {"MUCH": "\N{SNOWMAN}" * 100_000}
    spec = IslandSpec(command=("true",), run="/no/run", name="a", environment=much)
    with pytest.raises(UsageError, match=r"has \d+ bytes, more than"):
        launch_spec("local", 1, spec)

    assert LaunchRecords().records() == []


def test_a_command_is_words() -> None:
    """A text is not split by guessing."""
    with pytest.raises(UsageError, match="is one text"):
        launch("local", 1, "/no/run", "python train.py")


def test_failures_are_grouped_by_cause() -> None:
    """Each cause once, and the same last words once."""
    said = {0: ["x"], 1: ["x"], 2: ["y"]}
    reports = [
        atoll.launch.Report(index=i, name=f"a-{i}", state=State.FAILED, reason="code 1")
        for i in said
    ]

    assert list(failures(reports, lambda each: said[each.index])) == [
        "a-0, a-1, a-2 failed: code 1",
        "  a-0 printed:",
        "    x",
        "  a-1: as a-0",
        "  a-2 printed:",
        "    y",
    ]


def test_secrets_are_found_where_they_are_said_to_be(tmp_path: Path) -> None:
    """In a variable or a private file; and one that is not there is named."""
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text("hush\n")
    found = resolve({"A": "env:B", "C": f"file:{file}"}, environment={"B": "shh"})

    assert {name: value.reveal() for name, value in found.items()} == {
        "A": "shh",
        "C": "hush",
    }
    with pytest.raises(UsageError, match="A is to come from B, which is not set"):
        resolve({"A": "env:B"}, environment={})
    file.chmod(0o644)
    with pytest.raises(UsageError, match="others may read this secret"):
        resolve({"C": f"file:{file}"}, environment={})


def test_a_pass_gives_an_island_the_same_key_anywhere(tmp_path: Path) -> None:
    """A machine that takes another's place is the same island; another is not."""
    seed = Secret("ab" * 32)
    one, two = (
        IslandCredentials(run="lagoon-1", seed=seed),
        IslandCredentials(run="lagoon-1", seed=seed),
    )
    read = IslandCredentials.from_json(one.to_secret().reveal())

    assert one.key("a-0") == two.key("a-0") == read.key("a-0")
    assert one.key("a-0") != one.key("a-1")
    assert "ab" * 32 not in repr(one)
    for damaged in ("", "{}", '{"version": 1, "seed": "zz"}', "[" * 20_000):
        with pytest.raises(CorruptError, match="is no valid pass of a launch"):
            IslandCredentials.from_json(damaged)


def test_a_bootstrap_needs_an_index(capsys: pytest.CaptureFixture[str]) -> None:
    """An engine that does not tell it is an error, never island 0."""
    spec = IslandSpec(
        command=("train.py",), run="/r", name="a", restarts=Restarts(max_restarts=0)
    )
    words = bootstrap_argv(spec, index_from="NO_SUCH_INDEX", first=2)
    with pytest.raises(SystemExit, match="NO_SUCH_INDEX='' is no index"):
        bootstrap(words[3:])
