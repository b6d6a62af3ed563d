"""Weights that wait for a model: the first joining founds the run with them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from atoll.coordinator.app import Coordinator
from atoll.coordinator.directory import open_service
from atoll.coordinator.initial_weights import (
    WeightsFile,
    discard,
    find_init_file,
    store_init_file,
)
from atoll.coordinator.move import JOURNAL
from atoll.disk import SystemDisk
from atoll.errors import DiskError, UsageError
from atoll.exchange import CoordinatorExchange
from atoll.exchange.calls import JoinCall, StateCall
from atoll.island.numpy_model import vector_model
from atoll.protocol import JoinReply, JoinRequest
from atoll.settings import RunSettings
from atoll.testing.fixtures import plain_settings
from tests.coordinator.apart import serving_apart
from tests.coordinator.serving import line_to, serving

VALUES = np.arange(70_000, dtype=np.float32)
MODEL = vector_model({"w": (len(VALUES),)})
SETTINGS = plain_settings()


def saved(path: Path, values: np.ndarray = VALUES) -> Path:
    """Write one tensor as a safetensors file, without any metadata."""
    head = (
        f'{{"w":{{"dtype":"F32","shape":[{len(values)}],'
        f'"data_offsets":[0,{values.nbytes}]}}}}'
    ).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + values.tobytes())
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return the directory of a run that is not begun, with a file that waits."""
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    put(directory, saved(tmp_path / "file"))
    return directory


def put(directory: Path, path: Path) -> None:
    disk = SystemDisk(directory / JOURNAL)
    store_init_file(disk, path)
    disk.close()


@contextmanager
def joining(coordinator: Coordinator, island: str) -> Iterator[CoordinatorExchange]:
    with line_to(coordinator) as line:
        yield CoordinatorExchange(line, key=island.encode(), nonce=b"1")


def join(coordinator: Coordinator, island: str | None) -> tuple[JoinReply, np.ndarray]:
    """Join, and return the answer with the anchor that the run has then."""
    with joining(coordinator, island or "anybody") as exchange:
        joined = exchange.join(JoinRequest(model=MODEL, island=island))
        return joined, exchange.state(0).body.view(np.float32)


@pytest.mark.parametrize("island", ["a", None], ids=["named", "unnamed"])
def test_the_first_island_is_no_founder(directory: Path, island: str | None) -> None:
    """It is told where the founded run is, and finds the weights there."""
    with serving(directory, SETTINGS) as coordinator:
        joined, anchor = join(coordinator, island)

    assert (joined.is_founder, joined.position.rounds) == (False, (1,))
    assert anchor.tobytes() == VALUES.tobytes()
    assert find_init_file(directory / JOURNAL) is None


def test_a_repeat_of_the_first_joining_is_the_same_life(directory: Path) -> None:
    """Its answer may be lost: nothing is founded twice."""
    with serving(directory, SETTINGS) as coordinator:
        first, _ = join(coordinator, "a")
        again, anchor = join(coordinator, "a")

    assert (again.incarnation, again.is_founder) == (first.incarnation, False)
    assert anchor.tobytes() == VALUES.tobytes()


