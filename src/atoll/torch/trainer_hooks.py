"""An island in the loop of a trainer that runs, saves and resumes by itself.

The trainer writes the checkpoints, and the island is one part of them. The model has
the local weights while it is trained, and the anchor whenever it is evaluated or saved,
and after the training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from atoll.errors import AtollWarning
from atoll.exchange import CollectiveRun, MemoryRun
from atoll.island import Host
from atoll.island.base import IslandHandle
from atoll.island.checkpoints import (
    IslandComponent,
    StepCounterFile,
    report_resumed,
    warn_fresh_optimizer,
)
from atoll.island.environment import island_from_environment
from atoll.island.identity import island_key
from atoll.island.saved_state import SavedIsland, to_tree
from atoll.island.snapshot import save_island
from atoll.torch.construction import require_trained, require_values
from atoll.torch.island import Island
from atoll.torch.join import enter_alone, is_perhaps_spread
from atoll.torch.model import HeldWeights, HostWeights
from atoll.weights.layout import F32

Run = MemoryRun | CollectiveRun | str | None
Optimizers = Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class SavedIncarnation:
    """An island in a trainer's checkpoint. Implements `EarlierIncarnation`."""

    directory: Path
    """The directory of the trainer's checkpoints, which also has the island's key."""

    saved: SavedIsland | None = None
    is_resumed: bool = False
    """Whether the trainer resumes from a checkpoint, with or without an island."""

    is_exact: bool = False

    def key(self) -> bytes:
        return island_key(self.directory, run="", island="")


class SavedSubject(Protocol):
    """The island that a trainer's checkpoints hold: a host, or a rank's counts."""

    @property
    def progress(self) -> tuple[int, int]: ...

    def saving(
        self, *, is_exact: bool
    ) -> AbstractContextManager[SavedIsland | None]: ...


