"""Processes that save one checkpoint together: the port, and a process on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

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

    def gather(self, word: str) -> list[str]:
        """Return every rank's word, in the order of ranks, on every rank."""
        ...


class Alone:
    """One process. Implements `Ranks`."""

    rank = LEADER
    size = 1

    def gather(self, word: str) -> list[str]:
        return [word]


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
