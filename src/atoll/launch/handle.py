"""What finds a launch again, later and from another terminal: one JSON document.

Rule 1: it holds no secret; whoever has it still needs the engine's own permission.
Rule 2: it is bounded and verified when it is read, as anything from a file.
Rule 3: `reference` is the engine's own: a job's number, a namespace. Others keep it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from atoll.errors import CorruptError, UsageError
from atoll.launch.spec import MAX_ISLANDS, check_name

VERSION = 1
MAX_HANDLE_BYTES = 2**18
MAX_ID = 56
"""Characters: a label of DNS has 63, and an engine may add an index."""

MAX_INSTANT_S = 2.0**37
"""Beyond the year 6000: a clock says no such thing, and others cannot show it."""

_ID = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Handle:
    """One launch: its islands have the indexes from `first` on."""

    id: str
    """Given before anything is submitted, so that an engine can be asked for it."""

    engine: str
    run: str
    name: str
    num_islands: int
    first: int = 0
    begun_at_s: float = 0.0
    """By the clock of the machine that launched: to show, and to put in order."""

    options: Mapping[str, str] = field(default_factory=dict)
    """What its launcher was made with."""

    reference: Mapping[str, Any] = field(default_factory=dict)

    @property
    def indexes(self) -> range:
        return range(self.first, self.first + self.num_islands)

    def island(self, index: int) -> str:
        """Return the name of one of its islands."""
        return f"{self.name}-{index}"

    def to_json(self) -> str:
        """Return the document.

        Raises:
            UsageError: the engine's reference is too large, or no JSON.
        """
        try:
            said = json.dumps({"version": VERSION, **asdict(self)}, allow_nan=False)
        except (TypeError, ValueError) as exc:
            raise UsageError(f"A handle's reference is no JSON: {exc}.") from exc
        if len(said.encode()) > MAX_HANDLE_BYTES:
            raise UsageError(f"A handle has at most {MAX_HANDLE_BYTES} bytes.")
        return said

    @classmethod
    def from_json(cls, said: str | bytes) -> Handle:
        """Return the handle of a document.

        Raises:
            CorruptError: it is none, or of a version that is not known here.
        """
        if len(said) > MAX_HANDLE_BYTES:
            raise CorruptError(
                f"A handle of a launch has at most {MAX_HANDLE_BYTES} bytes."
            )
        try:
            return _checked(json.loads(said))
        except (ValueError, LookupError, TypeError, UsageError, RecursionError) as exc:
            raise CorruptError(f"That is no handle of a launch: {exc}.") from exc


def check_id(launch: str) -> str:
    """Return an id of a launch, which is a label of DNS and some characters less."""
    if len(launch) > MAX_ID or not _ID.fullmatch(launch):
        raise UsageError(f"{launch[:80]!r} is no id of a launch.")
    return launch


def check_indexes(first: int, num_islands: int) -> None:
    """Return if there can be so many islands.

    Raises:
        UsageError: there cannot.
    """
    if not (first >= 0 and num_islands >= 1 and first + num_islands <= MAX_ISLANDS):
        raise UsageError(
            f"{num_islands} islands from index {first} on cannot be launched: 1 to "
            f"{MAX_ISLANDS} can, in all."
        )


def _checked(form: Any) -> Handle:
    if not isinstance(form, dict) or form.get("version") != VERSION:
        raise ValueError(f"it is not of version {VERSION}")
    options, reference = form["options"], form["reference"]
    if not isinstance(reference, dict) or not isinstance(options, dict):
        raise ValueError("its options and its reference are tables")
    handle = Handle(
        id=check_id(_text(form["id"])),
        engine=_text(form["engine"]),
        run=_text(form["run"]),
        name=check_name(_text(form["name"])),
        num_islands=_whole(form["num_islands"]),
        first=_whole(form["first"]),
        begun_at_s=_finite(form["begun_at_s"]),
        options={_text(key): _text(value) for key, value in options.items()},
        reference=reference,
    )
    check_indexes(handle.first, handle.num_islands)
    return handle


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.80} is no text")
    return value


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r:.80} is no number")
    if not abs(value) < MAX_INSTANT_S:
        raise ValueError(f"{value!r:.80} is no instant")
    return float(value)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r:.80} is no whole number")
    return value