class TrainerSession:
    """One incarnation of an island, for a trainer's hooks to call."""

    def __init__(
        self,
        island: Island,
        handle: IslandHandle,
        weights: HeldWeights,
        subject: SavedSubject,
        counter: StepCounterFile | None,
    ) -> None:
        self.island, self._handle, self._weights = island, handle, weights
        self._subject, self._counter = subject, counter
        self._shown = ExitStack()
        self.shows_anchor = self.has_left = False

    def ask_to_end_when(self, is_asked: Callable[[], bool]) -> None:
        """Use the signal of a trainer that handles SIGTERM itself."""
        self._handle.end_when(is_asked)

    def note_step(self) -> None:
        """Record the island's steps: the next incarnation reports lost work by them."""
        if self._counter is not None:
            self._counter.note(*self._subject.progress)

    def show_anchor(self) -> None:
        """Put the anchor into the model until `show_local`. Safe to repeat."""
        if not self.shows_anchor and not self.has_left:
            self._shown.enter_context(self.island.evaluating())
            self.shows_anchor = True

    def show_local(self) -> None:
        """Put the weights that are trained back into the model. Safe to repeat."""
        self.shows_anchor = False
        self._shown.close()

    @contextmanager
    def part(self) -> Iterator[IslandComponent]:
        """Yield the island's part of a checkpoint, which does not change meanwhile.

        The model must hold the local weights.
        """
        part = IslandComponent()
        with self._subject.saving(is_exact=False) as saved:
            part.tree = to_tree(saved) if saved else {}
            yield part

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the run with the anchor in the model. Safe to repeat.

        After an error the work since the last seal is not published.
        """
        if self.has_left:
            return
        anchor = self._anchor() if error is None else None
        self.show_local()
        self.has_left = True
        if self._counter is not None:
            self._counter.close()
            self._counter = None
        kind = None if error is None else type(error)
        self.island.__exit__(kind, error, None)
        if anchor is not None:
            self._weights.restore_local(anchor)

    def _anchor(self) -> list[F32]:
        """Return a copy of the anchor; the model has the local weights afterwards."""
        self.show_anchor()
        anchor = self._weights.keep_local()
        self.show_local()
        return anchor


def open_session(
    model: torch.nn.Module,
    optimizers: Optimizers,
    run: Run,
    *,
    island: str | None,
    past: SavedIncarnation,
) -> TrainerSession:
    """Join a run for a trainer that has built, and perhaps restored, everything.

    All ranks of a model in DDP or under FSDP2 call it. Afterwards the weights are the
    run's, not the checkpoint's; `leave` must be called, also after errors.

    Raises:
        ModelError, UsageError, RemoteError: as `atoll.torch.join`.
    """
    past = _without_other_island(past, run, island)

    def check() -> None:
        require_values([model])
        require_trained([model], optimizers)

    joined = _join_ranks(model, optimizers, run, island, past, check)
    if joined is None:
        joined = _join_alone(model, run, island, past, check)
    handle, weights, modules, subject, host = joined
    try:
        counter = _step_counter(host, past) if host is not None else None
    except BaseException:
        handle.leave(depart=False, is_alone=True)
        raise
    session = TrainerSession(
        Island(handle, weights, modules, optimizers[-1], on_end="flag"),
        handle,
        weights,
        subject,
        counter,
    )
    session.island.__enter__()
    return session


class _RankCounts:
    """The counts of an island of several ranks, for a trainer's checkpoint.

    A trainer may save on one rank alone, so the parts of the others are not collected.
    """

    def __init__(self, handle: IslandHandle, *, is_leader: bool) -> None:
        self._handle, self._is_leader = handle, is_leader

    @property
    def progress(self) -> tuple[int, int]:
        if self._is_leader:
            return self._handle.host.progress
        return self._handle.counters.inner_steps, self._handle.counters.tokens

    @contextmanager
    def saving(self, *, is_exact: bool) -> Iterator[SavedIsland | None]:
        if not self._is_leader:
            yield None
            return
        host = self._handle.host
        yield save_island(
            host.joined, [], host.counters, stride=host.stride, is_exact=False
        )


_Joined = tuple[
    IslandHandle,
    HeldWeights,
    Sequence[torch.nn.Module],
    SavedSubject,
    Host | None,
]


def _join_alone(
    model: torch.nn.Module,
    run: Run,
    island: str | None,
    past: SavedIncarnation,
    check: Callable[[], None],
) -> _Joined:
    check()
    host, view = enter_alone(model, run, island=island, checkpointing=past)
    return host, HostWeights(host, view), [model], host, host


def _join_ranks(
    model: torch.nn.Module,
    optimizers: Optimizers,
    run: Run,
    island: str | None,
    past: SavedIncarnation,
    check: Callable[[], None],
) -> _Joined | None:
    """Join with all ranks of the model; None: this process trains alone."""
    if not is_perhaps_spread(model):
        return None
    from atoll.torch.ranks import join_ranks

    joined = join_ranks(
        model,
        run,
        island=island,
        checkpoint=None,
        check=check,
        optimizer=optimizers,
        past=past,
    )
    if joined is None:
        return None
    handle, modules, _ = joined
    is_leader = torch.distributed.get_rank() == 0
    if not is_leader:
        handle.counters.inner_steps = handle.concluded.trained[0]
    counts = _RankCounts(handle, is_leader=is_leader)
    return handle, handle, modules, counts, handle.host if is_leader else None


def _without_other_island(
    past: SavedIncarnation, run: Run, island: str | None
) -> SavedIncarnation:
    """Return the past, without its island if that is not this one.

    Its work belongs to that island, which resumes it or has counted it.
    """
    name = island
    if name is None and not isinstance(run, MemoryRun) and run != "none":
        name = island_from_environment()
    saved = past.saved
    if saved is None or name is None or saved.island == name:
        return past
    warnings.warn(
        f"The checkpoint is of island {saved.island!r}, and this is {name!r}: its "
        "work since the last round is left to that island. Give every island its own "
        "directory.",
        AtollWarning,
        stacklevel=2,
    )
    return SavedIncarnation(past.directory, None, is_resumed=past.is_resumed)


def _step_counter(host: Host, past: SavedIncarnation) -> StepCounterFile:
    """Report how the island resumes, and return the file of its step counter."""
    trained = StepCounterFile.read(past.directory)
    if host.resumed is not None:
        # Only the trainer knows the position of its data, from its checkpoint.
        is_ahead = host.resumed.counted[0] > host.resumed.saved[0]
        cursor = False if is_ahead and not host.has_ended else None
        report_resumed(host.joined, host.resumed, trained=trained, cursor=cursor)
    elif not past.is_resumed:
        warn_fresh_optimizer(host.joined, is_fresh=True, directory=past.directory)
    past.directory.mkdir(parents=True, exist_ok=True)
    counter = StepCounterFile(past.directory)
    counter.note(*host.progress)
    return counter
