"""The code of islands: packed here, kept with the run as code/<digest>, fetched there.

Rule 1: equal files are equal bytes, and so the same digest and the same object.
Rule 2: an archive is accepted by the digest that the launch passed, and by nothing
else; it is checked before a file is written.
Rule 3: each island has a separate directory, the same after every restart, so that
it finds the files that it has written there.

Packed are the files that git lists and that none of its patterns ignores, tracked or
not: a private file that was tracked once and ignored later is left out.
Rule 4: a directory that is ignored itself was chosen, and is shipped: then only
patterns in it and below apply. A repository within a repository lists its own files.
Rule 5: outside of a repository all files are packed; a .gitignore there is refused.
Rule 6: hidden files, caches, virtual environments, directories of runs and files that
look like a key or a token are never packed, even if git lists them.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from atoll.bundle.archive import MAX_CODE_BYTES, MAX_CODE_FILES, pack, unpack
from atoll.errors import (
    CorruptError,
    DiskError,
    NoSuchObject,
    Refused,
    RunMoved,
    UsageError,
)
from atoll.island.connection import call_to, connect_read_only, is_coordinator
from atoll.island.environment import (
    credentials_from_environment,
    definitions_from_environment,
)
from atoll.runtime import SystemClock
from atoll.security import Role, parse_run_url
from atoll.wire import blake3_digest

MAX_SHIPPED_BYTES = 32 * 2**20
"""Code is text: larger files are data, which has better routes to islands."""

SEND_S = 600.0
MAX_MOVES = 8
"""Moves of a run that a fetch of its code follows, at most."""


@dataclass(frozen=True)
class Code:
    """A directory's code as one archive."""

    data: bytes
    digest: str
    num_files: int


def pack_code(directory: Path) -> Code:
    """Return the code of a directory.

    Raises:
        UsageError: something in it cannot be packed, or it is too large.
    """
    files: dict[str, bytes] = {}
    size = 0
    for path in code_files(directory):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink() or not path.is_file():
            raise UsageError(f"{path} is no plain file. {_LEAVE_OUT}")
        size += path.stat().st_size
        # The first file beyond the limit ends the search: there may be no end of data.
        if size > MAX_SHIPPED_BYTES or len(files) == MAX_CODE_FILES:
            raise UsageError(
                f"The code in {directory} has more than {MAX_SHIPPED_BYTES} bytes or "
                f"{MAX_CODE_FILES} files, with {name!r}. {_LEAVE_OUT}"
            )
        files[name] = path.read_bytes()
    if not files:
        raise UsageError(
            f"Nothing in {directory} is code to be shipped: it is empty, or git "
            "ignores all of it. Find out why: git check-ignore -v --no-index FILE"
        )
    try:
        data = pack(files, max_files=MAX_CODE_FILES)
    except UsageError as exc:
        raise UsageError(f"The code in {directory}: {exc} {_LEAVE_OUT}") from exc
    return Code(data, blake3_digest(data).hex(), len(files))


_LEAVE_OUT = (
    "Name it in the .gitignore of a git repository to leave it out, or use an image "
    "with --no-ship."
)


def ship_code(run: str, code: Code) -> None:
    """Store code with a run. Safe to repeat.

    Raises:
        Refused: this user is no operator of the run.
        Unreachable: there is no response.
    """
    if is_coordinator(run):
        _put(run, code)
    else:
        _put_in_store(run, code)


def fetch_code(run: str, digest: str, *, island: str) -> Path:
    """Fetch the code of an island, and return its directory.

    Raises:
        CorruptError: the response has another digest, or is no archive of Atoll.
        Refused: the run has none of that digest.
        DiskError: it cannot be written here.
    """
    data = _fetched(run, digest)
    if len(data) > MAX_CODE_BYTES or blake3_digest(data).hex() != digest:
        raise CorruptError(
            f"The code from {run} is not the code that was launched: code/{digest} "
            "does not have the digest in its name. Launch again."
        )
    root = definitions_from_environment().staged.parent / "code"
    directory = root / digest / island
    extract(data, directory)
    return directory


def _fetched(run: str, digest: str) -> bytes:
    """Return the archive from the run's present URL: code moves with a run."""
    for _ in range(MAX_MOVES):
        get = _get if is_coordinator(run) else _get_from_store
        try:
            return get(run, digest)
        except RunMoved as exc:
            run = exc.target
    raise Refused(f"The run has moved {MAX_MOVES} times, and lastly to {run}.")


