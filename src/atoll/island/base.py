"""The ports of an island's host: the model, the island's memory, its handle.

`ParameterView` is the live model of a framework, and `IslandHandle` an incarnation of
an island that a training loop calls. `IslandMemory` is anchor, velocity and residual of
the fragments, in four ports, with one method for each operation on all values of a
fragment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from atoll.data import DataSpec
from atoll.exchange import Frame
from atoll.protocol.island import RemainingWork
from atoll.settings import RunSettings
from atoll.weights import FragmentState, Layout
from atoll.weights.layout import F32
from atoll.wire import Verdict

if TYPE_CHECKING:  # these modules import the port of futures
    from atoll.island.deal import DealtRows
    from atoll.island.fragment import IslandFragment, SealTerms, UpdateInFlight
    from atoll.island.host import Host
    from atoll.island.progress import IslandCounters, RunClock
    from atoll.island.saved_state import SavedFragment, SavedIsland


class ParameterView(Protocol):
    """The live weights of a model, fragment by fragment.

    The host is the only caller, from the thread that trains, between inner steps.
    """

    def lay_out(self, layout: Layout) -> None:
        """Learn which tensors make up each fragment. Called once, before the rest."""
        ...

    def read(self, fragment: int, out: F32) -> None:
        """Copy the fragment's live weights into `out`, as fp32."""
        ...

    def write(self, fragment: int, values: F32) -> None:
        """Make `values` the fragment's live weights, each cast to its own dtype.

        The optimizer's state is not touched, and tensors keep their storage.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The facts of an incarnation that do not change after the join."""

    island: str
    slot: int
    run: str
    """The run's name."""

    settings: RunSettings
    data_share: tuple[int, int] = (0, 1)
    """Index of this process's share of the island's data, and their number."""


class IslandStatus(Protocol):
    """How far a run is, as an island's process knows."""

    @property
    def round(self) -> int: ...

    @property
    def run_steps(self) -> int: ...

    @property
    def run_tokens(self) -> int: ...

    @property
    def clock(self) -> RunClock:
        """The run's clock at the last synchronisation, the same on all ranks."""
        ...

    @property
    def digest(self) -> str: ...

    @property
    def has_ended(self) -> bool: ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """The island's counters."""
        ...


class IslandHandle(Protocol):
    """One incarnation of an island, in one of its processes. Its loop calls it.

    All ranks of the island make the same calls, after the same inner steps. `trained`
    and `saves` are the same on all ranks.
    """

    membership: Membership
    counters: IslandCounters
    has_left: bool

    @property
    def host(self) -> Host:
        """The island's host. Only one process of an island has it."""
        ...

    @property
    def status(self) -> IslandStatus: ...

    @property
    def must_stop(self) -> bool:
        """Whether all ranks of the island are to end their loops here."""
        ...

    @property
    def trained(self) -> tuple[int, int]:
        """Inner steps of the island, and their tokens."""
        ...

    @property
    def saves(self) -> int:
        """Number of an operator's requests to save."""
        ...

    def end_when(self, is_asked: Callable[[], bool]) -> None:
        """End the island when `is_asked` returns True in any of its processes."""
        ...

    def open_data(self, data: DataSpec, *, may_sync: bool) -> DealtRows:
        """Describe the data to the run, and return this process's rows.

        With `may_sync` outcomes may be adopted whenever the loop takes rows.
        """
        ...

    def count_tokens(self, tokens: int) -> None: ...

    def stepped(self) -> None: ...

    def sync_now(self) -> None: ...

    def leave(self, *, depart: bool, is_alone: bool) -> None:
        """Leave the run; `is_alone` if the other ranks may not call this."""
        ...

    def pause(self) -> None:
        """End this incarnation; the next one resumes exactly."""
        ...


