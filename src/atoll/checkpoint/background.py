"""The thread that writes checkpoints, and what has become of its work."""

from __future__ import annotations

import threading

from atoll.checkpoint.ranks import LEADER
from atoll.checkpoint.snapshot import Draft
from atoll.checkpoint.writing import Writing, finish, write_part
from atoll.clock import SystemClock
from atoll.errors import AtollError, RemoteError

BUSY = "busy"


class Background:
    """Writes one checkpoint at a time. The saver is the only caller."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._newest = ""

    def start(self, writing: Writing, drafts: list[Draft]) -> None:
        """Begin to write; nothing is being written now."""
        self._thread = threading.Thread(
            target=self._write, args=(writing, drafts), name="atoll-checkpoint"
        )
        self._thread.start()

    def status(self) -> str:
        """Return whether it writes; raise what it failed with, once."""
        if self._thread is not None and self._thread.is_alive():
            return BUSY
        return self.outcome()

    def outcome(self) -> str:
        """Wait, and return what was written last; raise what it failed with, once."""
        self.join()
        error, self._error = self._error, None
        if isinstance(error, AtollError):
            raise error
        if error is not None:
            raise RemoteError(
                f"The last checkpoint was not saved: {type(error).__name__}: {error}"
            ) from error
        return self._newest

    def join(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def abandon(self) -> None:
        """Wait for this rank's own part only."""
        self._stop.set()
        self.join()

    def _write(self, writing: Writing, drafts: list[Draft]) -> None:
        try:
            write_part(writing, drafts)
            if writing.rank == LEADER:
                path = finish(writing, SystemClock(), self._stop)
                self._newest = str(path)
        except BaseException as exc:  # it belongs to the next call, not to this thread
            self._error = exc