def extract(data: bytes, directory: Path) -> None:
    """Write the files of an archive into a directory, in place of those of its names.

    Raises:
        CorruptError: it is no archive of Atoll, or a link leads out of the directory.
    """
    files = unpack(data, max_files=MAX_CODE_FILES)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        home = directory.resolve()
        for name, content in files.items():
            path = directory / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.parent.resolve().is_relative_to(home):
                raise CorruptError(
                    f"{path} would be written outside of {directory}: there is a link. "
                    "Remove the directory."
                )
            draft = path.with_name(f".{secrets.token_hex(8)}")
            draft.write_bytes(content)
            os.replace(draft, path)
    except OSError as exc:
        raise DiskError(f"{directory} cannot be written: {exc.strerror}.") from exc


def _put(run: str, code: Code) -> None:
    url = parse_run_url(run)
    around = credentials_from_environment()
    caller, headers = call_to(url, around, role=Role.OPERATOR)
    try:
        reply = caller.call(
            "PUT",
            f"/code/{code.digest}",
            headers={**headers, "Content-Type": "application/x-tar"},
            body=code.data,
            timeout_s=SEND_S,
            is_repeatable=True,
        )
    finally:
        caller.close()
    if reply.status != 200:
        raise Refused(f"{run} does not keep the code: {_message(reply)}")


def _get(run: str, digest: str) -> bytes:
    from atoll.http import Download, at_most

    caller, headers, _ = connect_read_only(
        run, paths=credentials_from_environment(), clock=SystemClock()
    )
    try:
        reply = caller.call(
            "GET",
            f"/code/{digest}",
            headers=headers,
            fetching=Download(at_most(MAX_CODE_BYTES, "the code")),
            timeout_s=SEND_S,
            is_repeatable=True,
        )
        if reply.status != 200:
            status = caller.call("GET", "/status", headers=headers, is_repeatable=True)
            _require_here(run, digest, status.json().get("move"))
            raise Refused(f"{run} does not have code {digest[:12]}: {_message(reply)}")
        return bytes(reply.body)
    finally:
        caller.close()


def _require_here(run: str, digest: str, move: Any) -> None:
    if move is not None and move["is_over"]:
        raise _moved(run, digest, str(move["target"]))


def _moved(run: str, digest: str, target: str) -> RunMoved:
    message = (
        f"{run} does not have code {digest[:12]}, and the run has moved to {target}."
    )
    return RunMoved(message, target=target)


def _message(reply: Any) -> str:
    return str(reply.json().get("message", f"it answers {reply.status}."))


def _put_in_store(run: str, code: Code) -> None:
    from atoll.exchange.bucket import keys
    from atoll.island.store_connection import open_read_only

    with open_read_only(run, clock=SystemClock()) as (reader, _):
        reader.store.put_new(keys.code(code.digest), [code.data])


def _get_from_store(run: str, digest: str) -> bytes:
    from atoll.exchange.bucket import keys
    from atoll.island.store_connection import open_read_only

    with open_read_only(run, clock=SystemClock()) as (reader, _):
        try:
            data = reader.store.get(keys.code(digest), 0, MAX_CODE_BYTES + 1)
        except NoSuchObject as exc:
            if (target := reader.view.moved_to) is not None:
                raise _moved(run, digest, target) from exc
            raise Refused(f"{run} does not have code {digest[:12]}.") from exc
        return bytes(data)


NEVER = ("__pycache__", "node_modules", "*.atoll", "*.egg-info", "*.pyc")
PRIVATE = ("*.token", "*.pem", "*.key")
VIRTUAL_ENVIRONMENT = "pyvenv.cfg"


def code_files(root: Path) -> Iterator[Path]:
    """Yield the files to be shipped, in the order of their names.

    Of a repository with more than MAX_CODE_FILES it yields some, but too many as well.

    Raises:
        UsageError: its ignored files are unknown.
    """
    yield from _git_files(root) if _is_in_repository(root) else _all_files(root)


def _is_in_repository(root: Path) -> bool:
    resolved = root.resolve()
    # This user need not have permission for every directory above.
    return any(
        os.path.exists(parent / ".git") for parent in (resolved, *resolved.parents)
    )


