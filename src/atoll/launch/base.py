"""The port to an engine: the system that starts islands, which its user has already.

Rule 1: an engine starts, reports and ends islands; it decides nothing about the run.
Rule 2: an order's `id` names every submitted object, so that it can be found even if
the process that launched died before the engine's response came.
Rule 3: errors of an SDK do not cross. `UsageError` is for a request that cannot be
fulfilled, `Refused` for a missing permission, `Unreachable` for a failure that a retry
may solve. A response that makes no sense may be read as if it did: `registry` makes it
`Unreachable`.

A `Handle` finds a launch again, later and from another terminal: one JSON document.
Rule 4: it has no secret; its reader still needs the engine's own permission.
Rule 5: it is bounded and verified when it is read, as anything from a file.
Rule 6: `reference` is the engine's own: a job's number, a namespace. Others keep it.

An engine's options are `KEY=VALUE` words, read into a dataclass of the engine. Every
field is an `int`, `float`, `bool` or `str`, or one of these or None; its name is the
key, and its docstring is its help text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, Protocol, TypeVar, get_type_hints

from atoll.errors import CorruptError, UsageError
from atoll.fields import JsonField, nearest
from atoll.launch.spec import (
    LANGUAGE,
    MAX_ISLANDS,
    TEXT,
    TEXTS,
    IslandSpec,
    check_name,
)
from atoll.security import Secret


class State(Enum):
    """The state of an island, as its engine reports it."""

    PENDING = "pending"
    """The engine has accepted it and not started it: it is queued, or loading."""

    RUNNING = "running"
    RESTARTING = "restarting"
    """An incarnation has ended, and the engine will start another."""

    FINISHED = "finished"
    """Its command has ended with 0."""

    FAILED = "failed"
    """Its command has ended otherwise, and is not restarted."""

    CANCELLED = "cancelled"
    """A user or the engine has ended it."""

    LOST = "lost"
    """The engine no longer knows it: its end is unknown."""

    @property
    def is_over(self) -> bool:
        """Whether the state is final."""
        return self not in (State.PENDING, State.RUNNING, State.RESTARTING)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The state of one island, as its engine reports it."""

    index: int
    name: str
    state: State
    restarts: int = 0
    """Incarnations after the first, as far as the engine counts them."""

    exit_code: int | None = None
    """Of its last ended incarnation; minus the signal's number if one ended it."""

    reason: str = ""
    """The cause of the state, worded by the engine: `OutOfMemory`, `signal 9`."""

    host: str = ""
    """The node, process or job that runs the island."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as stored and as printed with `--json`."""
        return {
            "index": self.index,
            "name": self.name,
            "state": self.state.value,
            "restarts": self.restarts,
            "exit_code": self.exit_code,
            "why": self.reason,
            "place": self.host,
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Report:
        """Return the report that `to_dict` wrote; other keys are ignored.

        Raises:
            LookupError, TypeError, ValueError: it is not a report.
        """
        exit_code = stored["exit_code"]
        return cls(
            index=int(stored["index"]),
            name=str(stored["name"]),
            state=State(stored["state"]),
            restarts=int(stored["restarts"]),
            exit_code=None if exit_code is None else int(exit_code),
            reason=str(stored["why"]),
            host=str(stored["place"]),
        )


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
    """Chosen before anything is submitted, so that the engine can find it."""

    engine: str
    run: str
    name: str
    num_islands: int
    first: int = 0
    begun_at_s: float = 0.0
    """By the clock of the machine that launched; for display and sorting."""

    options: Mapping[str, str] = field(default_factory=dict)
    """The options of its launcher."""

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
            document = json.dumps({"version": VERSION, **asdict(self)}, allow_nan=False)
        except (TypeError, ValueError) as exc:
            raise UsageError(f"A handle's reference is no JSON: {exc}.") from exc
        if len(document.encode()) > MAX_HANDLE_BYTES:
            raise UsageError(f"A handle has at most {MAX_HANDLE_BYTES} bytes.")
        return document

    @classmethod
    def from_json(cls, document: str | bytes) -> Handle:
        """Return the handle of a document.

        Raises:
            CorruptError: it is none, or of a version that is not known here.
        """
        if len(document) > MAX_HANDLE_BYTES:
            raise CorruptError(
                f"A handle of a launch has at most {MAX_HANDLE_BYTES} bytes."
            )
        try:
            values = _HANDLE.read(json.loads(document), "handle")
            del values["version"]
            handle = cls(**values)
            check_id(handle.id)
            check_name(handle.name)
            check_indexes(handle.first, handle.num_islands)
        except (ValueError, UsageError, RecursionError) as exc:
            raise CorruptError(f"That is no handle of a launch: {exc}") from exc
        return handle


_HANDLE: JsonField[dict[str, Any]] = LANGUAGE.table(
    dict,
    {
        **dict.fromkeys(("id", "engine", "run", "name"), TEXT),
        **dict.fromkeys(("num_islands", "first"), LANGUAGE.integer()),
        "version": LANGUAGE.integer(VERSION, VERSION),
        "begun_at_s": LANGUAGE.number(high=MAX_INSTANT_S),
        "options": TEXTS,
        "reference": JsonField(dict, LANGUAGE.require_table),
    },
)


def check_id(launch: str) -> str:
    """Return an id of a launch, which is a label of DNS and some characters less."""
    if len(launch) > MAX_ID or not _ID.fullmatch(launch):
        raise UsageError(f"{launch[:80]!r} is no id of a launch.")
    return launch


def check_indexes(first: int, num_islands: int) -> None:
    """Check the range of island indexes of a launch.

    Raises:
        UsageError: it is empty, or ends beyond `MAX_ISLANDS`.
    """
    if not (first >= 0 and num_islands >= 1 and first + num_islands <= MAX_ISLANDS):
        raise UsageError(
            f"{num_islands} islands from index {first} on cannot be launched: 1 to "
            f"{MAX_ISLANDS} can, in all."
        )


GRACE_S = 30.0
"""How long an island may take to leave cleanly after SIGTERM."""

Keep = Callable[[Handle], None]


@dataclass(frozen=True, kw_only=True)
class LaunchOrder:
    """A request to launch islands of one spec, with the indexes from `first` on."""

    id: str
    spec: IslandSpec
    num_islands: int
    first: int = 0
    values: Mapping[str, Secret] = field(default_factory=dict)
    """Secrets that the launching process has read, by variable: only for the engine's
    mechanism for secrets. Those that the engine stores are in `spec.secrets`."""

    is_coordinator: bool = False
    """Whether this launches a coordinator instead of islands: islands of this engine
    must reach it, as `Traits.serving` describes."""

    def __post_init__(self) -> None:
        check_id(self.id)
        check_indexes(self.first, self.num_islands)

    @property
    def indexes(self) -> range:
        return range(self.first, self.first + self.num_islands)

    def handle(
        self,
        engine: str,
        reference: Mapping[str, Any],
        *,
        options: Mapping[str, str] | None = None,
        begun_at_s: float = 0.0,
        run: str | None = None,
    ) -> Handle:
        """Return the handle of this launch, with the engine's own reference in it.

        `run` is the URL of a coordinator, where the engine gives it one.
        """
        return Handle(
            id=self.id,
            engine=engine,
            run=run or self.spec.run,
            name=self.spec.name,
            num_islands=self.num_islands,
            first=self.first,
            begun_at_s=begun_at_s,
            options=options or {},
            reference=reference,
        )


ADDRESS_PLACEHOLDER = "{address of this place}"
"""An argument of a command that stands for the address of its host as others reach it:
the bootstrap replaces it, unless the engine does."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorPlacement:
    """How a coordinator runs on an engine's hosts, which have no files of this user."""

    is_reachable: bool
    """Whether this machine reaches it, too. Otherwise it cannot be queried from here:
    its plan has its URL, and its engine reports its end."""

    host: str = "0.0.0.0"
    """Where it listens."""

    port: int | None = None
    """None for any free port, which the coordinator then reports."""

    options: Mapping[str, str] = field(default_factory=dict)
    """The engine's options for it, instead of those of the islands."""


@dataclass(frozen=True)
class Traits:
    """Properties of an engine that its callers depend on."""

    is_elsewhere: bool = True
    """Whether islands have no access to this user's and this machine's files: then code
    is shipped, and a pass is among the secrets of an order."""

    can_cancel_some: bool = True
    """Whether single islands of a launch can be ended."""

    serving: CoordinatorPlacement | None = None
    """None if the hosts of islands cannot reach each other."""


@dataclass(frozen=True)
class LaunchPlan:
    """A submission that has not been made: for `--dry-run` and for inspection."""

    data: Any
    """JSON: a manifest, a request, the arguments of a call. No value of a secret."""

    text: str
    """The same in the format of the engine's own tools: a script, YAML, JSON."""

    url: str | None = None
    """Where islands would reach a coordinator, if that is known before it runs."""


class Launcher(Protocol):
    """Starts islands on one engine. `atoll.launch` and the command line call it.

    Its constructor has checked that its SDK is installed and its options are valid. Any
    thread may call, one at a time. A handle may come from another process, and be old.
    """

    @property
    def traits(self) -> Traits:
        """Properties of this engine."""
        ...

    def plan(self, order: LaunchOrder) -> LaunchPlan:
        """Return the submission of `launch`. Nothing is contacted, nothing changes.

        Raises:
            UsageError: the engine cannot fulfil a field of the spec, which is named.
        """
        ...

    def launch(self, order: LaunchOrder, *, keep: Keep) -> Handle:
        """Submit every island, and return their handle; they need not run yet.

        `keep` is called with a handle before the first submission that could be left
        over, and again whenever the handle has changed. If this raises, the caller
        cancels by the last handle that was kept.

        Raises:
            UsageError: as `plan`; or that id is in use already.
            Refused: this user lacks the permission.
            Unreachable: no response; islands may run, and the kept handle finds them.
        """
        ...

    def poll(self, handle: Handle) -> tuple[Report, ...]:
        """Return a report of every island, in the order of indexes.

        An island that the engine no longer knows is LOST, which is no error.

        Raises:
            Unreachable, Refused: the engine gave no reports.
        """
        ...

    def logs(self, handle: Handle, index: int, *, after: int = 0) -> list[str]:
        """Return the log lines of an island, of all incarnations, oldest first.

        The first `after` lines are left out, so a caller that passes the number of
        lines it has follows the log. Lines that the engine has deleted are missing; an
        island that it does not know has none.
        """
        ...

    def cancel(
        self,
        handle: Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """Send SIGTERM to islands, all or some; those left after `grace_s` are killed.

        On SIGTERM an island leaves its run cleanly. Returns when the engine has
        accepted the request; `poll` reports when islands have ended. Safe to repeat;
        islands that are over or were never submitted do not change.

        Raises:
            UsageError: some were named, and this engine can only end all.
        """
        ...


def as_json(data: Any) -> LaunchPlan:
    """Return a plan that is printed as JSON, for people and for `jq`."""
    return LaunchPlan(data, json.dumps(data, indent=2) + "\n")


Options = TypeVar("Options")

_TRUTHS = {"true": True, "false": False}


def read_options(
    kind: type[Options], options: Mapping[str, str], *, engine: str
) -> Options:
    """Return an engine's options from text; a missing key means its default.

    Raises:
        UsageError: a key is unknown, or a value has the wrong type.
    """
    hints = get_type_hints(kind)
    names = [option.name for option in fields(kind)]  # type: ignore[arg-type]
    for key in options:
        if key not in names:
            near = f"Did you mean {nearest(key, names)!r}?" if names else "It has none."
            raise UsageError(f"{engine} has no option {key!r}. {near}")
    values = {
        key: _value(hints[key], text, key=f"{engine}'s option {key}")
        for key, text in options.items()
    }
    return kind(**values)


def _value(hint: Any, text: str, *, key: str) -> Any:
    kinds = [
        candidate
        for candidate in (int, float, bool, str)
        if candidate in _members(hint)
    ]
    assert kinds, f"{key} has no kind that can be written"
    kind = kinds[0]
    try:
        return _TRUTHS[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError) as exc:
        needed = {int: "a whole number", float: "a number", bool: "true or false"}
        raise UsageError(f"{key}={text!r} is not {needed[kind]}.") from exc


def _members(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__args__", (hint,))