def test_islands_that_come_at_once_all_find_the_same(directory: Path) -> None:
    """One joining founds the run; the others ask again until it has."""
    anchors: dict[str, bytes] = {}
    start = threading.Barrier(6)

    def come(island: str) -> None:
        start.wait()
        joined, anchor = join(coordinator, island)
        if not joined.is_founder:
            anchors[island] = anchor.tobytes()

    with serving(directory, SETTINGS) as coordinator:
        threads = [threading.Thread(target=come, args=[f"i{n}"]) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        told = [e.name for e in coordinator.events.after(0)]

    assert anchors == {f"i{n}": VALUES.tobytes() for n in range(6)}
    assert told.count("run_founded") == 1


def test_a_crash_before_the_run_is_begun_leaves_the_file(directory: Path) -> None:
    """The file alone is there: the run that is begun then is founded with it."""
    assert not (directory / JOURNAL / "log").exists()
    with serving(directory, SETTINGS):
        pass
    with serving(directory, None) as coordinator:  # and a restart before any island
        assert join(coordinator, "a")[1].tobytes() == VALUES.tobytes()


def test_a_crash_after_the_joining_leaves_the_file(directory: Path) -> None:
    """The island is a member and the run has no weights: its repeat founds it."""
    disk, service = open_service(directory, SETTINGS, now_s=0.0)
    call = JoinCall(JoinRequest(model=MODEL, island="a"), b"a", b"1")
    before = service.handle(call, 0.0)
    disk.close()
    with serving(directory, None) as coordinator:
        joined, anchor = join(coordinator, "a")

    assert isinstance(before, JoinReply)
    assert (before.is_founder, joined.is_founder) == (True, False)
    assert joined.incarnation == before.incarnation
    assert anchor.tobytes() == VALUES.tobytes()


def test_a_crash_after_the_founding_leaves_weights(
    directory: Path, tmp_path: Path
) -> None:
    """A file that could not be removed in time is not looked at any more."""
    with serving(directory, SETTINGS) as coordinator:
        join(coordinator, "a")
    put(directory, saved(tmp_path / "late", VALUES[::-1].copy()))
    with serving(directory, None) as coordinator:
        assert join(coordinator, "b")[1].tobytes() == VALUES.tobytes()


def test_the_last_file_that_was_kept_counts(directory: Path, tmp_path: Path) -> None:
    """One that was being written is swept, and one before it has gone."""
    root = directory / JOURNAL
    (root / "init" / "7~").write_bytes(b"half")
    put(directory, saved(tmp_path / "other", VALUES[::-1].copy()))

    assert [path.name for path in (root / "init").iterdir()] == ["2"]
    path = find_init_file(root)
    assert path is not None
    states = WeightsFile(path).states(MODEL, SETTINGS, run="run")
    assert states[0][1].tobytes() == VALUES[::-1].tobytes()
    discard(root)
    assert find_init_file(root) is None


def test_a_source_that_cannot_be_read_leaves_the_one_before(directory: Path) -> None:
    """Nothing is kept in its place."""
    with pytest.raises(UsageError, match="gone cannot be read: No such file"):
        put(directory, directory / "gone")

    assert find_init_file(directory / JOURNAL) == directory / JOURNAL / "init" / "1"


def test_a_full_disk_founds_nothing_and_loses_nothing(directory: Path) -> None:
    """The island is told, and its next attempt founds the run: 280 KB do not fit."""
    call = JoinCall(JoinRequest(model=MODEL, island="a"), b"a", b"1")
    with serving_apart(directory, SETTINGS.to_dict()) as apart, apart.line() as line:
        apart.limit_files(100_000)
        with pytest.raises(DiskError):
            line.call(call)
        assert find_init_file(directory / JOURNAL) is not None
        apart.limit_files(None)
        joined = line.call(call)
        state = line.call(StateCall(0))

    assert isinstance(joined, JoinReply)
    assert not joined.is_founder
    assert state.body.tobytes() == VALUES.tobytes()  # type: ignore[union-attr] # a frame
    assert find_init_file(directory / JOURNAL) is None


def test_the_weights_are_in_memory_once(tmp_path: Path) -> None:
    """64 MB in the file become anchor and velocity, 128 MB, and little besides."""
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    values = np.ones(2**24, np.float32)
    put(directory, saved(tmp_path / "file", values))
    settings = RunSettings.from_dict({}).to_dict()
    model = vector_model({"w": (len(values),)})
    call = JoinCall(JoinRequest(model=model, island="a"), b"a", b"1")
    with serving_apart(directory, settings) as apart, apart.line() as line:
        apart.forget_highest()
        before = apart.rss_bytes
        line.call(call)
        grown = apart.highest_rss_bytes - before

    assert grown < 2 * values.nbytes + 32e6
