"""Code that was launched, in a coordinator's directory: code/<digest>, never changed.

Every island runs it, so only an operator puts it; and who fetches it compares digests.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from pathlib import Path

from atoll.bundle.archive import MAX_CODE_FILES, unpack
from atoll.disk import TEMPORARY, Room, sync_directory
from atoll.disk.whole import write_whole
from atoll.errors import CorruptError, Refused, UsageError
from atoll.security.private import private_directory, translated
from atoll.wire import blake3_digest

CODE = "code"
MAX_KEPT = 64
"""A run is launched with a few kinds of code, and each may be large."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class CodeFiles:
    """The code of one run. Any thread may call."""

    def __init__(self, directory: Path, room: Room | None = None) -> None:
        self._directory, self._room = directory / CODE, room
        self._lock = threading.Lock()

    def keep(self, digest: str, data: bytes, *, may_be_more: bool = False) -> None:
        """Make code durable. Safe to repeat.

        There `may_be_more` than are taken from operators: all that a run brings along.

        Raises:
            UsageError: the digest is none.
            CorruptError: the bytes have another digest, or are no archive of ours.
            Refused: there is too much already.
            DiskError: it finds no room.
        """
        path = self._path(digest)
        if blake3_digest(data).hex() != digest:
            raise CorruptError(
                f"The code that came does not have the digest {digest[:12]}. Send it "
                "again."
            )
        unpack(data, most_files=MAX_CODE_FILES)
        with self._lock:
            if path.exists():
                return
            if not may_be_more and len(self.digests()) >= MAX_KEPT:
                raise Refused(
                    f"{self._directory} keeps {MAX_KEPT} kinds of code already. Remove "
                    "those that no island runs any more."
                )
            if self._room is not None:
                self._room.require(len(data), what="this code")
            private_directory(self._directory)
            self._write(path, data)

    def digests(self) -> list[str]:
        """Return which code is here."""
        with translated(self._directory):
            try:
                names = os.listdir(self._directory)
            except FileNotFoundError:
                return []
        return sorted(name for name in names if _DIGEST.fullmatch(name))

    def find(self, digest: str) -> Path:
        """Return where code is.

        Raises:
            UsageError: the digest is none.
            Refused: nobody has put it here.
        """
        path = self._path(digest)
        if not path.is_file():
            raise Refused(f"The run has no code {digest[:12]}. Launch again.")
        return path

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise UsageError(f"{digest[:80]!r} is no digest: 64 hexadecimal digits.")
        return self._directory / digest

    def _write(self, path: Path, data: bytes) -> None:
        draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
        with translated(path):
            try:
                write_whole(draft, [data])
                os.rename(draft, path)
            finally:
                draft.unlink(missing_ok=True)
            sync_directory(path.parent)
