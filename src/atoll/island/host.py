"""An island's host: one member of a run, for any training framework.

The thread that trains calls `stepped`; a step that synchronises nothing costs a
counter and a heartbeat, and one that seals costs one copy of the live weights.
`driver.Driver` performs the actions of the island machine.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Self, cast

from atoll.algorithm.schedule import Stride
from atoll.data import Ask, DataSpec, Spans
from atoll.errors import AtollWarning, Unreachable, UsageError
from atoll.exchange import Exchange
from atoll.exchange.base import Dealer
from atoll.island.base import IslandMemory, Membership, ParameterView
from atoll.island.deal import Deal, DealtRows
from atoll.island.driver import Driver
from atoll.island.entry import PublishConstants, ResumeSource, enter
from atoll.island.memory import WholeMemory
from atoll.island.progress import RunClock
from atoll.island.resume import EnteredIsland
from atoll.island.saved_state import SavedIsland
from atoll.island.snapshot import pause_outcomes
from atoll.protocol import JoinRequest, Position, Stats, SyncNow
from atoll.runtime import Runtime, SystemRuntime
from atoll.weights.layout import F32
from atoll.wire import blake3_digest

ASK_AGAIN_S = 1.0
"""Interval of claims while no row is free, and some may return."""

log = logging.getLogger("atoll")


class Host:
    """One island of a run, for any framework that offers a `ParameterView`.

    Implements `IslandHandle` and `IslandStatus` for an island of one process.

    Joining founds the run or takes its weights; afterwards `slots` hold the anchor.
    """

    def __init__(
        self,
        exchange: Exchange,
        view: ParameterView,
        request: JoinRequest,
        *,
        runtime: Runtime | None = None,
        leaving: AbstractContextManager[object] | None = None,
        memory: IslandMemory | None = None,
        saved: SavedIsland | None = None,
        publish_constants: PublishConstants | None = None,
    ) -> None:
        self._exchange, self._runtime = exchange, runtime or SystemRuntime()
        self._leaving = leaving or nullcontext()
        self._joined_at_s = self._runtime.now_s()
        memory = memory or WholeMemory(view)
        entry = enter(
            exchange,
            memory,
            request,
            leaving=self._leaving,
            saved=ResumeSource(saved, self._runtime) if saved else None,
            publish_constants=publish_constants,
        )
        self.joined, self.slots, self.counters = (
            entry.joined,
            entry.slots,
            entry.counters,
        )
        self.resumed = entry.resumed
        """How the island was resumed; None without a checkpoint."""

        self.settings = self.joined.settings
        self.membership = Membership(
            island=self.joined.island,
            slot=self.joined.slot,
            run=self.joined.run,
            settings=self.settings,
        )
        self.deal = _deal_of(exchange, entry, self._runtime)
        """The rows that the run deals to this island; None: it reads its own data."""

        self._is_end_requested: Callable[[], bool] = lambda: False
        self._driver = Driver(
            exchange,
            self.joined,
            self.slots,
            self.counters,
            memory,
            runtime=self._runtime,
            state=entry.state,
            stride=entry.stride,
            deal=self.deal,
        )
        self.has_left = False

    @property
    def round(self) -> int:
        """The lowest committed round over the fragments."""
        return min(slot.state.round for slot in self.slots)

    @property
    def host(self) -> Self:
        return self

    @property
    def status(self) -> Self:
        return self

    @property
    def must_stop(self) -> bool:
        return self._is_end_requested()

    @property
    def trained(self) -> tuple[int, int]:
        return self.counters.inner_steps, self.counters.tokens

    @property
    def saves(self) -> int:
        return self.position.saves

    @property
    def run_tokens(self) -> int:
        return self.position.tokens

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.counters.metrics()

    @property
    def progress(self) -> tuple[int, int]:
        """The inner steps and tokens of all incarnations of this island."""
        joined, counters = self.joined, self.counters
        return (
            joined.inner_steps + counters.inner_steps,
            joined.tokens + counters.tokens,
        )

    @property
    def settled_steps(self) -> int:
        """Inner steps, over all incarnations, up to the last seal that is settled."""
        return self.joined.inner_steps + max(slot.settled_steps for slot in self.slots)

    @property
    def run_steps(self) -> int:
        """The schedule step this island has reached, in phase with the others."""
        return self._driver.step

    @property
    def stride(self) -> Stride:
        """The inner steps of this island in the run's schedule."""
        return self._driver.stride

    @property
    def clock(self) -> RunClock:
        """The run's clock at the last synchronisation."""
        return self._driver.clock

    @property
    def wakes_in(self) -> int:
        """Inner steps until the next one at which a fragment is due."""
        return self._driver.wakes_in

    @property
    def position(self) -> Position:
        """The last position that the run has reported."""
        return self._driver.position

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended."""
        return self._driver.has_ended

    @property
    def digest(self) -> str:
        """A digest over anchor and velocity of every fragment, in hex."""
        digests = b"".join(slot.read_digest() for slot in self.slots)
        return blake3_digest(digests).hex()[:32]

    def end_when(self, is_asked: Callable[[], bool]) -> None:
        self._is_end_requested = is_asked

    def open_data(self, data: DataSpec, *, may_sync: bool) -> DealtRows:
        """Describe the data to the run, and return the rows that it deals out.

        With `may_sync` outcomes may be adopted whenever the loop takes rows.

        Raises:
            UsageError: the run deals out no rows, or has another dataset.
        """
        deal = require_deal(self.deal)
        deal.wait_for_rows = partial(self._wait_for_rows, may_sync=may_sync)
        return deal.open(data)

    def _wait_for_rows(self, *, may_sync: bool) -> bool:
        """Wait for rows of other islands, which are free once open rounds are closed.

        An open round may wait for the work of this island, so it publishes that.
        """
        if self._is_over() or self.must_stop:
            return False
        settled = [slot.settled_steps for slot in self.slots]
        if may_sync and self.counters.inner_steps > min(settled):
            self.sync_now()
        else:
            self._driver.beat_at_once()
            self._runtime.sleep(ASK_AGAIN_S)
        return not (self._is_over() or self.must_stop)

    def count_tokens(self, tokens: int) -> None:
        self.counters.tokens += tokens

    def stepped(self) -> None:
        """Count one inner step, and synchronise the fragments that are due.

        Raises:
            Refused: the run refused this island three times in succession.
            UsageError: the run weights updates by tokens, and none were reported.
        """
        if not self._is_over():
            self._driver.stepped()

    def sync_now(self) -> None:
        """Seal every fragment for its open round, and return when all are adopted."""
        if not self._is_over():
            self._driver.perform(SyncNow(self._driver.step))

    def leave(self, *, depart: bool = True, is_alone: bool = False) -> None:
        """Publish the work that has not counted, and leave the run. Safe to repeat.

        With `depart` False nothing more is published; updates in flight stay in flight.
        """
        if self.has_left:
            return
        self.has_left = True
        try:
            with self._leaving:
                self._leave(depart=depart)
            self._log_summary()
        except Unreachable as exc:
            # An upper bound: an update may have reached the run before the error.
            self._driver.ledger.lose_all(self.slots)
            warnings.warn(
                f"Island {self.joined.island!r} leaves without telling the run:  {exc}",
                AtollWarning,
                stacklevel=2,
            )

    def before_seal(self, act: Callable[[], None]) -> None:
        """Call `act` before an update is sealed, in the thread that trains."""
        self._driver.before_seal = act

    def pause(self) -> None:
        """End this incarnation without leaving: the next one resumes a checkpoint.

        Rounds wait for it until its lease, and the deadline after that, have expired.
        """
        self.has_left = True
        with suppress(Unreachable), self._leaving:
            self._driver.worker.stop()

    @contextmanager
    def saving(self, *, is_exact: bool) -> Iterator[SavedIsland]:
        """Give this island for a checkpoint; no outcome changes it within the block.

        Only between inner steps.
        """
        self._driver.worker.finish_seals()
        with pause_outcomes(self.slots):
            yield self._driver.save(is_exact=is_exact)

    def stats(self) -> Stats:
        """Return the statistics that the run shows of this island."""
        return self.counters.stats(self._runtime.now_s() - self._joined_at_s)

    def read_anchor(self, fragment: int) -> tuple[F32, int]:
        """Return a copy of a fragment's anchor, and its round."""
        slot = self.slots[fragment]
        with slot.lock:
            return slot.state.anchor.copy(), slot.state.round

    def _leave(self, *, depart: bool) -> None:
        try:
            self._driver.worker.stop()
            if self.has_ended:
                return
            if depart and self._driver.failure is None:
                self._driver.depart()
            else:
                self._driver.ledger.lose_all(self.slots)
        finally:
            self._exchange.leave(self.joined.island, self.joined.incarnation)

    def _log_summary(self) -> None:
        has_lost = self.counters.dropped_steps or self.counters.refused
        level = logging.WARNING if has_lost else logging.INFO
        log.log(
            level, "island %s left: %s", self.joined.island, self.counters.summary()
        )

    def _is_over(self) -> bool:
        if self._driver.failure is not None:
            raise self._driver.failure
        return self.has_ended or self.has_left


def _deal_of(exchange: Exchange, entry: EnteredIsland, runtime: Runtime) -> Deal | None:
    """Return the rows of an island that has entered a run, if the run deals them."""
    joined, saved = entry.joined, entry.deal
    if not joined.settings.data.is_dealt:
        return None
    is_exact = entry.resumed is not None and entry.resumed.is_exact
    unsettled = Spans.unpack(joined.held_rows)
    return Deal(
        cast(Dealer, exchange),  # only dealers accept such a run
        Ask(
            island=joined.island,
            incarnation=joined.incarnation,
            number=joined.last_claim,
        ),
        joined.settings,
        runtime,
        num_fragments=len(entry.slots),
        saved=saved,
        unsettled=None if is_exact and saved is not None else unsettled,
    )


def require_deal(deal: Deal | None) -> Deal:
    """Return the rows that a run deals out.

    Raises:
        UsageError: it deals out none.
    """
    if deal is None:
        raise UsageError(
            "data.order='islands': the run deals out no rows. Set data.order='run' in "
            "its run file, or give each island its own rows."
        )
    return deal
