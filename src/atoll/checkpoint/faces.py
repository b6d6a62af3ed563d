"""The seam to frameworks: who knows what a tensor, a generator or a rank is.

Rule 1: nothing here imports a framework, or the face that knows it. A face is found by
        name when a value of its framework is met, as a plug-in is.
Rule 2: a framework that no one has imported has no values, so its face is not loaded.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from atoll.checkpoint.arrays import Array, HostArray
from atoll.checkpoint.ranks import Ranks
from atoll.errors import CorruptError, UsageError

FACES = {
    "torch": "atoll.torch.checkpointing",
    "jax": "atoll.jax.checkpointing",
}
"""By the top package of a value's type: the module whose `FACE` knows its values."""

Keep = Callable[[Array], str]
"""Has an array written, and returns the name by which it is read again."""

Path = tuple[object, ...]
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


class Holder(Protocol):
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

    def like(self, path: Path) -> object:
        """Return what lives at a path of the state now, to lay a tensor out like it."""
        ...


class Source(Protocol):
    """Where a face reads the arrays of one component."""

    def read(self, name: str, rank: int | None = None) -> HostArray:
        """Return an array of this rank's part, or of another's; the memory is new."""
        ...

    def elsewhere(self, path: Path) -> Mapping[int, object]:
        """Return what every rank's part holds at a path, still encoded."""
        ...


class Face(Protocol):
    """A framework's values. The tree and the holders are the only callers."""

    def encode(self, value: object, keep: Keep) -> tuple[str, object] | None:
        """Return a value's tag and JSON body; None if it is no value of this face."""
        ...

    def decode(self, tag: str, body: object, path: Path, held: Held) -> object:
        """Return the value of a tag of this face's own."""
        ...

    def holder(self, value: object, objects: Mapping[str, object]) -> Holder | None:
        """Return what saves and restores an object; None if it has no state.

        `objects` is all that is saved with it.
        """
        ...

    def random(self) -> Holder | None:
        """Return the random states that belong to the process; None: it has none."""
        ...

    def ranks(self) -> Ranks | None:
        """Return the processes that save together; None when there is one."""
        ...


class Held:
    """What a value of a face may need to come back: its arrays, and what is there."""

    def __init__(self, source: Source, like: Callable[[Path], object]) -> None:
        self.source = source
        self.like = like


class _Nothing:
    def read(self, name: str, rank: int | None = None) -> HostArray:
        raise CorruptError(f"An array, {name[:60]!r}, stands where none can.")

    def elsewhere(self, path: Path) -> Mapping[int, object]:
        return {}


NOTHING_HELD = Held(_Nothing(), lambda path: None)
"""For what is made of JSON alone."""


def face_of(value: object) -> Face | None:
    """Return the face whose framework a value's type, or a base of it, comes from."""
    for base in type(value).__mro__:
        top = base.__module__.partition(".")[0]
        if top in FACES:
            return face_named(top)
    return None


def face_named(name: str) -> Face:
    """Return a face; its framework is loaded if it was not.

    Raises:
        UsageError: the framework is not installed.
    """
    try:
        face: Face = importlib.import_module(FACES[name]).FACE
    except ModuleNotFoundError as exc:
        raise UsageError(
            f"The checkpoint holds values of {name}, and {exc.name} is not installed. "
            f"Run: pip install 'atoll[{name}]'"
        ) from exc
    return face


def present_faces() -> dict[str, Face]:
    """Return the faces of the frameworks that this process has imported."""
    return {name: face_named(name) for name in FACES if name in sys.modules}


def present_ranks() -> Ranks | None:
    """Return the processes of a framework's world that this one belongs to."""
    for face in present_faces().values():
        ranks = face.ranks()
        if ranks is not None:
            return ranks
    return None
