"""From a round that closes to an outcome that lasts: reduced, journalled, compacted.

Rule 1: the outer step is taken before the record is written, and nobody learns of the
        outcome before it is durable. In between it is `Pending`.
Rule 2: nothing here decides: the machine says what closes, and is told what is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from atoll.coordinator.drafting import as_departing
from atoll.coordinator.restore import Key
from atoll.errors import CorruptError, DiskError, OutcomeLost
from atoll.exchange import Frame
from atoll.journal import Journal
from atoll.journal.bodies import is_large
from atoll.protocol.events import Close
from atoll.weights import FragmentLayout, FragmentState, Spare, Terms, agree

COMPACT_ROUNDS = 10
"""How many means a restart has to go through at most, and a disk to keep."""


Beside = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Does something while something else is done, and waits for both."""


@contextmanager
def afterwards(act: Callable[[], None]) -> Iterator[None]:
    """Do one thing after the other, where there are no threads."""
    yield
    act()


@dataclass(frozen=True)
class Pending:
    """An outcome whose outer step is taken, and whose record is not durable yet."""

    close: Close
    agreed: Frame


class Committing:
    """Knows the updates of open rounds, and what the disk still has to take.

    It shares the weights and the updates with the service, which changes them too.
    """

    def __init__(
        self, journal: Journal, weights: list[FragmentState], spool: dict[Key, Frame]
    ) -> None:
        self._journal, self._weights, self._spool = journal, weights, spool
        self._pending: dict[int, Pending] = {}
        self._uncompacted: set[int] = set()
        self._spare = Spare()
        self.brought: dict[int, Frame] = {}
        """Outcomes of closing rounds that islands have reduced among themselves."""

        self.beside: Beside = afterwards
        """How a large outcome is written while its outer step is taken."""

        self.threads = 1
        """How many reduce a round and take its outer step; the bits are the same."""

    @property
    def is_behind(self) -> bool:
        """Whether the disk has refused something that is to be tried again."""
        return bool(self._pending or self._uncompacted)

    @property
    def pending(self) -> list[Pending]:
        return list(self._pending.values())

    def is_pending(self, fragment: int) -> bool:
        return fragment in self._pending

    def agree(
        self,
        close: Close,
        layout: FragmentLayout,
        terms: Terms,
        *,
        run: str,
        after_block: Callable[[], None] | None,
    ) -> Pending:
        """Return the outcome of a closing round, and take its outer step."""
        weights = self._weights[close.fragment]
        brought = self.brought.pop(close.fragment, None)
        agreed = brought or self._reduced(
            close, layout, terms, run=run, after_block=after_block
        )
        header, body = agreed.header, agreed.body
        if is_large(header):
            with self.beside(lambda: self._prepare(agreed)):
                weights.apply(header, body, threads=self.threads)
        else:  # `commit` appends it to others, which takes no time
            weights.apply(header, body, threads=self.threads)
        return Pending(close, agreed)

    def _reduced(
        self,
        close: Close,
        layout: FragmentLayout,
        terms: Terms,
        *,
        run: str,
        after_block: Callable[[], None] | None,
    ) -> Frame:
        """Return the agreed frame of the updates that are here."""
        frames = {
            header.island: self._spool[close.fragment, close.round, header.island]
            for header in close.staged
        }
        header, body = agree(
            layout,
            terms,
            close.roster,
            {name: (frame.header, frame.body) for name, frame in frames.items()},
            run=run,
            fragment=close.fragment,
            round=close.round,
            epoch=close.epoch,
            base=self._weights[close.fragment].digest,
            outer=close.outer,
            after_block=after_block,
            spare=self._spare,
            threads=self.threads,
        )
        return Frame(header, body)

    def commit(self, pending: Pending) -> None:
        """Make an outcome durable, and drop the updates that it was made of.

        Raises:
            DiskError: it is pending still, and nobody may learn of it.
        """
        fragment, header = pending.close.fragment, pending.agreed.header
        self._pending[fragment] = pending
        self._journal.commit(
            header,
            pending.agreed.body,
            digest_after=self._weights[fragment].digest,
            epoch=pending.close.epoch,
        )
        self.end(fragment, header.round)
        if header.round % COMPACT_ROUNDS == 0:
            self._uncompacted.add(fragment)

    def end(self, fragment: int, round: int) -> None:
        """Wait for the disk no longer: a round is over, here or where islands are."""
        self._pending.pop(fragment, None)
        self._forget(fragment, round)

    def keep(self, fragment: int, round: int, island: str) -> None:
        """Make an update durable that stands: its owner goes, or has gone."""
        standing = self._spool.get((fragment, round, island))
        if standing is None:
            return  # its body never was here, and the round's outcome all but is
        frame = as_departing(standing)
        self._journal.stage(frame.header, frame.body)

    def outcome(self, fragment: int, round: int, *, has_body: bool) -> Frame:
        """Return the outcome of a round that is over, without a body if that is gone.

        Raises:
            OutcomeLost: a journal that was lost has held it, and no island brought it.
        """
        if round not in self._journal.recorded.fragments[fragment].where:
            raise OutcomeLost(
                f"Round {round} of fragment {fragment} is over, and its outcome is "
                "lost. Take the fragment's state."
            )
        header, body = self._journal.outcome(fragment, round, has_body=has_body)
        return Frame(header, np.empty(0, np.uint8) if body is None else body)

    def compact(self) -> list[str]:
        """Write states where means have piled up; what fails is tried again.

        Return what was found to be wrong on the disk, in sentences. May run beside
        everything else, in a thread of its own.
        """
        damage = []
        for fragment in sorted(self._uncompacted):
            try:
                self._journal.compact(fragment)
            except DiskError:
                continue
            except CorruptError as exc:
                damage.append(str(exc))
            self._uncompacted.discard(fragment)
        return damage

    def _prepare(self, agreed: Frame) -> None:
        with suppress(DiskError):  # `commit` meets the same, and is tried again
            self._journal.prepare(agreed.header, agreed.body)

    def _forget(self, fragment: int, round: int) -> None:
        """Drop the updates of a round that is over."""
        over = [key for key in self._spool if key[0] == fragment and key[1] <= round]
        for key in over:
            del self._spool[key]
