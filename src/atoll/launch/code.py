"""The code of islands: packed here, kept with the run as code/<digest>, fetched there.

Rule 1: equal files are equal bytes, and so the same digest and the same object.
Rule 2: what comes is taken by its digest, which the launch has told, and by nothing
else; its archive is judged before a file is written.
Rule 3: each island has a directory of its own, the same in all of its lives, so that
what it has written there is there again.
"""

from __future__ import annotations

import os
import secrets
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
from atoll.island.environment import (
    definitions_from_environment,
    surroundings_from_environment,
)
from atoll.island.reach import call_to, is_coordinator, reach_to_look
from atoll.launch.ignoring import code_files
from atoll.security import Role, parse_run_url
from atoll.wire import blake3_digest

MAX_SHIPPED_BYTES = 32 * 2**20
"""Code is text: what is larger is data, and has a better way to islands."""

SEND_S = 600.0
MAX_MOVES = 8
"""Of a run, after which its code is looked for no more."""


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
        # Told by the first one that is too much: a directory of data has no end.
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
        data = pack(files, most_files=MAX_CODE_FILES)
    except UsageError as exc:
        raise UsageError(f"The code in {directory}: {exc} {_LEAVE_OUT}") from exc
    return Code(data, blake3_digest(data).hex(), len(files))


_LEAVE_OUT = "Name it in .gitignore to leave it out, or use an image with --no-ship."


def ship_code(run: str, code: Code) -> None:
    """Keep code with a run. Safe to repeat.

    Raises:
        Refused: this user is no operator of the run.
        Unreachable: nobody answers there.
    """
    if is_coordinator(run):
        _put(run, code)
    else:
        _put_in_store(run, code)


def fetch_code(run: str, digest: str, *, island: str) -> Path:
    """Return the directory where an island finds its code.

    Raises:
        CorruptError: what came has another digest, or is no archive of ours.
        Refused: the run has none of that digest.
        DiskError: it cannot be written here.
    """
    data = _fetched(run, digest)
    if len(data) > MAX_CODE_BYTES or blake3_digest(data).hex() != digest:
        raise CorruptError(
            f"The code that came from {run} is not what was launched: code/{digest} "
            "does not have the digest in its name. Launch again."
        )
    root = definitions_from_environment().staged.parent / "code"
    directory = root / digest / island
    extract(data, directory)
    return directory


def _fetched(run: str, digest: str) -> bytes:
    """Return what the run has, from where it is: it has taken its code along."""
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
        CorruptError: it is no archive of ours, or a link leads out of the directory.
    """
    files = unpack(data, most_files=MAX_CODE_FILES)
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
    around = surroundings_from_environment()
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
    from atoll.http import Fetching, at_most

    caller, headers, _ = reach_to_look(
        run, surroundings=surroundings_from_environment(), clock=SystemClock()
    )
    try:
        reply = caller.call(
            "GET",
            f"/code/{digest}",
            headers=headers,
            fetching=Fetching(at_most(MAX_CODE_BYTES, "the code")),
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
    said = f"{run} does not have code {digest[:12]}, and the run has moved to {target}."
    return RunMoved(said, target=target)


def _message(reply: Any) -> str:
    return str(reply.json().get("message", f"it answers {reply.status}."))


def _put_in_store(run: str, code: Code) -> None:
    from atoll.exchange.bucket import keys
    from atoll.island.meeting import looking

    with looking(run, clock=SystemClock()) as (lookout, _):
        lookout.store.put_new(keys.code(code.digest), [code.data])


def _get_from_store(run: str, digest: str) -> bytes:
    from atoll.exchange.bucket import keys
    from atoll.island.meeting import looking

    with looking(run, clock=SystemClock()) as (lookout, _):
        try:
            found = lookout.store.get(keys.code(digest), 0, MAX_CODE_BYTES + 1)
        except NoSuchObject as exc:
            if (target := lookout.sight.moved_to) is not None:
                raise _moved(run, digest, target) from exc
            raise Refused(f"{run} does not have code {digest[:12]}.") from exc
        return bytes(found)
