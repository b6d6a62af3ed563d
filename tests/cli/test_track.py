"""`atoll track` writes a run once, from wherever its events are."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto import event_pb2  # type: ignore[import-untyped] # no stubs

from tests.cli.runs import as_user, run
from tests.cli.stores import Trained
from tests.run_client.conftest import served


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the directory of a run that has ended, for a user of its own."""
    with pytest.MonkeyPatch.context() as patch:
        as_user(patch, tmp_path_factory.mktemp("home"))
        path = tmp_path_factory.mktemp("ended") / "run"
        with served(path) as url:
            Trained(url).wait()
        yield path


def tags_of(folder: Path) -> list[tuple[str, int]]:
    """Return the points of all files of TensorBoard in a directory."""
    points: list[tuple[str, int]] = []
    for file in folder.glob("events.out.*"):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event: Any = event_pb2.Event.FromString(data[12 : 12 + length])
            points += [(value.tag, event.step) for value in event.summary.value]
            data = data[16 + length :]
    return points


def test_an_ended_run_is_written_once(
    capsys: pytest.CaptureFixture[str], directory: Path, tmp_path: Path
) -> None:
    """A second call writes nothing."""
    argv = ["track", str(directory), "--to", f"tensorboard:{tmp_path}"]
    first = run(capsys, *argv)
    points = tags_of(tmp_path)
    second = run(capsys, *argv, "--once")

    assert (first[0], second[0]) == (0, 0)
    assert ("round_counted/fragment-0", 1) in points
    by_fragment = [point for point in points if "/" in point[0]]
    assert len(by_fragment) == len(set(by_fragment))
    assert tags_of(tmp_path) == points


def test_a_live_run_is_followed_to_its_end(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounds that commit after the call began are written too."""
    as_user(monkeypatch, tmp_path / "home")
    with served(tmp_path / "run") as url:
        trained = Trained(url)
        code, _, err = run(
            capsys, "track", url, "--to", f"tensorboard:{tmp_path / 'curves'}"
        )
        trained.wait()
    rounds = {step for tag, step in tags_of(tmp_path / "curves") if "counted" in tag}

    assert (code, err) == (0, "")
    assert rounds == {1, 2, 3, 4, 5, 6}


def test_a_damaged_cursor_is_named(
    capsys: pytest.CaptureFixture[str],
    directory: Path,
    tmp_path: Path,
) -> None:
    """With the way to begin again."""
    argv = ["track", str(directory), "--once", "--to", f"tensorboard:{tmp_path}"]
    run(capsys, *argv)
    home = Path(os.environ["XDG_CONFIG_HOME"])
    for file in (home / "atoll" / "track").iterdir():
        document = json.loads(file.read_text())
        assert set(document) == {"process", "number"}
        file.write_text("{}")
    code, _, err = run(capsys, *argv)

    assert code == 2
    assert "is damaged" in err
    assert "Remove it" in err


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        ("influx:reef", "names no tracker. Write one of: wandb:..., mlflow:..."),
        ("wandb", "names no tracker"),
        ("webhook:env:NO_SUCH_HOOK", "NO_SUCH_HOOK of --to webhook:env"),
        ("webhook:http://example.com/", "needs an https:// URL"),
    ],
)
def test_wrong_sinks_are_refused(
    capsys: pytest.CaptureFixture[str], directory: Path, sink: str, message: str
) -> None:
    """Before anything is written."""
    code, _, err = run(capsys, "track", directory, "--to", sink)

    assert code == 2
    assert message in err
