"""A bundle's files on disk: whole, reused, and never what somebody has edited."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.bundle import stage, staged
from atoll.errors import DiskError
from tests.bundle.samples import PLAIN, WITH_CODE, a_bundle

NESTED = WITH_CODE | {"deep/er/x.txt": b"x"}


def files_in(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_a_bundle_is_staged_whole(tmp_path: Path) -> None:
    """Every file is there, nothing else is, and nobody else may enter."""
    bundle = a_bundle(NESTED)
    directory = stage(bundle, tmp_path / "bundles")

    assert files_in(directory) == NESTED
    assert [each.name for each in (tmp_path / "bundles").iterdir()] == [bundle.digest]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_staged_bundle_is_used_again(tmp_path: Path) -> None:
    """The same directory, with the same files: nothing is written anew."""
    bundle = a_bundle(NESTED)
    before = stage(bundle, tmp_path).stat().st_ino

    assert stage(bundle, tmp_path).stat().st_ino == before
    found = staged(tmp_path, bundle.digest)
    assert found is not None
    assert found.data == bundle.data


@pytest.mark.parametrize("name", ["config.json", "more.txt", "sub/more.py"])
def test_an_edited_stage_is_not_used(tmp_path: Path, name: str) -> None:
    """Whatever was changed or added there, the bundle is written anew."""
    bundle = a_bundle()
    directory = stage(bundle, tmp_path)
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_bytes(b"edited")

    assert staged(tmp_path, bundle.digest) is None
    assert files_in(stage(bundle, tmp_path)) == PLAIN
    assert len(list(tmp_path.iterdir())) == 1


def test_a_partial_stage_is_not_used(tmp_path: Path) -> None:
    """An empty directory of the right name, or one that lacks a file, is not it."""
    bundle = a_bundle()
    (tmp_path / bundle.digest).mkdir()

    assert staged(tmp_path, bundle.digest) is None
    (stage(bundle, tmp_path) / "tokenizer.json").unlink()
    assert staged(tmp_path, bundle.digest) is None
    assert files_in(stage(bundle, tmp_path)) == PLAIN


def test_many_may_stage_at_once(tmp_path: Path) -> None:
    """One of them is first, and all have a whole one, whatever was there."""
    bundle = a_bundle(NESTED)
    (tmp_path / bundle.digest).mkdir()
    with ThreadPoolExecutor(8) as pool:
        places = list(pool.map(lambda _: stage(bundle, tmp_path), range(32)))

    assert set(places) == {tmp_path / bundle.digest}
    assert files_in(places[0]) == NESTED
    assert len(list(tmp_path.iterdir())) == 1


def test_a_disk_that_takes_nothing_leaves_nothing(tmp_path: Path) -> None:
    """The name is not there, and where to put it instead is said."""
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(DiskError, match="XDG_CACHE_HOME"):
        stage(a_bundle(), tmp_path / "file")