def _all_files(directory: Path) -> Iterator[Path]:
    if (directory / ".gitignore").exists():
        raise UsageError(
            f"{directory / '.gitignore'} has no effect outside of a git repository. "
            "Run `git init` in the directory that is shipped, or remove the file."
        )
    for path in sorted(directory.iterdir()):
        is_directory = path.is_dir() and not path.is_symlink()
        if _is_never_shipped(path, is_directory=is_directory):
            continue
        if is_directory:
            yield from _all_files(path)
        else:
            yield path


def _is_never_shipped(path: Path, *, is_directory: bool) -> bool:
    is_denied = path.name.startswith(".") or any(
        fnmatchcase(path.name, pattern) for pattern in (*NEVER, *PRIVATE)
    )
    return is_denied or (is_directory and (path / VIRTUAL_ENVIRONMENT).exists())


def _git_files(root: Path) -> Iterator[Path]:
    files: set[Path] = set()
    repositories: set[Path] = set()
    with closing(_listed(root)) as listed:
        for path in listed:
            parents = [root / parent for parent in path.relative_to(root).parents][:-1]
            # A submodule, or a repository within this one.
            is_directory = path.is_dir() and not path.is_symlink()
            if _is_never_shipped(path, is_directory=is_directory) or any(
                _is_never_shipped(parent, is_directory=True) for parent in parents
            ):
                continue
            if not is_directory:
                files.add(path)
            elif (path / ".git").exists():
                repositories.add(path)
            # These are refused already: there may be no end of data.
            if len(files) > MAX_CODE_FILES:
                break
    for path in sorted(files | repositories):
        if path in repositories:
            yield from _git_files(path)
        else:
            yield path


def _listed(root: Path) -> Generator[Path]:
    """Yield the existing files that git lists below a directory, in git's order."""
    selection = ["--exclude-standard", "-z"]
    variables: dict[str, str] = {}
    ignored: set[str] = set()
    if not list(_git(root, "check-ignore", "--no-index", ".", codes=(0, 1))):
        # Tracked once, and ignored later: git itself would list them.
        ignored.update(_git(root, "ls-files", "--cached", "--ignored", *selection))
        selection.append("--cached")
    else:
        # As the top of a repository without an index, below which nothing is ignored.
        git = "".join(_git(root, "rev-parse", "--absolute-git-dir")).strip()
        variables = {"GIT_DIR": git, "GIT_WORK_TREE": "."}
        variables["GIT_INDEX_FILE"] = str(Path(git) / "atoll-no-index")
    output = _git(root, "ls-files", "--others", *selection, variables=variables)
    with closing(output) as names:
        for name in names:
            # A name that is no UTF-8 is refused when it is packed.
            if name not in ignored and os.path.lexists(root / name):
                yield root / name


def _git(
    root: Path,
    *arguments: str,
    codes: Collection[int] = (0,),
    variables: Mapping[str, str] | None = None,
) -> Generator[str]:
    """Yield what git writes in a directory, split at its zero bytes.

    It is read as it is written, and git is ended if the generator is closed before.

    Raises:
        UsageError: it cannot be run, or it exits with none of the codes.
    """
    # A hook of git has variables that select another repository than the directory's.
    environment = {
        name: value for name, value in os.environ.items() if name not in _GIT_SELECTION
    }
    with TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                ["git", *arguments],
                cwd=root,
                env={**environment, **(variables or {})},
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        except OSError as exc:
            raise UsageError(
                f"{root} is in a git repository, and git cannot be run: "
                f"{exc.strerror}. Install it: it lists the files to ship. Or use an "
                "image with --no-ship."
            ) from exc
        with process:
            try:
                yield from _split(process.stdout)
            except GeneratorExit:
                process.kill()
                raise
        if process.returncode not in codes:
            errors.seek(0)
            message = errors.read(MAX_MESSAGE_BYTES).decode(errors="replace").strip()
            raise UsageError(
                f"git cannot list the files of {root}: {message}. Repair its "
                "repository, or use an image with --no-ship."
            )


def _split(output: IO[bytes] | None) -> Iterator[str]:
    assert output is not None
    rest = b""
    while read := output.read(CHUNK_BYTES):
        *names, rest = (rest + read).split(b"\0")
        yield from map(os.fsdecode, names)
    if rest:
        yield os.fsdecode(rest)


CHUNK_BYTES = 2**16
MAX_MESSAGE_BYTES = 500
_GIT_SELECTION = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
