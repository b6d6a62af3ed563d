"""A run that has ended, in the directory of the coordinator that served it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path

from atoll import __version__
from atoll.coordinator.anchor_file import AnchorFiles
from atoll.coordinator.app import EVENTS, SPOOL
from atoll.coordinator.directory import open_service
from atoll.coordinator.service import Service
from atoll.coordinator.status import RECENT, status_of
from atoll.coordinator.threads import ThreadedService
from atoll.errors import Refused
from atoll.run_client import base
from atoll.runtime import SystemClock
from atoll.settings import RunSettings
from atoll.telemetry import Event

COPY_BYTES = 2**22


class DirectoryRunClient:
    """A run without a process. Implements `RunClient`.

    Holds the lock of the journal, so no coordinator can serve the run meanwhile.
    """

    poll_s = 2.0

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._cleanup = ExitStack()

    def close(self) -> None:
        """Release the journal. Safe to repeat."""
        self._cleanup.close()

    @cached_property
    def _service(self) -> Service:
        disk, service = open_service(self.directory, None, now_s=0.0)
        self._cleanup.callback(disk.close)
        return service

    def status(self, *, watch: bool = False) -> base.RunStatus:
        """Return the status that the journal records."""
        service = self._service
        committed = [
            event for event in self.events() if event.name == "round_committed"
        ]
        recent = [
            {**event.fields, "committed_unix_s": event.at_unix_s}
            for event in committed[-RECENT:]
        ]
        # By the journal alone every lease is over: no island is live.
        status = status_of(service.state, 1e9, stats={}, verdicts={})
        return base.RunStatus.of(
            status
            | {
                "version": __version__,
                "listening": str(self.directory),
                "started_unix_s": None,
                "now_unix_s": time.time(),
                "recent": recent,
                "stall_share": None,
                "damage": [*service.journal.reports, *service.damage],
                "bytes_in": None,
                "bytes_out": None,
            }
        )

    def settings(self) -> RunSettings:
        """Return the last settings."""
        return self._service.state.settings

    def events(self, *, after: int = 0, is_waiting: bool = False) -> list[Event]:
        """Return the newest events of the log file; nothing more is going to happen."""
        if is_waiting:
            raise Refused("The run has ended, and no event follows.")
        events = []
        with suppress(FileNotFoundError), (self.directory / EVENTS).open() as lines:
            for line in lines:
                with suppress(ValueError):  # the last line may be cut
                    events.append(Event.of(json.loads(line)))
        return [event for event in events if event.number > after]

    def control(self, command: base.Command) -> base.ControlReply:
        """Refuse: there is no process that could perform it."""
        raise Refused(
            f"{self.directory} is not served now. Serve it to control its run: atoll "
            f"serve --dir {self.directory}"
        )

    def export(
        self,
        file: Path,
        *,
        round: int | None = None,
        progress: base.Progress | None = None,
    ) -> base.ExportedWeights:
        """Write the weights from the journal."""
        threaded = ThreadedService(
            self._service,
            clock=SystemClock(),
            watch=lambda service, now_s: None,
            on_fault=lambda fault: None,
        )
        root = self.directory / "journal"
        anchors = AnchorFiles(threaded, self.directory / SPOOL, root)
        anchor = anchors.newest() if round is None else anchors.at(round)
        done = 0
        with file.open("wb") as opened:
            for part in anchor.body:
                handle = part.file
                if not isinstance(handle, int):
                    handle = os.open(handle, os.O_RDONLY)
                    self._cleanup.callback(os.close, handle)
                first, last = part.first, part.first + part.length
                while first < last:
                    data = os.pread(handle, min(COPY_BYTES, last - first), first)
                    first += opened.write(data)
                    done += len(data)
                    if progress is not None:
                        progress(done, anchor.file.size_bytes)
        return base.ExportedWeights.of_file(file, anchor.file.size_bytes)

    def checks(self) -> Iterator[base.Check]:
        """Check that the journal can be read."""
        yield base.Check("run", f"{self.status().run} has ended")
