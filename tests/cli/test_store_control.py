"""What operators say to a run in a store, and what observers see of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atoll.errors import UsageError
from atoll.exchange import Frame
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.create import found_run, init
from atoll.exchange.bucket.documents import ControlDocument, MemberDocument, packed
from atoll.protocol import Heartbeat, Stats
from atoll.run_client import Action, Command
from atoll.run_client.store import StatusView, StoreObserver, write_control
from atoll.settings import RunSettings
from atoll.store import FileStore
from atoll.weights import FragmentState, lay_out, terms_of
from tests.cli.runs import as_user, run
from tests.cli.stores import MODEL, Trained, made, settings

Said = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(monkeypatch, tmp_path / "home")


class HandClock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


def beat_of(name: str, **changes: str) -> Heartbeat:
    """Return what an island says of itself."""
    stats = Stats(version="0.1.0", seconds=10.0, inner_steps=40, loss=2.5)
    told = replace(stats, **changes)  # type: ignore[arg-type]  # by name
    return Heartbeat(island=name, incarnation=1, step=7, stats=told)


def member(url: str, name: str, beats: int, **changes: object) -> MemberDocument:
    """Put the document of an island, as its heartbeats do."""
    with StoreObserver(url) as observing:
        document = MemberDocument(
            run=observing.reader.run,
            slot=ord(name[0]) - ord("a"),
            key=b"k",
            nonce=b"n",
            opened=(),
            stands=(),
            beats=beats,
            has_left=False,
            beat=beat_of(name),
        )
    document = replace(document, **changes)  # type: ignore[arg-type]  # by name
    key = keys.member(name, 1)
    FileStore(Path(url)).put(key, packed(documents.MEMBER, document, key))
    return document


def founded(place: Path, **run: object) -> str:
    """Make a run whose first weights are zeros."""
    given = RunSettings.from_dict(settings(**run).to_dict())
    init(str(place), given)
    store = FileStore(place)
    document = documents.fetch(store, documents.SETTINGS, keys.SETTINGS)
    states = []
    for index, layout in enumerate(lay_out(MODEL, given)):
        outer = terms_of(layout, given).outer
        zeros = np.zeros(layout.elements, np.float32)
        state = FragmentState.found(zeros, outer.optimizer)
        frame = state.to_frame(run=document.run, fragment=index, outer=outer)
        states.append(Frame(*frame))
    found_run(store, document, MODEL, states)
    return str(place)


def standings(view: StatusView) -> dict[str, str]:
    return {row["island"]: row["state"] for row in view.document()["islands"]}


def test_who_is_live_is_found_out_by_watching(tmp_path: Path) -> None:
    """A document that was there is seen; changed, live; unchanged for a lease, silent.

    No clock but the observer's own is read.
    """
    url, clock = founded(tmp_path / "store"), HandClock()
    member(url, "a", 1)
    member(url, "b", 1)
    member(url, "c", 5, has_left=True)
    with StoreObserver(url, clock=clock) as observing:
        view = StatusView(observing)
        assert standings(view) == {"a": "seen", "b": "seen", "c": "left"}
        said = view.document()
        assert said["state"] == "unknown"
        assert "Nothing has come from a, b for 0 s" in said["why"]

        clock.at_s = 6.0
        member(url, "a", 2)
        member(url, "d", 1)
        observing.look()
        assert standings(view)["a"] == "live"
        assert standings(view)["d"] == "live"  # it has come while we looked
        assert view.document()["state"] == "training"

        clock.at_s = 30.5
        member(url, "a", 3)
        observing.look()
        assert standings(view) == {"a": "live", "b": "silent", "c": "left", "d": "live"}
        (silent,) = [row for row in view.document()["islands"] if row["island"] == "b"]
        assert silent["seen_s"] == 30.5

        clock.at_s = 70.0
        observing.look()
        said = view.document()
        assert said["state"] == "waiting"
        assert said["why"] == "Waits for 1 more of quorum=1. Silent: a, b, d."


def test_islands_of_a_store_with_the_same_data_are_shown(
    tmp_path: Path, capsys: Said
) -> None:
    """`atoll status` names them, and what to do about it."""
    url = founded(tmp_path / "store")
    for name in "ab":
        member(url, name, 1, beat=beat_of(name, first_batch="batch-1"))

    assert "a, b have begun with the same batch" in run(capsys, "status", url)[1]


def test_an_islands_row_is_what_it_says_of_itself(tmp_path: Path) -> None:
    """Loss, version and pace: ten seconds for 40 inner steps are one for each window.

    # sync_every is 4: 10 s / 40 * 4 = 1 s
    """
    url = founded(tmp_path / "store")
    member(url, "a", 1)
    with StoreObserver(url) as observing:
        (row,) = StatusView(observing).document()["islands"]

    assert (row["loss"], row["version"], row["pace_s"]) == (2.5, "0.1.0", 1.0)
    assert (row["incarnation"], row["slot"], row["step"]) == (1, 0, 7)
    assert (row["step_s"], row["window"], row["share"]) == (None, 4, None)


def test_a_run_without_its_decider_says_so(tmp_path: Path) -> None:
    """Others may be live: nobody else closes a round."""
    given = settings().with_values({"run.start_islands": 1, "store.decider": "tokyo"})
    init(str(tmp_path / "store"), given)
    url, clock = str(tmp_path / "store"), HandClock()
    with StoreObserver(url, clock=clock) as observing:
        view = StatusView(observing)
        member(url, "a", 1)
        observing.look()
        assert view.document()["state"] == "founding"
        assert "Waits for tokyo" in view.document()["why"]


def test_what_an_operator_says_has_the_next_number(
    tmp_path: Path, capsys: Said
) -> None:
    """One document each; what has been said shows in the status."""
    url = founded(tmp_path / "store")
    code, out, _ = run(capsys, "control", url, "pause")
    assert code == 0
    assert "pause is control/1. Islands read it with their next heartbeat." in out
    said = json.loads(run(capsys, "status", url, "--json")[1])
    assert said["state"] == "paused"
    assert said["why"].endswith(f"`atoll control {url} resume`.")

    run(capsys, "control", url, "resume")
    code, out, _ = run(capsys, "control", url, "set", "run.quorum=2", "--json")
    said = json.loads(out)
    assert (code, said["epoch"], said["quorum"]) == (0, 1, 2)
    code, out, _ = run(capsys, "control", url, "drain")
    assert "stop is control/4. Islands read it" in out
    assert "Round 0 is the last." in out
    assert json.loads(run(capsys, "status", url, "--json")[1])["state"] == "ended"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("set", "sync.sync_every=3"), "sync.sync_every cannot change during a run"),
        (("set", "run.quorum=-1"), "run.quorum=-1 must be a whole number from 1"),
        (("evict", "zoe"), "No island is called 'zoe'. Known are: a."),
        (("evict",), "evict needs the name of one island"),
    ],
)
def test_what_cannot_be_is_not_said(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: Said
) -> None:
    """Exit code 2, and no document."""
    url = founded(tmp_path / "store")
    member(url, "a", 1)
    code, _, err = run(capsys, "control", url, *words)

    assert code == 2
    assert message in err
    assert FileStore(Path(url)).items(keys.CONTROL) == []


def test_who_speaks_second_takes_the_next_number(tmp_path: Path) -> None:
    """A number that another has taken meanwhile is read first."""
    url = founded(tmp_path / "store")
    with StoreObserver(url) as first, StoreObserver(url) as second:
        taken = ControlDocument(run=first.reader.run, action="pause", values={})
        key = keys.control(1)
        FileStore(Path(url)).put_new(key, packed(documents.CONTROL, taken, key))
        number, _ = write_control(second, Command(Action.RESUME))

        assert number == 2
        assert [each.action for each in second.reader.view.controls] == [
            "pause",
            "resume",
        ]


def test_an_evicted_life_is_named(tmp_path: Path, capsys: Said) -> None:
    """The latest incarnation: the next one may come back."""
    url = founded(tmp_path / "store")
    member(url, "a", 1)
    assert run(capsys, "control", url, "evict", "a")[0] == 0
    said = json.loads(run(capsys, "status", url, "--json")[1])
    (row,) = said["islands"]
    document = documents.fetch(FileStore(Path(url)), documents.CONTROL, keys.control(1))

    assert row["state"] == "left"
    assert (document.island, document.incarnation) == ("a", 1)


def until(observing: StoreObserver, has_come: Callable[[], bool]) -> None:
    """Look until something has come."""
    for _ in range(600):
        observing.look()
        if has_come():
            return
        observing.pause(0.1)
    raise AssertionError("nothing has come")


def test_everybody_reads_with_which_round_a_decay_begins(tmp_path: Path) -> None:
    """It is an operator's word like others, and is judged like theirs."""
    url = founded(tmp_path / "store")
    with StoreObserver(url) as observing, StoreObserver(url) as other:
        write_control(observing, Command(Action.SET, {"run.decay_round": 4}))
        other.look()
        assert other.reader.view.position(0.0).decay_round == 4
        with pytest.raises(
            UsageError, match=r"decay_round=1 is not ahead .* Give [23] or"
        ):
            write_control(other, Command(Action.SET, {"run.decay_round": 1}))


def test_islands_end_with_the_round_that_a_stop_names(
    tmp_path: Path, capsys: Said
) -> None:
    """Paused first, so that nothing is under way: both end with the same weights."""
    url = made(tmp_path / "store")
    trained = Trained(url)
    with StoreObserver(url) as observing:
        view = observing.reader.view
        until(observing, lambda: min([r.number for r in view.state.rounds] or [0]) > 5)
        write_control(observing, Command(Action.PAUSE))
        until(
            observing,
            lambda: all(d.beat.waits_for is not None for d in view.documents.values()),
        )
        _, document = write_control(observing, Command(Action.STOP))
        last = document.last_round
        write_control(observing, Command(Action.RESUME))
        anchors = trained.wait()

    said = json.loads(run(capsys, "status", url, "--json")[1])
    assert (said["state"], said["round"]) == ("ended", last)
    for ours, theirs in zip(anchors["a"], anchors["b"], strict=True):
        assert ours.tobytes() == theirs.tobytes()
