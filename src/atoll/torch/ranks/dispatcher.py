"""Calls of one method on every rank of an island.

A class marks methods with `on_all_ranks`, and registers its object at a dispatcher on
every rank. At the leader a call sends the method's name and arguments to the other
ranks, and runs the method; each of them runs the same method of its object meanwhile.

Rule 1: only marked methods of registered objects can be called, and each argument must
        have the type that the method declares.
Rule 2: an object that every rank has a part of, such as a fragment, is sent as its
        number: see `refer`. An argument that is `OnlyLeader` is None on other ranks.
Rule 3: a marked method calls no marked method, except at the leader alone.
Rule 4: an error of any rank is raised at the leader after all ranks have finished.
"""

from __future__ import annotations

import inspect
import threading
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import wraps
from types import UnionType
from typing import Annotated, Any, Concatenate, ParamSpec, Protocol, TypeVar

from atoll.errors import CorruptError, RemoteError
from atoll.island.fragment import SealTerms
from atoll.protocol.island import RemainingWork
from atoll.settings import RunSettings
from atoll.torch.ranks.channel import (
    LEADER,
    BackgroundOrders,
    CollectiveCalls,
    Message,
    RankChannel,
    from_message,
    to_message,
)
from atoll.weights.state import OuterStep
from atoll.wire import OuterValues, Verdict

Value = TypeVar("Value")
OnlyLeader = Annotated[Value | None, LEADER]
"""An argument that stays at the leader: the other ranks get None."""


class Thread(Enum):
    """The thread of each rank that runs a method."""

    TRAINING = auto()
    """The training thread, which is in a collective call."""

    BACKGROUND = auto()
    """The background thread, after all earlier calls in the training thread."""

    AT_ONCE = auto()
    """The background thread, though the training thread may lag behind."""

    IF_IDLE = auto()
    """As `AT_ONCE`; a leader whose background thread is busy raises `BlockingIOError`
    instead of waiting."""


class OnRanks(Protocol):
    """An object whose class has marked methods. Each rank has one."""

    @property
    def ranks(self) -> RankDispatcher: ...


@dataclass(frozen=True)
class RankMethod:
    """A marked method. `combine` makes the result of those of all ranks, in order."""

    run: Callable[..., Any]
    thread: Thread
    combine: Callable[[list[Any]], Any] | None

    @property
    def name(self) -> str:
        return self.run.__qualname__


_MARKED: dict[Callable[..., Any], RankMethod] = {}

O = TypeVar("O", bound=OnRanks)  # noqa: E741 # the object
P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate[O, P], T]


class Mark(Protocol):
    """A decorator that keeps a method's signature."""

    def __call__(self, run: Method[O, P, T], /) -> Method[O, P, T]: ...


def on_all_ranks(
    thread: Thread, *, combine: Callable[[list[Any]], Any] | None = None
) -> Mark:
    """Mark a method: a call at the leader runs it on every rank.

    The leader's result is returned. With `combine`, which takes the results of all
    ranks, they are sent, and must be plain values.
    """

    def mark(run: Method[O, P, T]) -> Method[O, P, T]:
        method, signature = RankMethod(run, thread, combine), inspect.signature(run)

        @wraps(run)
        def call(self: O, /, *args: P.args, **kwargs: P.kwargs) -> T:
            _, *arguments = signature.bind(self, *args, **kwargs).arguments.items()
            result: T = self.ranks.call(method, self, dict(arguments))
            return result

        _MARKED[call] = method
        return call

    return mark


