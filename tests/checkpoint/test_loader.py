"""The newest checkpoint that is whole is found; others are passed over, and told."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

import atoll.checkpoint
from atoll.checkpoint.loader import find
from atoll.checkpoint.manifest import MANIFEST, dump_manifest, read_manifest
from atoll.errors import AtollWarning, CorruptError, NoSuchFile
from tests.checkpoint.objects import Weights, newest_value, save_value

WEIGHTS = "model-00000.safetensors"


def test_nothing_is_no_checkpoint(tmp_path: Path) -> None:
    """Where nothing was ever saved, there is nothing to restore, and no error."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "checkpoint-7").mkdir()

    assert atoll.checkpoint.newest(tmp_path) is None
    assert atoll.checkpoint.newest(tmp_path / "absent") is None


def test_the_last_one_saved_is_the_newest(tmp_path: Path) -> None:
    """Numbers only grow, also after a run went back to an older checkpoint."""
    for value in (1.0, 2.0, 3.0):
        save_value(tmp_path, value)
    first = tmp_path / "checkpoint-00000001"
    model = Weights()
    atoll.checkpoint.load(first, {"model": model})
    assert model.value == 1.0

    path = save_value(tmp_path, 4.0)

    assert path.name == "checkpoint-00000004"
    assert newest_value(tmp_path) == 4.0


def _cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _link(path: Path) -> None:
    target = path.with_name("elsewhere")
    os.rename(path, target)
    path.symlink_to(target)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


_HARMS: dict[str, Callable[[Path], None]] = {
    "removed": Path.unlink,
    "cut": _cut,
    "flipped": _flip,
    "empty": _empty,
    "link": _link,
    "folder": _folder,
    "pipe": _pipe,
}


@pytest.mark.parametrize("file", [WEIGHTS, "model-00000.json", MANIFEST])
@pytest.mark.parametrize("harm", _HARMS)
def test_a_torn_checkpoint_is_passed_over(tmp_path: Path, harm: str, file: str) -> None:
    """After any damage to a file the newest valid one is used, with a warning."""
    save_value(tmp_path, 1.0)
    torn = save_value(tmp_path, 2.0)
    _HARMS[harm](torn / file)

    with pytest.warns(AtollWarning, match=rf"checkpoint-00000002: .*{file}"):
        checkpoint = atoll.checkpoint.newest(tmp_path)

    assert checkpoint is not None
    assert checkpoint.number == 1
    assert [path for path, _ in checkpoint.passed_over] == [torn]


def test_a_checkpoint_whose_weights_were_removed_is_not_external(
    tmp_path: Path,
) -> None:
    """Weights that are merely gone are not external: only the marker says that."""
    save_value(tmp_path, 1.0)
    torn = save_value(tmp_path, 2.0)
    (torn / WEIGHTS).unlink()
    (torn / "model-00000.json").unlink()

    with pytest.warns(AtollWarning, match=r"model-00000.* is missing"):
        assert newest_value(tmp_path) == 1.0


def test_a_manifest_without_weights_and_without_the_marker_is_invalid(
    tmp_path: Path,
) -> None:
    """Also one whose manifest was rewritten to say nothing of a model."""
    save_value(tmp_path, 1.0)
    torn = save_value(tmp_path, 2.0)
    body = json.loads((torn / MANIFEST).read_text())
    body["components"].remove("model")
    body["files"] = {
        k: v for k, v in body["files"].items() if not k.startswith("model")
    }
    _rewrite(torn, body)

    with pytest.warns(AtollWarning, match=r"no weights and is not marked"):
        assert newest_value(tmp_path) == 1.0


def test_a_run_never_starts_afresh_in_silence(tmp_path: Path) -> None:
    """Where there are checkpoints and none is valid, an error lists them."""
    for value in (1.0, 2.0):
        (save_value(tmp_path, value) / WEIGHTS).unlink()

    with pytest.raises(CorruptError, match=r"00000002: .*missing.*00000001: .*missing"):
        atoll.checkpoint.load(tmp_path, {"model": Weights()})


class _Meanwhile:
    """A process that is slow: between two words the training saves and removes."""

    rank = 0
    size = 1

    def __init__(self, act: Callable[[], object]) -> None:
        self._acts = [act]

    def gather(self, text: str) -> list[str]:
        while self._acts:
            self._acts.pop()()
        return [text]


def test_a_checkpoint_that_is_removed_meanwhile_was_replaced(tmp_path: Path) -> None:
    """A reader beside a training that keeps one checkpoint finds the newer one."""
    save_value(tmp_path, 1.0)

    checkpoint = find(tmp_path, _Meanwhile(lambda: save_value(tmp_path, 2.0, keep=1)))

    assert checkpoint is not None
    assert checkpoint.number == 2
    assert checkpoint.passed_over == ()


