"""The ports to frameworks and ranks: adapters for tensors and random generators.

Rule 1: nothing here imports a framework, or the adapter of one. An adapter is loaded by
        name for the first value of its framework, like a plug-in.
Rule 2: a framework that is not imported has no values, so its adapter is not loaded.

`Ranks` is the port to the processes that save one checkpoint together.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar, runtime_checkable

from atoll.checkpoint.arrays import CheckpointArray, HostArray
from atoll.errors import AtollError, CorruptError, RemoteError, UsageError

T = TypeVar("T")

LEADER = 0

_KINDS: dict[str, type[AtollError]] = {
    "usage": UsageError,
    "corrupt": CorruptError,
    "remote": RemoteError,
}


class Ranks(Protocol):
    """The ranks of one world. All of them call the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, text: str) -> list[str]:
        """Return every rank's text, in the order of ranks, on every rank."""
        ...


class SingleRank:
    """One process. Implements `Ranks`."""

    rank = LEADER
    size = 1

    def gather(self, text: str) -> list[str]:
        return [text]


def together(ranks: Ranks, act: Callable[[], str]) -> list[str]:
    """Call `act` on every rank, and return the texts of all ranks.

    An error of one rank is raised on all ranks, so that no rank continues alone, and
    none waits for a rank that has failed.
    """
    error: BaseException | None = None
    try:
        message = "+" + act()
    except AtollError as exc:
        error, message = exc, f"-{_kind_of(exc)} {exc}"
    except BaseException as exc:
        # A bug must reach the other ranks, too, or they wait for this one forever.
        error, message = exc, f"-remote {type(exc).__name__}: {exc}"
    messages = ranks.gather(message)
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message.startswith("-"):
            kind, _, text = message[1:].partition(" ")
            raise _KINDS[kind](f"Rank {rank}: {text}")
    return [message[1:] for message in messages]


def _kind_of(error: AtollError) -> str:
    return next(
        (kind for kind, base in _KINDS.items() if isinstance(error, base)), "remote"
    )


ADAPTERS = {
    "torch": "atoll.torch.checkpoint",
    "jax": "atoll.jax.checkpoint",
}
"""By the top package of a value's type: the module with the adapter, as `FACE`."""

Keep = Callable[[CheckpointArray], str]
"""Adds an array to the checkpoint, and returns the name by which it is read."""

TreePath = tuple[object, ...]
"""The keys and indices that lead to a value."""


@runtime_checkable
class Stateful(Protocol):
    """An object with state: a model, an optimizer, a scheduler, a data loader."""

    def state_dict(self) -> object:
        """Return a tree of dicts, lists, tuples, numbers, strings and arrays."""
        ...

    def load_state_dict(self, state: object, /) -> object:
        """Take the state of such a tree."""
        ...


class StateHolder(Protocol):
    """Reads and restores the state of one object of a component."""

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has the same state, so that one of them writes it."""
        ...

    def state(self) -> object:
        """Return the object's state as a tree."""
        ...

    def restore(self, state: object) -> None:
        """Restore a state into the object."""
        ...

    def like(self, path: TreePath) -> object:
        """Return the present value at a path of the state, as a tensor's template."""
        ...


class ArraySource(Protocol):
    """The arrays of one component, for the adapter that restores it."""

    def read(self, name: str, rank: int | None = None) -> HostArray:
        """Return an array of this rank's part, or of another rank's, in new memory."""
        ...

    def elsewhere(self, path: TreePath) -> Mapping[int, object]:
        """Return the encoded value at a path in every rank's part."""
        ...


class FrameworkAdapter(Protocol):
    """Encodes the values of one framework. Only `tree` calls it."""

    def encode(self, value: object, keep: Keep) -> tuple[str, object] | None:
        """Return a value's tag and JSON body; None if it is of another framework."""
        ...

    def decode(
        self, tag: str, body: object, path: TreePath, context: RestoreContext
    ) -> object:
        """Return the value of a tag that `encode` has returned."""
        ...

    def holder(
        self, value: object, objects: Mapping[str, object]
    ) -> StateHolder | None:
        """Return the holder of an object's state; None if it has no state.

        `objects` are all objects that are saved together.
        """
        ...

    def random(self) -> StateHolder | None:
        """Return the holder of the process's random states; None if it has none."""
        ...

    def ranks(self) -> Ranks | None:
        """Return the processes that save together; None if there is only one."""
        ...


class RestoreContext:
    """The arrays of a component, and the present values as templates."""

    def __init__(
        self, source: ArraySource, template: Callable[[TreePath], object]
    ) -> None:
        self.source = source
        self._template = template

    def like(self, path: TreePath) -> object:
        """Return the present value at a path; None if there is none."""
        return self._template(path)


class _NoArrays:
    def read(self, name: str, rank: int | None = None) -> HostArray:
        raise CorruptError(f"An array, {name[:60]!r}, is in a place that has none.")

    def elsewhere(self, path: TreePath) -> Mapping[int, object]:
        return {}


EMPTY_CONTEXT = RestoreContext(_NoArrays(), lambda path: None)
"""The context of values without arrays."""


def adapter_of(value: object) -> FrameworkAdapter | None:
    """Return the adapter of the framework that a value's type, or a base, is from."""
    for base in type(value).__mro__:
        top = base.__module__.partition(".")[0]
        if top in ADAPTERS:
            return adapter_named(top)
    return None


def adapter_named(name: str) -> FrameworkAdapter:
    """Return an adapter. Its framework is imported if necessary.

    Raises:
        UsageError: the framework is not installed.
    """
    try:
        adapter: FrameworkAdapter = importlib.import_module(ADAPTERS[name]).FACE
    except ModuleNotFoundError as exc:
        raise UsageError(
            f"The checkpoint holds values of {name}, and {exc.name} is not installed. "
            f"Run: pip install 'atoll[{name}]'"
        ) from exc
    return adapter


def present_adapters() -> dict[str, FrameworkAdapter]:
    """Return the adapters of the frameworks that this process has imported."""
    return {name: adapter_named(name) for name in ADAPTERS if name in sys.modules}


def present_ranks() -> Ranks | None:
    """Return the ranks of the distributed world of this process, if there is one."""
    for adapter in present_adapters().values():
        ranks = adapter.ranks()
        if ranks is not None:
            return ranks
    return None
