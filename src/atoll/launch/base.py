"""The port to an engine: the system that starts islands, which its user has already.

Rule 1: an engine starts, reports and ends islands; it decides nothing about the run.
Rule 2: an order's `id` names what is submitted, so that it can be found by it even if
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
from atoll.launch.spec import MAX_ISLANDS, IslandSpec, check_name
from atoll.security import Secret
from atoll.settings.rules import nearest


class State(Enum):
    """Where an island is in its life, by the word of its engine."""

    PENDING = "pending"
    """The engine has it and has not started it: it waits for a place, or is loading."""

    RUNNING = "running"
    RESTARTING = "restarting"
    """A life of it has ended, and the engine will start another."""

    FINISHED = "finished"
    """Its command has ended with 0."""

    FAILED = "failed"
    """Its command has ended otherwise, and nobody starts it again."""

    CANCELLED = "cancelled"
    """Somebody has ended it."""

    LOST = "lost"
    """The engine knows nothing of it any more: nobody can tell how it ended."""

    @property
    def is_over(self) -> bool:
        """Whether nothing becomes of it any more."""
        return self not in (State.PENDING, State.RUNNING, State.RESTARTING)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What an engine says of one island."""

    index: int
    name: str
    state: State
    restarts: int = 0
    """Lives after the first, as far as the engine counts them."""

    exit_code: int | None = None
    """Of its last life that has ended; minus the signal's number if one ended it."""

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


GRACE_S = 30.0
"""How long an island has to leave cleanly once it was told to go."""

Keep = Callable[[Handle], None]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be launched: islands of one kind, with the indexes from `first` on."""

    id: str
    spec: IslandSpec
    num_islands: int
    first: int = 0
    values: Mapping[str, Secret] = field(default_factory=dict)
    """Secrets whose values this side knows, by variable: for the engine's way of
    secrets and nothing else. What the engine keeps itself is in `spec.secrets`."""

    is_coordinator: bool = False
    """Whether it is no island that is launched, but what serves them: others of this
    engine must reach it, as `Traits.serving` says."""

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
        """Return what finds this launch, with the engine's own reference in it.

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


LISTEN_THERE = "{address of this place}"
"""A word of a command, in whose place comes the address that others reach a process by:
the bootstrap puts it there, unless the engine knows better."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How a coordinator runs among an engine's islands, where no file of ours is."""

    is_in_sight: bool
    """Whether this machine reaches it, too. Else nothing can be asked of it from here:
    its plan has its URL, and its engine says what became of it."""

    host: str = "0.0.0.0"
    """Where it listens."""

    port: int | None = None
    """None is any that is free: it says itself which."""

    options: Mapping[str, str] = field(default_factory=dict)
    """The engine's words for it, in place of the islands' own."""


@dataclass(frozen=True)
class Traits:
    """What an engine is like."""

    is_elsewhere: bool = True
    """Whether islands see neither this user's files nor this machine's: then code is
    shipped, and a pass is among the secrets of an order."""

    can_cancel_some: bool = True
    """Whether single islands of a launch can be ended."""

    serving: Serving | None = None
    """None if islands that are elsewhere cannot reach each other there."""


@dataclass(frozen=True)
class Plan:
    """What would be submitted: for `--dry-run`, and for whoever wants to see it."""

    data: Any
    """JSON: a manifest, a request, the arguments of a call. No value of a secret."""

    text: str
    """The same as the engine's own tools take it: a script, YAML, JSON."""

    url: str | None = None
    """Where islands would reach a coordinator, if that is known before it runs."""


class Launcher(Protocol):
    """Starts islands on one engine. `atoll.launch` and the command line call it.

    Making one has checked that its SDK is there and its options are right. Any thread
    may call, one at a time. A handle may come from another process, and another day.
    """

    @property
    def traits(self) -> Traits:
        """What this engine is like."""
        ...

    def plan(self, order: Order) -> Plan:
        """Return what `launch` would submit. Nothing is contacted, nothing changes.

        Raises:
            UsageError: the engine cannot do what the spec asks for, by name.
        """
        ...

    def launch(self, order: Order, *, keep: Keep) -> Handle:
        """Submit every island, and return what finds them; they need not run yet.

        `keep` is called with a handle before the first thing is submitted that could
        be left over, and again when the handle has become another. If this raises,
        whoever called cancels by the last handle that was kept.

        Raises:
            UsageError: as `plan`; or something of that id is there already.
            Refused: the engine does not let this user.
            Unreachable: nobody answered; what was kept says what may run.
        """
        ...

    def poll(self, handle: Handle) -> tuple[Report, ...]:
        """Return a report of every island, in the order of indexes.

        An island that the engine does not know any more is LOST, which is no error.

        Raises:
            Unreachable, Refused: the engine was not asked.
        """
        ...

    def logs(self, handle: Handle, index: int, *, after: int = 0) -> list[str]:
        """Return the lines an island has said, all of its lives, oldest first.

        The first `after` are left out: called again with how many are known, it
        follows. What the engine keeps no more is missing; what it never had is [].
        """
        ...

    def cancel(
        self,
        handle: Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """Tell islands to go, all or some; those that stay longer are ended.

        An island is told by SIGTERM, on which it leaves its run cleanly. Returns when
        the engine has heard; `poll` says when they are gone. Safe to repeat, and for
        what is over already, or was never submitted, it changes nothing.

        Raises:
            UsageError: some were named, and this engine can only end all.
        """
        ...


def as_json(data: Any) -> Plan:
    """Return a plan that is printed as JSON, for people and for `jq`."""
    return Plan(data, json.dumps(data, indent=2) + "\n")


Options = TypeVar("Options")

_TRUTHS = {"true": True, "false": False}


def read_options(
    kind: type[Options], given: Mapping[str, str], *, engine: str
) -> Options:
    """Return an engine's options, the defaults where nothing was given.

    Raises:
        UsageError: one is not known, or is no value of its kind.
    """
    hints = get_type_hints(kind)
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            near = f"Did you mean {nearest(key, known)!r}?" if known else "It has none."
            raise UsageError(f"{engine} has no option {key!r}. {near}")
    read = {
        key: _value(hints[key], text, key=f"{engine}'s option {key}")
        for key, text in given.items()
    }
    return kind(**read)


def _value(hint: Any, text: str, *, key: str) -> Any:
    kinds = [each for each in (int, float, bool, str) if each in _members(hint)]
    assert kinds, f"{key} has no kind that can be written"
    kind = kinds[0]
    try:
        return _TRUTHS[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError) as exc:
        needed = {int: "a whole number", float: "a number", bool: "true or false"}
        raise UsageError(f"{key}={text!r} is not {needed[kind]}.") from exc


def _members(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__args__", (hint,))
