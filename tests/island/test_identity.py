"""The files that island keys live in."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.errors import CorruptError, UsageError
from atoll.island.identity import KEY_BYTES, island_key

ASK = """
import sys
from pathlib import Path
from atoll.island.identity import island_key
sys.stdout.buffer.write(island_key(Path(sys.argv[1]), run="r", island="a"))
"""


def the_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def test_a_key_is_made_once_and_found_again(tmp_path: Path) -> None:
    """The next incarnation has the key of the first; no other user may read it."""
    directory = tmp_path / "new" / "keys"
    key = island_key(directory, run="r", island="a")

    assert len(key) == KEY_BYTES
    assert island_key(directory, run="r", island="a") == key
    assert stat.S_IMODE(the_file(directory).stat().st_mode) == 0o600


def test_every_island_of_every_run_has_its_own(tmp_path: Path) -> None:
    """For any names: paths, spaces, other alphabets."""
    names = [("r", "a"), ("r", "b"), ("s", "a"), ("../r", "a/b"), ("r", "Île d'été")]
    keys = {island_key(tmp_path, run=run, island=island) for run, island in names}

    assert len(keys) == len(names)
    assert len(list(tmp_path.iterdir())) == len(names)


def test_processes_that_ask_at_the_same_time_get_one_key(tmp_path: Path) -> None:
    """The first process makes it, and leaves no temporary file."""
    command = [sys.executable, "-c", ASK, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    keys = {process.communicate()[0] for process in processes}

    assert keys == {island_key(tmp_path, run="r", island="a")}
    assert the_file(tmp_path).suffix == ".key"


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    """The error has the remedy."""
    island_key(tmp_path, run="r", island="a")
    the_file(tmp_path).chmod(0o644)

    with pytest.raises(UsageError, match=r"mode 644.*chmod 600"):
        island_key(tmp_path, run="r", island="a")


@pytest.mark.parametrize("content", [b"", b"short", bytes(KEY_BYTES + 1)], ids=len)
def test_a_file_that_holds_no_key_is_damage(tmp_path: Path, content: bytes) -> None:
    """A key is never cut or guessed."""
    island_key(tmp_path, run="r", island="a")
    the_file(tmp_path).write_bytes(content)

    with pytest.raises(CorruptError, match="holds no key"):
        island_key(tmp_path, run="r", island="a")


def test_a_directory_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    """Nothing is written over."""
    path = tmp_path / "taken"
    path.write_text("mine")

    with pytest.raises(UsageError, match="Choose a place"):
        island_key(path, run="r", island="a")
    assert path.read_text() == "mine"
