"""The code of islands: what of a directory is packed, and what is let out of it."""

from __future__ import annotations

import os
import subprocess
import tracemalloc
from pathlib import Path

import pytest

import atoll
from atoll import RunSettings
from atoll.bundle.archive import MAX_CODE_BYTES, MAX_CODE_FILES, pack
from atoll.coordinator.directory import CodeFiles
from atoll.errors import CorruptError, Refused, UsageError
from atoll.launch import code as shipping
from atoll.launch.code import code_files, extract, fetch_code, pack_code, ship_code
from atoll.wire import blake3_digest


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")


def names(root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in code_files(root)]


def git(directory: Path, *arguments: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "-C", str(directory), *arguments], check=True)


def test_gitignore_is_respected(tmp_path: Path) -> None:
    """Patterns of any depth, of one directory, of directories, and exceptions."""
    write(
        tmp_path,
        "train.py",
        "data/rows.txt",
        "deep/data/rows.txt",
        "deep/keep.log",
        "deep/drop.log",
        "deep/only.txt",
        "out/a/b.txt",
        "only.txt",
        "x1.tmp",
        "xy.tmp",
    )
    (tmp_path / ".gitignore").write_text(
        "# a comment\n\n/data/\n*.log\n!keep.log\n/only.txt\nout/**\nx[0-9].tmp\n"
        "[z-a]\n"
    )
    (tmp_path / "deep" / ".gitignore").write_text("only.txt\n")
    git(tmp_path, "init", "--quiet")

    assert names(tmp_path) == [
        "deep/data/rows.txt",
        "deep/keep.log",
        "train.py",
        "xy.tmp",
    ]


@pytest.mark.parametrize("is_worktree", [False, True])
def test_patterns_of_a_repository_apply_below(
    is_worktree: bool, tmp_path: Path
) -> None:
    """Those of every directory up to its root, and its own excludes; none above it.

    A tracked file is left out as well if a pattern matches it, or if it is deleted.
    """
    top = tmp_path / "repository"
    if is_worktree:
        git(tmp_path / "main", "init", "--quiet")
        commit = ("commit", "--quiet", "--allow-empty", "--message", "first")
        user = ("-c", "user.name=a", "-c", "user.email=a@b")
        git(tmp_path / "main", *user, *commit)
        git(tmp_path / "main", "worktree", "add", "--quiet", str(top))
    else:
        git(top, "init", "--quiet")
    write(top, "a/b/train.py", "a/b/x.log", "a/b/keep.log", "a/b/notes.txt")
    write(top, "a/b/data/rows.txt", "a/b/c/data/rows.txt", "a/b/c/out.tmp")
    write(top, "a/b/tracked.log", "a/b/data/tracked.py", "a/b/deleted.py")
    write(top, "a/b/tracked.py")
    main = (tmp_path / "main" if is_worktree else top) / ".git"
    (main / "info" / "exclude").write_text("notes.txt\n*.tmp\n")
    (tmp_path / ".gitignore").write_text("*.py\n")
    (top / ".gitignore").write_text("*.log\n/a/b/data/\n")
    (top / "a" / ".gitignore").write_text("!keep.log\n!out.tmp\n/b/c/data\n")
    git(top, "add", "--force", "a/b/tracked.log", "a/b/data/tracked.py")
    git(top, "add", "a/b/tracked.py", "a/b/deleted.py")
    (top / "a" / "b" / "deleted.py").unlink()

    shipped = ["c/out.tmp", "keep.log", "tracked.py", "train.py"]
    assert names(top / "a" / "b") == shipped


def test_an_ignored_directory_is_shipped_by_its_own_patterns(tmp_path: Path) -> None:
    """It was chosen: a repository that ignores it, or all, does not empty it."""
    git(tmp_path, "init", "--quiet")
    write(tmp_path, "mine/train.py", "mine/sub/x.log", "mine/sub/lib.py")
    (tmp_path / ".gitignore").write_text("*\n")
    (tmp_path / "mine" / ".gitignore").write_text("*.log\n")
    with pytest.raises(UsageError, match=r"Nothing in .* is code.*git check-ignore"):
        pack_code(tmp_path)

    assert names(tmp_path / "mine") == ["sub/lib.py", "train.py"]


def test_a_repository_within_a_repository_lists_its_own_files(tmp_path: Path) -> None:
    """As a submodule; by its own patterns."""
    git(tmp_path, "init", "--quiet")
    git(tmp_path / "lib", "init", "--quiet")
    write(tmp_path, "train.py", "lib/a.py", "lib/a.log")
    (tmp_path / "lib" / ".gitignore").write_text("*.log\n")

    assert names(tmp_path) == ["lib/a.py", "train.py"]


def test_a_gitignore_outside_of_a_repository_is_refused(tmp_path: Path) -> None:
    """Otherwise a file would be shipped that its owner has excluded."""
    write(tmp_path, "train.py", "lib/secret.txt")
    (tmp_path / "lib" / ".gitignore").write_text("secret.txt\n")
    with pytest.raises(UsageError, match=r"has no effect outside.*`git init`"):
        pack_code(tmp_path)
    git(tmp_path, "init", "--quiet")

    assert names(tmp_path) == ["train.py"]


def test_a_repository_that_git_cannot_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With git's own message; and so is one on a machine without git."""
    write(tmp_path, "train.py", ".git/HEAD")
    with pytest.raises(UsageError, match=r"git cannot list .*not a git repo.*Repair"):
        pack_code(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"git cannot be run: .* Install it"):
        pack_code(tmp_path)


