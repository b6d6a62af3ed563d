"""The seam to frameworks and to ranks: which code handles a tensor or a generator.

Rule 1: nothing here imports a framework, or the adapter of one. An adapter is found by
        name when a value of its framework is met, as a plug-in is.
Rule 2: a framework that is not imported has no values, so its adapter is not loaded.

`Ranks` is the port to the processes that save one checkpoint together.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar, runtime_checkable

from atoll.checkpoint.arrays import (
    CheckpointArray,
    HostArray,
)
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
    """Have every rank act, and return what each of them said.

    What one rank fails with is raised on all of them, so that no rank goes on alone and
    none waits for one that is gone.
    """
    error: BaseException | None = None
    try:
        word = "+" + act()
    except AtollError as exc:
        error, word = exc, f"-{_kind_of(exc)} {exc}"
    except BaseException as exc:
        # The others must hear of a bug too, or they wait for this rank for ever.
        error, word = exc, f"-remote {type(exc).__name__}: {exc}"
    words = ranks.gather(word)
    if error is not None:
        raise error
    for rank, said in enumerate(words):
        if said.startswith("-"):
            kind, _, text = said[1:].partition(" ")
            raise _KINDS[kind](f"Rank {rank}: {text}")
    return [said[1:] for said in words]


def _kind_of(error: AtollError) -> str:
    return next(
        (kind for kind, base in _KINDS.items() if isinstance(error, base)), "remote"
    )


ADAPTERS = {
    "torch": "atoll.torch.checkpoint",
    "jax": "atoll.jax.checkpoint",
}
"""By the top package of a value's type: the module whose `FACE` knows its values."""

Keep = Callable[[CheckpointArray], str]
"""Has an array written, and returns the name by which it is read again."""

TreePath = tuple[object, ...]
"""The keys and indices that lead to a value."""


@runtime_checkable
class Stateful(Protocol):
    """What a component may be: models, optimizers, schedulers and loaders are."""

    def state_dict(self) -> object:
        """Return a tree of dicts, lists, tuples, numbers, words and arrays."""
        ...

    def load_state_dict(self, state: object, /) -> object:
        """Be what such a tree says."""
        ...


class StateHolder(Protocol):
    """One object of a component, seen by who saves and restores it."""

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the same, so that one of them writes it."""
        ...

    def state(self) -> object:
        """Return the object's state as a tree."""
        ...

    def restore(self, state: object) -> None:
        """Put a state back."""
        ...

    def like(self, path: TreePath) -> object:
        """Return what lives at a path of the state now, to lay a tensor out like it."""
        ...


class ArraySource(Protocol):
    """Where a face reads the arrays of one component."""

    def read(self, name: str, rank: int | None = None) -> HostArray:
        """Return an array of this rank's part, or of another's; the memory is new."""
        ...

    def elsewhere(self, path: TreePath) -> Mapping[int, object]:
        """Return what every rank's part holds at a path, still encoded."""
        ...


class FrameworkAdapter(Protocol):
    """A framework's values. The tree and the holders are the only callers."""

    def encode(self, value: object, keep: Keep) -> tuple[str, object] | None:
        """Return a value's tag and JSON body; None if it is no value of this face."""
        ...

    def decode(
        self, tag: str, body: object, path: TreePath, held: RestoreContext
    ) -> object:
        """Return the value of a tag of this face's own."""
        ...

    def holder(
        self, value: object, objects: Mapping[str, object]
    ) -> StateHolder | None:
        """Return what saves and restores an object; None if it has no state.

        `objects` is all that is saved with it.
        """
        ...

    def random(self) -> StateHolder | None:
        """Return the random states that belong to the process; None: it has none."""
        ...

    def ranks(self) -> Ranks | None:
        """Return the processes that save together; None when there is one."""
        ...


class RestoreContext:
    """What a value of a face may need to come back: its arrays, and what is there."""

    def __init__(self, source: ArraySource, like: Callable[[TreePath], object]) -> None:
        self.source = source
        self.like = like


class _Nothing:
    def read(self, name: str, rank: int | None = None) -> HostArray:
        raise CorruptError(f"An array, {name[:60]!r}, stands where none can.")

    def elsewhere(self, path: TreePath) -> Mapping[int, object]:
        return {}


EMPTY_CONTEXT = RestoreContext(_Nothing(), lambda path: None)
"""For what is made of JSON alone."""


def adapter_of(value: object) -> FrameworkAdapter | None:
    """Return the face whose framework a value's type, or a base of it, comes from."""
    for base in type(value).__mro__:
        top = base.__module__.partition(".")[0]
        if top in ADAPTERS:
            return adapter_named(top)
    return None


def adapter_named(name: str) -> FrameworkAdapter:
    """Return a face; its framework is loaded if it was not.

    Raises:
        UsageError: the framework is not installed.
    """
    try:
        face: FrameworkAdapter = importlib.import_module(ADAPTERS[name]).FACE
    except ModuleNotFoundError as exc:
        raise UsageError(
            f"The checkpoint holds values of {name}, and {exc.name} is not installed. "
            f"Run: pip install 'atoll[{name}]'"
        ) from exc
    return face


def present_adapters() -> dict[str, FrameworkAdapter]:
    """Return the faces of the frameworks that this process has imported."""
    return {name: adapter_named(name) for name in ADAPTERS if name in sys.modules}


def present_ranks() -> Ranks | None:
    """Return the processes of a framework's world that this one belongs to."""
    for face in present_adapters().values():
        ranks = face.ranks()
        if ranks is not None:
            return ranks
    return None