def test_one_checkpoint_can_be_asked_for(tmp_path: Path) -> None:
    """A checkpoint's own directory is used, or refused; no other is taken instead."""
    first = save_value(tmp_path, 1.0)
    save_value(tmp_path, 2.0)

    assert newest_value(first) == 1.0

    (first / WEIGHTS).unlink()
    with pytest.raises(CorruptError, match="is missing"):
        newest_value(first)
    with pytest.raises(NoSuchFile, match="checkpoint-00000009 does not exist"):
        newest_value(tmp_path / "checkpoint-00000009")


def _rewrite(path: Path, body: dict[str, object]) -> None:
    """Write a manifest with the right digest of its content."""
    body.pop("digest", None)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["digest"] = blake3(text.encode()).hexdigest()
    (path / MANIFEST).write_text(json.dumps(body))


_ENTRY = {"size_bytes": 3, "digest": "0" * 64}
_HOSTILE: dict[str, object] = {
    "format": "something-else",
    "version": 2,
    "num_ranks": 10**9,
    "components": ["model", "shell"],
    "weights": "external",
    "at": [],
    "files": {"../../etc/passwd": _ENTRY},
}


@pytest.mark.parametrize("key", _HOSTILE)
def test_a_hostile_manifest_is_refused(tmp_path: Path, key: str) -> None:
    """A manifest with the right digest may still be inconsistent."""
    path = save_value(tmp_path, 1.0)
    body = json.loads((path / MANIFEST).read_text())
    _rewrite(path, {**body, key: _HOSTILE[key]})

    with pytest.raises(CorruptError):
        atoll.checkpoint.newest(tmp_path)


@pytest.mark.parametrize(
    "files",
    [
        {"model-00000.json": {"size_bytes": -1, "digest": "0" * 64}},
        {"model-00000.json": {"size_bytes": True, "digest": "0" * 64}},
        {"model-00000.json": {"size_bytes": 3, "digest": "Z" * 64}},
        {"model-00000.json": 7},
        {"model-00000.json": _ENTRY, "model-00003.json": _ENTRY},
        {"model-00000.json": _ENTRY, "data-00000.json": _ENTRY},
        {"model-00000.json/../x": _ENTRY},
        {"model-00000.json\n": _ENTRY},
        {"/model-00000.json": _ENTRY},
        {},
        None,
    ],
    ids=repr,
)
def test_hostile_lists_of_files_are_refused(tmp_path: Path, files: object) -> None:
    """No path leaves the directory, and no part is missing or too many."""
    path = save_value(tmp_path, 1.0)
    body = json.loads((path / MANIFEST).read_text())
    _rewrite(path, {**body, "components": ["model"], "files": files})

    with pytest.raises(CorruptError):
        read_manifest(path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        b'{"a":1,"a":2}',
        b'{"format":"atoll-checkpoint","version":1,"at":NaN}',
        b"9" * 5000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_a_manifest_that_is_no_json_is_refused(tmp_path: Path, text: bytes) -> None:
    """Nothing that a file holds makes reading it fail in any other way."""
    path = save_value(tmp_path, 1.0)
    (path / MANIFEST).write_bytes(text)

    with pytest.raises(CorruptError):
        atoll.checkpoint.newest(tmp_path)


def test_a_manifest_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    """A file of a terabyte of nothing costs nothing."""
    path = save_value(tmp_path, 1.0)
    with (path / MANIFEST).open("r+b") as file:
        file.truncate(2**40)

    with pytest.raises(CorruptError, match="more than the 67108864 allowed"):
        atoll.checkpoint.newest(tmp_path)


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Reading and writing a manifest gives the same bytes."""
    path = save_value(tmp_path, 1.0)

    assert dump_manifest(read_manifest(path)) == (path / MANIFEST).read_bytes()


def test_a_copied_checkpoint_is_as_good(tmp_path: Path) -> None:
    """A checkpoint does not contain its path: it may be moved to another machine."""
    path = save_value(tmp_path / "here", 5.0)
    shutil.copytree(path, tmp_path / "there" / path.name)

    assert newest_value(tmp_path / "there") == 5.0


def test_a_checkpoint_that_is_removed_while_it_is_read_was_replaced(
    tmp_path: Path,
) -> None:
    """A load beside a training that keeps one checkpoint ends with the newer one."""
    objects = {"model": Weights(1.0), "trainer": Weights(1.0)}
    atoll.checkpoint.save(tmp_path, objects)

    class Slow(Weights):
        """Saves the next checkpoint while it is restored."""

        def load_state_dict(self, state: object, /) -> None:
            super().load_state_dict(state)
            if self.value == 1.0:
                newer = {"model": Weights(2.0), "trainer": Weights(2.0)}
                atoll.checkpoint.save(tmp_path, newer, keep=1)

    model, trainer = Slow(0.0), Weights(0.0)
    loaded = atoll.checkpoint.load(tmp_path, {"model": model, "trainer": trainer})

    assert loaded is not None
    assert (model.value, trainer.value) == (2.0, 2.0)