def test_a_hook_of_git_ships_the_directory_that_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its variables select another repository."""
    git(tmp_path / "other", "init", "--quiet")
    git(tmp_path / "mine", "init", "--quiet")
    write(tmp_path, "other/other.py", "mine/train.py")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))

    assert names(tmp_path / "mine") == ["train.py"]


@pytest.mark.parametrize("is_repository", [False, True])
def test_what_is_private_is_never_packed(is_repository: bool, tmp_path: Path) -> None:
    """Runs, keys, tokens, environments and hidden files stay where they are."""
    if is_repository:
        git(tmp_path, "init", "--quiet")
    write(
        tmp_path,
        "train.py",
        ".env",
        ".hidden/x.py",
        "first.atoll/operator.token",
        "island.token",
        "tokyo-1.pem",
        "env/pyvenv.cfg",
        "env/lib/x.py",
        "__pycache__/train.pyc",
    )

    assert names(tmp_path) == ["train.py"]


def test_equal_directories_are_equal_bytes(tmp_path: Path) -> None:
    """Neither times nor the order on the disk change the digest."""
    for name in ("one", "two"):
        order = ("b.py", "a/c.py") if name == "one" else ("a/c.py", "b.py")
        write(tmp_path / name, *order)
        os.utime(tmp_path / name / "b.py", (1, len(name)))
    (tmp_path / "two" / "b.py").chmod(0o755)
    one, two = pack_code(tmp_path / "one"), pack_code(tmp_path / "two")

    assert one == two
    assert one.num_files == 2


def test_what_cannot_be_packed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its name, and the way to leave it out."""
    write(tmp_path, "train.py")
    (tmp_path / "link.py").symlink_to("/etc/hostname")
    with pytest.raises(UsageError, match=r"link.py is no plain file.*\.gitignore"):
        pack_code(tmp_path)
    (tmp_path / "link.py").unlink()
    write(tmp_path, "a b.py")
    with pytest.raises(UsageError, match=r"'a b.py' cannot be.*\.gitignore"):
        pack_code(tmp_path)
    monkeypatch.setattr(shipping, "MAX_SHIPPED_BYTES", 8)
    with pytest.raises(UsageError, match="more than 8 bytes"):
        pack_code(tmp_path)


def test_a_repository_of_many_files_is_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as are packed are kept by a coordinator and let out, and no more."""
    files = {f"d{n // 100}/f{n}.py": b"" for n in range(MAX_CODE_FILES)}
    data = pack(files, max_files=MAX_CODE_FILES)
    CodeFiles(tmp_path).store(blake3_digest(data).hex(), data)

    assert len(data) < MAX_CODE_BYTES - shipping.MAX_SHIPPED_BYTES
    more = pack({**files, "more.py": b""}, max_files=MAX_CODE_FILES + 1)
    with pytest.raises(CorruptError, match="16385 files are too many"):
        extract(more, tmp_path / "out")
    write(tmp_path / "mine", *(f"f{n}.py" for n in range(1100)))
    code = pack_code(tmp_path / "mine")
    extract(code.data, tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == code.num_files == 1100
    monkeypatch.setattr(shipping, "MAX_CODE_FILES", 1099)
    with pytest.raises(UsageError, match=r"or 1099 files, with .*\.gitignore"):
        pack_code(tmp_path / "mine")


@pytest.mark.parametrize("is_tracked", [False, True])
def test_a_list_without_end_is_not_kept(
    is_tracked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first files beyond the limit end it, before the rest takes memory."""
    git(tmp_path, "init", "--quiet")
    write(tmp_path, *(f"{'x' * 200}{n}" for n in range(5000)))
    if is_tracked:
        git(tmp_path, "add", ".")
    monkeypatch.setattr(shipping, "MAX_CODE_FILES", 10)
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=r"or 10 files, with .*\.gitignore"):
            pack_code(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 2**19


def test_an_archive_stays_in_its_directory(tmp_path: Path) -> None:
    """A link that an earlier life left does not lead files elsewhere."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (inside / "sub").symlink_to(outside)
    (inside / "train.py").symlink_to(outside / "victim")
    with pytest.raises(CorruptError, match="outside of"):
        extract(pack({"sub/a.py": b"x"}), inside)
    extract(pack({"train.py": b"new"}), inside)

    assert list(outside.iterdir()) == []
    assert (inside / "train.py").read_bytes() == b"new"
    with pytest.raises(CorruptError, match="no archive"):
        extract(b"x" * 1024, inside)


def test_a_store_keeps_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put under the run is fetched by its digest, and altered it is refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = str(tmp_path / "run")
    atoll.init(run, RunSettings.from_dict({}))
    write(tmp_path / "mine", "train.py", "lib/a.py")
    code = pack_code(tmp_path / "mine")
    ship_code(run, code)
    ship_code(run, code)
    fetched = fetch_code(run, code.digest, island="a-0")

    assert (fetched / "lib" / "a.py").read_text() == "# lib/a.py\n"
    with pytest.raises(Refused, match="does not have code 000000000000"):
        fetch_code(run, "0" * 64, island="a-0")
    (tmp_path / "run" / "code" / code.digest).write_bytes(code.data + b"x")
    with pytest.raises(CorruptError, match="not the code that was launched"):
        fetch_code(run, code.digest, island="a-0")
