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
from atoll.island.checkpoints import (
    IslandComponent,
    StepCounterFile,
    report_resumed,
    warn_fresh_optimizer,
)
from atoll.island.environment import island_from_environment
from atoll.island.identity import island_key
from atoll.island.saved_state import COUNTERS, SavedIsland, to_tree
from atoll.torch.construction import require_trained, require_values
from atoll.torch.host import Alone, Life
from atoll.torch.island import Island
from atoll.torch.join import enter_alone, is_perhaps_spread

Run = MemoryRun | CollectiveRun | str | None
Optimizers = Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class Past:
    """What a trainer's checkpoint knows of an island. Implements `joining.Past`."""

    directory: Path
    """Of the trainer's checkpoints, where the island's key is kept beside them."""

    saved: SavedIsland | None = None
    is_resumed: bool = False
    """Whether the trainer goes on from a checkpoint, with or without an island."""

    is_exact: bool = False

    def key(self) -> bytes:
        return island_key(self.directory, run="", island="")


class Kept(Protocol):
    """What a trainer's checkpoints hold of an island: a host's, or a rank's counts."""

    @property
    def progress(self) -> tuple[int, int]: ...

    def saving(
        self, *, is_exact: bool
    ) -> AbstractContextManager[SavedIsland | None]: ...


class Seat:
    """One life of an island, for a trainer's hooks to call."""

    def __init__(
        self,
        island: Island,
        life: Life,
        kept: Kept,
        mark: StepCounterFile | None,
    ) -> None:
        self.island, self._life, self._kept, self._mark = island, life, kept, mark
        self._shown = ExitStack()
        self.shows_anchor = self.has_left = False

    def ask_to_end_when(self, is_asked: Callable[[], bool]) -> None:
        """Heed a trainer that handles SIGTERM itself."""
        self._life.asks = is_asked

    def note_step(self) -> None:
        """Say how far the island has come, for a next life to tell what is lost."""
        if self._mark is not None:
            self._mark.note(*self._kept.progress)

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
        """Give the island's part of a checkpoint, which stands still meanwhile.

        The model must hold the local weights.
        """
        part = IslandComponent()
        with self._kept.saving(is_exact=False) as saved:
            part.tree = to_tree(saved) if saved else {}
            yield part

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the run with the anchor in the model. Safe to repeat.

        After an error the work since the last seal is not given away.
        """
        if self.has_left:
            return
        anchor = self._anchor() if error is None else None
        self.show_local()
        self.has_left = True
        if self._mark is not None:
            self._mark.close()
            self._mark = None
        kind = None if error is None else type(error)
        self.island.__exit__(kind, error, None)
        if anchor is not None:
            self._life.restore_local(anchor)

    def _anchor(self) -> object:
        """Return the anchor as the model holds it; what leaving needs stays local."""
        self.show_anchor()
        anchor = self._life.keep_local()
        self.show_local()
        return anchor


def take_seat(
    model: torch.nn.Module,
    optimizers: Optimizers,
    run: Run,
    *,
    island: str | None,
    past: Past,
) -> Seat:
    """Join a run for a trainer that has built, and perhaps restored, everything.

    All ranks of a model in DDP or under FSDP2 call it alike. Afterwards the weights are
    the run's, whatever a checkpoint had; `leave` must be called, also after errors.

    Raises:
        ModelError, UsageError, RemoteError: as `atoll.torch.join`.
    """
    past = _own(past, run, island)

    def check() -> None:
        require_values([model])
        require_trained([model], optimizers)

    joined = _join_ranks(model, optimizers, run, island, past, check)
    if joined is None:
        joined = _join_alone(model, run, island, past, check)
    life, modules, kept, host = joined
    try:
        mark = _marked(host, past) if host is not None else None
    except BaseException:
        life.leave(depart=False, is_alone=True)
        raise
    seat = Seat(Island(life, modules, optimizers[-1], on_end="flag"), life, kept, mark)
    seat.island.__enter__()
    return seat


class _RankCounts:
    """What a trainer's checkpoint holds of an island of several ranks: its counts.

    A trainer may save on one rank alone, and what the others hold is not asked of them.
    """

    def __init__(self, life: Life, *, is_leader: bool) -> None:
        self._life, self._is_leader = life, is_leader

    @property
    def progress(self) -> tuple[int, int]:
        if self._is_leader:
            return self._life.host.progress
        return self._life.tally.inner_steps, self._life.tally.tokens

    @contextmanager
    def saving(self, *, is_exact: bool) -> Iterator[SavedIsland | None]:
        if not self._is_leader:
            yield None
            return
        host, joined = self._life.host, self._life.host.joined
        yield SavedIsland(
            run=joined.run,
            island=joined.island,
            incarnation=joined.incarnation,
            origin=joined.incarnation,
            step=host.run_steps,
            inner_steps=host.tally.inner_steps,
            tokens=host.tally.tokens,
            before_steps=joined.inner_steps,
            before_tokens=joined.tokens,
            is_exact=False,
            fragments=[],
            counters={name: getattr(host.tally, name) for name in COUNTERS},
        )


_Joined = tuple[Life, Sequence[torch.nn.Module], Kept, Host | None]


def _join_alone(
    model: torch.nn.Module,
    run: Run,
    island: str | None,
    past: Past,
    check: Callable[[], None],
) -> _Joined:
    check()
    host, view = enter_alone(model, run, island=island, keeping=past)
    return Alone(host, view), [model], host, host


def _join_ranks(
    model: torch.nn.Module,
    optimizers: Optimizers,
    run: Run,
    island: str | None,
    past: Past,
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
    life, modules, _ = joined
    is_leader = torch.distributed.get_rank() == 0
    if not is_leader:
        life.tally.inner_steps = int(life.metrics()["atoll/inner_steps"])
    kept = _RankCounts(life, is_leader=is_leader)
    return life, modules, kept, life.host if is_leader else None


def _own(past: Past, run: Run, island: str | None) -> Past:
    """Return the past without an island that is not this one.

    Its work belongs to that island, which goes on with it or has counted it.
    """
    given = island
    if given is None and not isinstance(run, MemoryRun) and run != "none":
        given = island_from_environment()
    saved = past.saved
    if saved is None or given is None or saved.island == given:
        return past
    warnings.warn(
        f"The checkpoint is of island {saved.island!r}, and this is {given!r}: its "
        "work since the last round is left to that island. Give every island a "
        "directory of its own.",
        AtollWarning,
        stacklevel=2,
    )
    return Past(past.directory, None, is_resumed=past.is_resumed)


def _marked(host: Host, past: Past) -> StepCounterFile:
    """Say how the island goes on, and return where it says how far it has come."""
    trained = StepCounterFile.read(past.directory)
    if host.resumed is not None:
        # Where the data stands the trainer knows, and only from its checkpoint.
        is_ahead = host.resumed.counted[0] > host.resumed.saved[0]
        cursor = False if is_ahead and not host.has_ended else None
        report_resumed(host.joined, host.resumed, trained=trained, cursor=cursor)
    elif not past.is_resumed:
        warn_fresh_optimizer(host.joined, is_fresh=True, directory=past.directory)
    past.directory.mkdir(parents=True, exist_ok=True)
    mark = StepCounterFile(past.directory)
    mark.note(*host.progress)
    return mark
