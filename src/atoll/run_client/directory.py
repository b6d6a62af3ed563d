"""A run that has ended, in the directory of the coordinator that served it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

from atoll import __version__
from atoll.coordinator.anchor_file import AnchorFiles
from atoll.coordinator.app import SPOOL
from atoll.coordinator.directory import open_service
from atoll.coordinator.rows import LedgerTable, require_ledger
from atoll.coordinator.service import Service
from atoll.coordinator.status import RECENT, status_of
from atoll.coordinator.threads import ThreadedService
from atoll.errors import Refused
from atoll.run_client import base
from atoll.runtime import SystemClock
from atoll.settings import RunSettings
from atoll.telemetry import (
    Event,
    EventFiles,
    EventPage,
    Past,
    findings,
    history,
    load_past,
    with_past,
)
from atoll.telemetry.event_files import MAX_PAGE, EventFilter
from atoll.telemetry.history import history_query
from atoll.telemetry.status_past import recent_rounds

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
    def _past(self) -> Past:
        return load_past(self.directory)

    @property
    def _files(self) -> EventFiles:
        return EventFiles(self.directory)

    @cached_property
    def _service(self) -> Service:
        disk, service = open_service(self.directory, None, now_s=0.0)
        self._cleanup.callback(disk.close)
        return service

    def status(self, *, watch: bool = False) -> base.RunStatus:
        """Return the status that the journal records."""
        service, past = self._service, self._past
        # By the journal alone every lease is over: no island is live.
        status = status_of(service.state, 1e9, stats={}, verdicts={})
        now_unix_s = time.time()
        merged = with_past(status, past, past.islands, now_unix_s=now_unix_s)
        document = merged | {
            "version": __version__,
            "listening": str(self.directory),
            "started_unix_s": None,
            "now_unix_s": now_unix_s,
            "recent": recent_rounds(past)[-RECENT:],
            "damage": [*service.journal.reports, *service.damage],
            "bytes_in": None,
            "bytes_out": None,
        }
        present = findings(document, past, now_unix_s=now_unix_s)
        document["findings"] = [finding.as_dict() for finding in present]
        return base.RunStatus.of(document)

    def settings(self) -> RunSettings:
        """Return the last settings."""
        return self._service.state.settings

    def events(
        self, *, after: Event | None = None, is_waiting: bool = False
    ) -> list[Event]:
        """Return the last events of the files; nothing more is going to happen."""
        if is_waiting:
            raise Refused("The run has ended, and no event follows.")
        if after is None:
            return self._files.page(limit=MAX_PAGE).events
        return list(self._files.forward(after.process, after.number))

    def older_events(
        self, before: str = "", *, limit: int = 200, kind: str = "", island: str = ""
    ) -> EventPage:
        """Return a page of events from the files."""
        only = EventFilter(kind=kind, island=island)
        return self._files.page(before, limit=limit, only=only)

    def history(self, **query: str | int) -> dict[str, Any]:
        """Return the past that the files tell."""
        answer = history(self._past, **history_query(query))
        document: dict[str, Any] = json.loads(answer)
        return document

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

    def export_ledger(self, file: Path) -> int:
        """Write the ledger from the journal."""
        table = LedgerTable(require_ledger(self._service.state.ledger))
        rosters = self._service.journal.recorded.rosters
        listed = ((*key, rosters[key]) for key in sorted(rosters))
        with file.open("wb") as opened:
            return sum(map(opened.write, table.lines(listed)))

    def checks(self) -> Iterator[base.Check]:
        """Check that the journal can be read."""
        yield base.Check("run", f"{self.status().run} has ended")
