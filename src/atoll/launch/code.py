"""The code of islands: packed here, kept with the run as code/<digest>, fetched there.

Rule 1: equal files are equal bytes, and so the same digest and the same object.
Rule 2: an archive is accepted by the digest that the launch passed, and by nothing
else; it is checked before a file is written.
Rule 3: each island has a separate directory, the same after every restart, so that
it finds the files that it has written there.

Packed are the files that .gitignore leaves.
Rule 4: the last pattern that fits decides; one with `!` includes a file again. Under a
directory that is excluded nothing is included again, as in git.
Rule 5: a .gitignore applies to the files below it, up to the root of the repository
that the directory is in, with .git/info/exclude before them all. The directory itself
was chosen, and is shipped even if they exclude it by its name.
Rule 6: hidden files, caches, virtual environments, directories of runs and files that
look like a key or a token are excluded, even if a .gitignore includes them.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.bundle.archive import MAX_CODE_BYTES, MAX_CODE_FILES, pack, unpack
from atoll.clock import SystemClock
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
            f"Nothing in {directory} is code to be shipped: it is empty, or .gitignore "
            "leaves out all of it, perhaps that of a directory above."
        )
    try:
        data = pack(files, max_files=MAX_CODE_FILES)
    except UsageError as exc:
        raise UsageError(f"The code in {directory}: {exc} {_LEAVE_OUT}") from exc
    return Code(data, blake3_digest(data).hex(), len(files))


_LEAVE_OUT = "Name it in .gitignore to leave it out, or use an image with --no-ship."


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
MAX_IGNORE_BYTES = 2**20


@dataclass(frozen=True)
class IgnoreRule:
    """One line of a .gitignore, for the paths below its directory."""

    pattern: re.Pattern[str]
    is_taken_back: bool
    is_of_directories: bool

    def fits(self, path: str, *, is_directory: bool) -> bool:
        if self.is_of_directories and not is_directory:
            return False
        return self.pattern.fullmatch(path) is not None


@dataclass(frozen=True)
class Tree:
    """The shipped directory, and its path from the top of its repository."""

    root: Path
    base: str
    """The path of the root: empty, or ends with a slash."""

    def name(self, path: Path) -> str:
        return f"{self.base}{path.relative_to(self.root).as_posix()}"

    def base_of(self, directory: Path) -> str:
        return self.base if directory == self.root else f"{self.name(directory)}/"


def code_files(root: Path) -> Iterator[Path]:
    """Yield the files to be shipped, in the order of their names.

    Raises:
        UsageError: a file with patterns cannot be read.
    """
    always = [rule for text in (*NEVER, *PRIVATE) if (rule := ignore_rule(text, ""))]
    base, rules = _from_above(root.resolve())
    yield from _under(root, Tree(root, base), always, rules)


def _under(
    directory: Path,
    tree: Tree,
    always: Sequence[IgnoreRule],
    rules: Sequence[IgnoreRule],
) -> Iterator[Path]:
    rules = [*rules, *_rules(directory / ".gitignore", tree.base_of(directory))]
    for path in sorted(directory.iterdir(), key=lambda entry: entry.name):
        is_directory = path.is_dir() and not path.is_symlink()
        name = tree.name(path)
        if path.name.startswith(".") or _is_out(name, always, is_directory):
            continue
        if _is_out(name, rules, is_directory):
            continue
        if not is_directory:
            yield path
        elif not (path / "pyvenv.cfg").exists():
            yield from _under(path, tree, always, rules)


def _is_out(name: str, rules: Sequence[IgnoreRule], is_directory: bool) -> bool:
    for rule in reversed(rules):
        if rule.fits(name, is_directory=is_directory):
            return not rule.is_taken_back
    return False


def _from_above(directory: Path) -> tuple[str, list[IgnoreRule]]:
    """Return the path of a directory in its repository, and the rules above it."""
    upwards = (directory, *directory.parents)
    # This user need not have permission for every directory above.
    top = next((parent for parent in upwards if os.path.exists(parent / ".git")), None)
    if top is None:
        return "", []
    rules, base, current = _rules(_exclude(top), ""), "", top
    for part in directory.relative_to(top).parts:
        rules += _rules(current / ".gitignore", base)
        current, base = current / part, f"{base}{part}/"
    return base, rules


def _exclude(top: Path) -> Path:
    """Return the file of a repository's patterns that are not committed."""
    git = top / ".git"
    if not git.is_dir():  # of a worktree, or of a submodule
        git = top / _read(git).removeprefix("gitdir:").strip()
    if (git / "commondir").is_file():
        git = git / _read(git / "commondir").strip()
    return git / "info" / "exclude"


def _rules(file: Path, base: str) -> list[IgnoreRule]:
    if not file.is_file():
        return []
    return [
        rule for line in _read(file).splitlines() if (rule := ignore_rule(line, base))
    ]


def _read(file: Path) -> str:
    try:
        with file.open(errors="replace") as opened:
            return opened.read(MAX_IGNORE_BYTES)
    except OSError as exc:
        raise UsageError(
            f"{file} cannot be read: {exc.strerror}. It excludes files from the code."
        ) from exc


def ignore_rule(line: str, base: str) -> IgnoreRule | None:
    """Return the rule of a line; None if it is empty, a comment or invalid."""
    text = re.sub(r"(?<!\\)\s+$", "", line)
    if not text or text.startswith("#"):
        return None
    is_taken_back = text.startswith("!")
    text = text[1:] if is_taken_back else text.removeprefix("\\")
    is_of_directories = text.endswith("/")
    text = text.rstrip("/")
    # A pattern with a slash is relative to its directory, one without for any depth.
    depth = "" if "/" in text else "(?:.*/)?"
    try:
        pattern = re.compile(re.escape(base) + depth + _translated(text.lstrip("/")))
    except re.error:
        return None  # as [z-a], which matches nothing in git either
    return IgnoreRule(pattern, is_taken_back, is_of_directories)


def _translated(text: str) -> str:
    """Return a pattern of git's as a regular expression."""
    parts = re.split(r"(\*\*/|/\*\*$|\*|\?|\[!?[^]]+\])", text)
    wildcards = {"**/": "(?:.*/)?", "/**": "/.*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        wildcards.get(part)
        or (part.replace("[!", "[^") if part.startswith("[") else re.escape(part))
        for part in parts
    )
