"""The port through which people and launchers use a run, and its values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from atoll.errors import AtollError, CorruptError, UsageError
from atoll.safetensors import read_file_header
from atoll.settings import RunSettings
from atoll.telemetry import Event, EventPage

METRICS = ("loss", "round", "tokens", "inner_steps", "bytes_up", "bytes_down", "state")
"""Last metrics of an island."""

INCOMPLETE = "The received data is not a complete safetensors file. Export it again."

Progress = Callable[[int, int], None]
"""Receives the work done so far, and all of it."""


class RunClient(Protocol):
    """A run, for those who watch and control it. Close it.

    The command line and launchers call it. It connects at the first call, so a wrong
    address or a missing credential is an error of that call.
    """

    poll_s: float
    """Pause between two statuses: each one of a store costs requests."""

    def status(self, *, watch: bool = False) -> RunStatus:
        """Return the present status.

        With `watch` a store is watched for some seconds at most, to find out which
        islands are live.
        """

    def settings(self) -> RunSettings:
        """Return the settings in force, with the changes of all epochs."""

    def events(
        self, *, after: Event | None = None, is_waiting: bool = False
    ) -> list[Event]:
        """Return the last events, or those after one, oldest first.

        With `is_waiting` the call may take some seconds, until there is a new one.

        Raises:
            UsageError: the run keeps no events.
        """

    def older_events(
        self, before: str = "", *, limit: int = 200, kind: str = "", island: str = ""
    ) -> EventPage:
        """Return a page of events before a cursor, or of the last ones.

        With `kind` only those of that name, with `island` only those that name it. Such
        a page may be empty and still have a cursor.

        Raises:
            UsageError: the run keeps no events, or the cursor's file is gone.
        """

    def history(self, **query: str | int) -> dict[str, Any]:
        """Return the past of the run: the document of `GET /history`.

        Raises:
            UsageError: the query asks for a part that is not known, or for too much.
        """

    def control(self, command: Command) -> ControlReply:
        """Perform an operator's command. It is in force when the call returns.

        Raises:
            UsageError: no island has that name, or a value cannot be set.
            Refused: this user is no operator, or the run does not accept it now.
        """

    def export(
        self, file: Path, *, round: int | None = None, progress: Progress | None = None
    ) -> ExportedWeights:
        """Write the newest agreed weights, or those of a round, into a file.

        Raises:
            Refused: the run has no weights yet, or the round is not kept.
            CorruptError: the file is not complete, or stored data does not verify.
        """

    def export_ledger(self, file: Path) -> int:
        """Write the ledger of the run's rows into a CSV file; return its bytes.

        Raises:
            Refused: the run does not deal out rows, or has no weights yet.
        """

    def checks(self) -> Iterator[Check]:
        """Check the connection step by step, up to the first step that fails."""

    def close(self) -> None:
        """Close the connection. Safe to repeat."""


@dataclass(frozen=True)
class RunStatus:
    """The status of a run at one moment."""

    run: str
    """Its id."""

    name: str
    state: str
    reason: str
    """Why it makes no progress; empty if it does."""

    round: int
    last_round: int | None
    document: Mapping[str, Any] = field(repr=False)
    """Every key of `GET /status`."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> RunStatus:
        """Return the status in a document.

        Raises:
            CorruptError: it is no status, or an island of it has no name or state.
        """
        try:
            return cls._of(document)
        except (KeyError, TypeError, ValueError) as exc:
            raise CorruptError(
                f"The run's status cannot be read ({type(exc).__name__}: "
                f"{str(exc)[:200]}). It may be of another version: upgrade Atoll here."
            ) from exc

    @classmethod
    def _of(cls, document: Mapping[str, Any]) -> RunStatus:
        for row in document["islands"]:
            if not (isinstance(row["island"], str) and isinstance(row["state"], str)):
                raise TypeError("an island has no name or state")
        return cls(
            run=str(document["run"]),
            name=str(document["name"]),
            state=str(document["state"]),
            reason=str(document["why"]),
            round=int(document["round"]),
            last_round=document["last_round"],
            document=document,
        )

    @property
    def has_ended(self) -> bool:
        return self.state == "ended"

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens there: the run has ended, or has moved."""
        return self.state in ("ended", "moved")

    @property
    def islands(self) -> dict[str, dict[str, Any]]:
        """The last metrics by island: `METRICS`."""
        return {
            str(row["island"]): {name: row.get(name) for name in METRICS}
            for row in self.document["islands"]
        }


class Action(StrEnum):
    """An action of an operator."""

    PAUSE = "pause"
    RESUME = "resume"
    SAVE = "save"
    STOP = "stop"
    DRAIN = "drain"
    EVICT = "evict"
    SET = "set"


@dataclass(frozen=True)
class Command:
    """An operator's command."""

    action: Action
    values: Mapping[str, Any] = field(default_factory=dict)
    """Settings by their dotted keys, of `set`."""

    island: str | None = None
    """The island of `evict`."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The body of the coordinator's route."""
        if self.action is Action.SET:
            return {"values": dict(self.values)}
        return {} if self.island is None else {"island": self.island}


@dataclass(frozen=True)
class ControlReply:
    """The effect of a command."""

    message: str
    status: RunStatus


def needs_coordinator(url: str) -> UsageError:
    """Return the error of a call that a run in a store cannot answer."""
    return UsageError(
        f"The run at {url} is in a store, and this needs a coordinator. Access to the "
        f"store is enough to take part: `atoll join {url} -- COMMAND`, `atoll status "
        f"{url}`."
    )


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    detail: str
    error: AtollError | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None


@dataclass(frozen=True)
class ExportedWeights:
    """The contents of a file of weights."""

    run: str
    round: int
    rounds: list[int]
    """The round of each fragment."""

    tensors: int
    bytes: int
    constants: list[str]
    """Constants of the model that the run does not keep."""

    moved_to: str | None = None
    """Where the run trains since these weights, if it has moved."""

    @classmethod
    def of_file(cls, file: Path, size_bytes: int) -> ExportedWeights:
        """Return what the header of a file of `size_bytes` lists.

        Raises:
            CorruptError: it is not a complete safetensors file.
        """
        with file.open("rb") as opened:
            header = read_file_header(opened, source="The received data")
        if header.file_bytes != size_bytes:
            raise CorruptError(INCOMPLETE)
        try:
            metadata = header.metadata
            model = json.loads(metadata["atoll.model"])
            return cls(
                run=metadata["atoll.run"],
                round=int(metadata["atoll.round"]),
                rounds=json.loads(metadata["atoll.rounds"]),
                tensors=len(header.arrays),
                bytes=size_bytes,
                constants=[
                    row[0]
                    for row in model
                    if row[3] == "constant" and row[0] not in header.arrays
                ],
            )
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise CorruptError(INCOMPLETE) from exc