@dataclass(frozen=True)
class Encoding:
    """The plain form of an argument, and the way back on another rank."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _plain(kind: type, *accepted: type) -> Encoding:
    """Return the encoding of a plain value, which is itself."""

    def decode(value: Any) -> Any:
        if type(value) not in (kind, *accepted):
            raise TypeError(f"it is a {type(value).__name__}, not a {kind.__name__}")
        return kind(value)

    return Encoding(kind, decode)


ENCODINGS: dict[Any, Encoding] = {
    bool: _plain(bool),
    int: _plain(int),
    float: _plain(float, int),
    str: _plain(str),
    tuple[int, int]: Encoding(list, lambda pair: (int(pair[0]), int(pair[1]))),
    Verdict: Encoding(lambda verdict: verdict.name, lambda name: Verdict[name]),
    RemainingWork: Encoding(lambda work: work.name, lambda name: RemainingWork[name]),
    RunSettings: Encoding(RunSettings.to_dict, RunSettings.from_dict),
}
"""By the declared type of an argument."""


def _record(kind: type) -> Encoding:
    """Return the encoding of a dataclass, whose fields have encodings."""
    fields = {
        name: ENCODINGS[hint] for name, hint in typing.get_type_hints(kind).items()
    }
    return Encoding(
        lambda record: {n: fields[n].encode(getattr(record, n)) for n in fields},
        lambda values: kind(**{n: fields[n].decode(values[n]) for n in values}),
    )


ENCODINGS[OuterValues] = _record(OuterValues)
ENCODINGS |= {kind: _record(kind) for kind in (OuterStep, SealTerms)}


class RankDispatcher:
    """One rank's objects with marked methods: calls them, or executes the calls."""

    def __init__(self, orders: RankChannel, works: RankChannel) -> None:
        self.orders, self.works = orders, works
        self.is_leader = orders.is_leader
        self.collective = CollectiveCalls(orders)
        self.background = BackgroundOrders(works)
        self._methods: dict[str, tuple[RankMethod, object]] = {}
        self._arguments: dict[str, dict[str, Encoding]] = {}
        self._encodings = dict(ENCODINGS)
        self._num_executed, self._changed = 0, threading.Condition()
        self._is_over = False
        self._error: Exception | None = None

    def refer(
        self, kind: Any, encode: Callable[[Any], Any], decode: Callable[[Any], Any]
    ) -> None:
        """Send arguments of this type as `encode` returns, for `decode` to find."""
        self._encodings[kind] = Encoding(encode, decode)

    def register(self, target: OnRanks) -> None:
        """Offer the marked methods of an object; their types must be known by now."""
        for function in vars(type(target)).values():
            if not inspect.isfunction(function) or function not in _MARKED:
                continue
            method = _MARKED[function]
            hints = typing.get_type_hints(method.run, include_extras=True)
            names = list(inspect.signature(method.run).parameters)[1:]
            self._methods[method.name] = method, target
            self._arguments[method.name] = {
                name: self._encoding(hints[name]) for name in names
            }

    def call(
        self, method: RankMethod, target: OnRanks, arguments: dict[str, Any]
    ) -> Any:
        """Run a method on every rank, and return its result. Only at the leader.

        Raises:
            Exception: of any rank. All have finished.
        """
        assert self.is_leader, f"{method.name} is called on a rank that only executes"
        encodings = self._arguments[method.name]
        order: Message = {
            "method": method.name,
            "arguments": {n: encodings[n].encode(arguments[n]) for n in arguments},
        }
        if method.thread is Thread.TRAINING:
            self.collective.order(order)
            return method.run(target, **arguments)
        if method.thread is Thread.BACKGROUND:
            order["after"] = self.collective.num_orders
        result, answers = self.background.execute(
            order,
            lambda: method.run(target, **arguments),
            if_idle=method.thread is Thread.IF_IDLE,
        )
        if method.combine is None:
            return result
        return method.combine([result, *(answer["result"] for answer in answers)])

    def execute(self, order: Message) -> None:
        """Execute a call in the training thread; `take_error` returns its error.

        After an error, the other calls of the same collective call are skipped.
        """
        try:
            if self._error is None:
                self._run(order)
        except Exception as exc:  # sent to the leader at the end of the call
            self._error = exc
        with self._changed:
            self._num_executed += 1
            self._changed.notify_all()

    def take_error(self) -> Message:
        """Return the error since the last call as a message, or an empty one."""
        error, self._error = self._error, None
        return {} if error is None else to_message(error, self.orders.rank)

    def answer(self, order: Message) -> Message:
        """Execute a call in the background thread, and return the answer.

        Raises:
            RemoteError: another rank has ended.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over or self._num_executed >= order.get("after", 0)
            )
        try:
            return self._run(order)
        except RemoteError:
            raise
        except Exception as exc:  # the leader sends it to all ranks
            return to_message(exc, self.works.rank)

    def take_part(self, entry: Message) -> Message:
        """Enter a collective call, and execute it; return the leader's conclusion.

        Raises:
            BaseException: the call failed on any rank.
        """
        self.orders.send_message(LEADER, entry)
        while True:
            order = self.orders.receive_message(LEADER)
            match order.get("do"):
                case None:
                    self.execute(order)
                case "close":
                    self.orders.send_message(LEADER, self.take_error())
                case "resume":
                    return order
                case "fail":
                    raise from_message(order)

    def release(self) -> None:
        """Unblock background calls that wait for calls that will not come."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _run(self, order: Message) -> Message:
        name = order["method"]
        if name not in self._methods:
            raise CorruptError(f"The leader calls {name!r}, which no rank has. {_SAME}")
        method, target = self._methods[name]
        result = method.run(target, **self._decoded(name, order["arguments"]))
        return {} if method.combine is None else {"result": result}

    def _decoded(self, method: str, arguments: Message) -> dict[str, Any]:
        encodings, decoded = self._arguments[method], {}
        if encodings.keys() != arguments.keys():
            raise CorruptError(
                f"The leader calls {method} with {sorted(arguments)}, and it takes "
                f"{sorted(encodings)}. {_SAME}"
            )
        for name, value in arguments.items():
            try:
                decoded[name] = encodings[name].decode(value)
            except (KeyError, IndexError, TypeError, ValueError) as exc:
                raise CorruptError(
                    f"The leader calls {method} with {name}={value!r}: "
                    f"{type(exc).__name__}: {exc}. {_SAME}"
                ) from exc
        return decoded

    def _encoding(self, hint: Any) -> Encoding:
        """Return the encoding of an argument of this type."""
        if typing.get_origin(hint) is Annotated and LEADER in hint.__metadata__:
            return Encoding(lambda value: None, lambda value: None)
        if isinstance(hint, UnionType):
            kind, _ = typing.get_args(hint)
            return _optional(self._encoding(kind))
        encoding: Encoding = self._encodings[hint]
        return encoding


_SAME = "Run the same Atoll on all ranks of the island."


def _optional(encoding: Encoding) -> Encoding:
    return Encoding(
        lambda value: None if value is None else encoding.encode(value),
        lambda value: None if value is None else encoding.decode(value),
    )