class LocalWeights(Protocol):
    """The fragments' live weights, as rounds copy and change them.

    The host is the only caller, from the thread that trains, between inner steps.
    """

    def lay_out(self, layout: Layout, settings: RunSettings) -> None:
        """Set the layout of the fragments. Called first, at every join."""
        ...

    def begin(self, index: int, state: FragmentState | None) -> IslandFragment:
        """Return a fragment in the run's state, and write it to the live weights.

        With None the run is founded: the live weights become the anchor.
        """
        ...

    def hold(self, slot: IslandFragment, number: int) -> F32:
        """Copy the live weights, for a sealed update of this number."""
        ...

    def take(self, slot: IslandFragment, sealed: UpdateInFlight, mode: str) -> None:
        """Adopt an outcome into the live weights by `mode`: see `weights.adopt`."""
        ...

    def forget(self, sealed: UpdateInFlight) -> None:
        """Make the buffers of an update available again."""
        ...

    def give(
        self, slot: IslandFragment, saved: SavedFragment, remaining: RemainingWork
    ) -> None:
        """Add the remaining part of saved work to the live weights."""
        ...


class FragmentStates(Protocol):
    """Anchor, velocity and residual of the fragments, for the background threads."""

    def seal(
        self, slot: IslandFragment, sealed: UpdateInFlight, terms: SealTerms
    ) -> tuple[np.ndarray, float]:
        """Return body and norm of an update, and store its new residual.

        Raises:
            NonFinite: naming the parameter.
        """
        ...

    def apply(self, slot: IslandFragment, agreed: Frame) -> None:
        """Apply the outer step of a verified outcome: see `FragmentState.apply`."""
        ...

    def replace(self, slot: IslandFragment, state: FragmentState) -> None:
        """Replace the state of a fragment by the run's."""
        ...

    def settle(
        self, slot: IslandFragment, sealed: UpdateInFlight, verdict: Verdict
    ) -> None:
        """Settle the residual by an update's verdict, and release its buffers."""
        ...

    def measure(self, slot: IslandFragment) -> bytes:
        """Return the digest of the state, computed from its present bytes."""
        ...

    def whole(self, slot: IslandFragment) -> FragmentState:
        """Return the state of the whole fragment, for sending or reading."""
        ...


class UncountedWork(Protocol):
    """Work that no round has: carried, sent at leaving, or left of a checkpoint."""

    def keep_loaded(self, slot: IslandFragment, sealed: UpdateInFlight) -> None:
        """Set an update's base to the anchor as loaded: its work is to be carried."""
        ...

    def since(
        self,
        slot: IslandFragment,
        in_flight: UpdateInFlight,
        rest: UpdateInFlight,
        *,
        is_settled: bool,
    ) -> None:
        """Reduce `rest` to the work since `in_flight` was sealed.

        Unless `in_flight` is settled, its residual goes with the rest.
        """
        ...

    def has_left_over(self, slot: IslandFragment) -> bool:
        """Return whether the residual has anything that is not in flight."""
        ...

    def unseal(self, slot: IslandFragment, saved: SavedFragment) -> None:
        """Make saved work independent of the anchor that it was saved with.

        The anchor of an asynchronous island moves while an update is in flight. The
        work up to the seal becomes the update's values; the residual after the seal has
        the error of its codec.
        """
        ...

    def leave_over(
        self, slot: IslandFragment, saved: SavedFragment, remaining: RemainingWork
    ) -> None:
        """Set the residual to that of the remaining work, if there is any."""
        ...


class SavedStates(Protocol):
    """Fragments of this process in a checkpoint, out and in."""

    def saving(
        self,
        slots: Sequence[IslandFragment],
        *,
        trained: tuple[int, int],
        is_exact: bool,
    ) -> list[SavedFragment]:
        """Return the fragments for a checkpoint: see `snapshot.fragments_of`.

        Called by the thread that trains, which holds the slots' locks.
        """
        ...

    def as_work(self, saved: SavedIsland) -> SavedIsland:
        """Return the work of an exactly saved island, whose live weights are loaded."""
        ...

    def require_fitting(self, saved: Sequence[SavedFragment]) -> None:
        """Return if the saved vectors have the layout of this island.

        Raises:
            UsageError: they have another layout.
        """
        ...

    def resume(self, saved: SavedFragment) -> IslandFragment:
        """Return a fragment in its saved state, with its update in flight.

        The live weights are those of the checkpoint already.
        """
        ...


class IslandMemory(LocalWeights, FragmentStates, UncountedWork, SavedStates, Protocol):
    """The memory of an island's fragments. The host is the only caller."""
