"""From a closing round to a durable outcome: reduced, journalled, compacted, proven.

Rule 1: the outer step is taken before the record is written, and no island sees the
        outcome before it is durable. In between it is a `PendingOutcome`.
Rule 2: nothing here decides: the state machine closes rounds, and learns which are
        durable.
Rule 3: departing updates are written ahead, outside of the lock; staging one then only
        appends a small record. A needless draft is removed with its round, and a
        missing one is written when the update is staged.
Rule 4: every outcome and every state is sent with a receipt.
Rule 5: a holding at or beyond the open round is accepted only with its receipt. So a
        coordinator that has lost nothing accepts none, and no island can upload a
        state, a round or a roster that the run has not committed.
Rule 6: a receipt proves only that the run committed something, not which island
        shows it. `Routes._require_proof` checks the island.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np

from atoll.coordinator.restore import Key
from atoll.coordinator.spool import MOVED_BYTES
from atoll.errors import AtollError, CorruptError, DiskError, OutcomeLost, Refused
from atoll.exchange import Frame, Outcome
from atoll.exchange.calls import JoinCall, RecoverCall
from atoll.journal import Journal
from atoll.journal.files import Body, is_large, key_of
from atoll.protocol import Heartbeat, HeldRound, Position
from atoll.protocol.coordinator import advance
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.events import CloseRound, JoinRequested, Welcome
from atoll.protocol.rounds import Round
from atoll.trace import span
from atoll.weights import (
    BodyPool,
    FragmentLayout,
    FragmentState,
    Terms,
    agree,
    gather,
)
from atoll.wire import FrameKind, Header, blake3_digest, update_digest
from atoll.wire.frame import is_same_receipt, outcome_receipt, state_receipt

COMPACT_ROUNDS = 10
"""Rounds between two states: a restart replays at most this number of means."""


class SpooledBodies:
    """The bodies of a gathered outcome, in parts: the journal writes them from files.

    `after_block` releases their pages, as while they are reduced.
    """

    def __init__(
        self, bodies: Sequence[np.ndarray], after_block: Callable[[], None] | None
    ) -> None:
        self._bodies, self._after_block = bodies, after_block

    def __iter__(self) -> Iterator[np.ndarray]:
        for body in self._bodies:
            for first in range(0, len(body), MOVED_BYTES):
                yield body[first : first + MOVED_BYTES]
                if self._after_block is not None:
                    self._after_block()


RunConcurrently = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Runs an action concurrently with the body of a `with`, and waits for both."""


@contextmanager
def run_afterwards(act: Callable[[], None]) -> Iterator[None]:
    """Run the action after the body, for hosts without threads."""
    yield
    act()


@dataclass(frozen=True)
class PendingOutcome:
    """An outcome whose outer step is taken, and whose record is not durable yet."""

    close: CloseRound
    header: Header
    body: Body


class Committer:
    """Reduces and commits rounds; tracks the writes that the disk has refused.

    The weights and the updates are shared with the service, which changes them too.
    """

    def __init__(
        self, journal: Journal, weights: list[FragmentState], spool: dict[Key, Frame]
    ) -> None:
        self._journal, self._weights, self._spool = journal, weights, spool
        self._pending: dict[int, PendingOutcome] = {}
        self._uncompacted: set[int] = set()
        self._compacted: dict[int, int] = {}
        """The last round of each fragment of an asynchronous run with a state."""

        self._spare = BodyPool()
        self.collective_outcomes: dict[int, Frame] = {}
        """Outcomes of closing rounds that a collective has reduced, by fragment."""

        self.run_concurrently: RunConcurrently = run_afterwards
        """Runs the write of a large outcome while its outer step is taken."""

        self.threads = 1
        """Threads that reduce and step a round; the bits do not depend on it."""

    @property
    def is_behind(self) -> bool:
        """Whether the disk has refused a write that must be retried."""
        return bool(self._pending or self._uncompacted)

    @property
    def pending(self) -> list[PendingOutcome]:
        return list(self._pending.values())

    def is_pending(self, fragment: int) -> bool:
        return fragment in self._pending

    def agree(
        self,
        close: CloseRound,
        layout: FragmentLayout,
        terms: Terms,
        *,
        run: str,
        after_block: Callable[[], None] | None,
    ) -> PendingOutcome:
        """Return the outcome of a closing round, and take its outer step."""
        weights = self._weights[close.fragment]
        reduced = self.collective_outcomes.pop(close.fragment, None)
        updates = {} if reduced else self._updates(close)
        with span("reduce"):
            mean = reduced or self._reduced(
                close, layout, terms, updates, run=run, after_block=after_block
            )
        # The step is taken on the mean, whichever of the two is sent and journalled.
        gathered = None if reduced else gather(mean.header, terms, updates)
        pending = PendingOutcome(close, mean.header, mean.body)
        if gathered is not None:
            header, bodies = gathered
            pending = PendingOutcome(close, header, SpooledBodies(bodies, after_block))
        if is_large(pending.header):
            with self.run_concurrently(lambda: self._prepare(pending)), span("apply"):
                weights.apply(mean.header, mean.body, threads=self.threads)
        else:  # `commit` appends it to other bodies, which is fast
            with span("apply"):
                weights.apply(mean.header, mean.body, threads=self.threads)
        return pending

    def _updates(self, close: CloseRound) -> dict[str, tuple[Header, np.ndarray]]:
        """Return the staged updates of a closing round, by their islands."""
        frames = (self._spool[key_of(header)] for header in close.staged)
        return {frame.header.island: (frame.header, frame.body) for frame in frames}

    def _reduced(
        self,
        close: CloseRound,
        layout: FragmentLayout,
        terms: Terms,
        updates: Mapping[str, tuple[Header, np.ndarray]],
        *,
        run: str,
        after_block: Callable[[], None] | None,
    ) -> Frame:
        """Return the frame with the mean of the staged updates."""
        header, body = agree(
            layout,
            terms,
            close.roster,
            updates,
            run=run,
            fragment=close.fragment,
            round=close.round,
            epoch=close.epoch,
            base=self._weights[close.fragment].digest,
            outer=close.outer,
            buffer=close.buffer,
            after_block=after_block,
            spare=self._spare,
            threads=self.threads,
        )
        return Frame(header, body)

    def commit(self, pending: PendingOutcome) -> None:
        """Make an outcome durable. Safe to repeat until `end`.

        Raises:
            DiskError: the outcome is still pending, and must not be sent.
        """
        fragment, header = pending.close.fragment, pending.header
        self._pending[fragment] = pending
        if self._journal.recorded.fragments[fragment].round >= header.round:
            return
        with span("journal"):
            self._journal.commit(
                header,
                pending.body,
                digest_after=self._weights[fragment].digest,
                epoch=pending.close.epoch,
            )
        if self._is_compacted_after(pending):
            self._uncompacted.add(fragment)

    def _is_compacted_after(self, pending: PendingOutcome) -> bool:
        """Return whether a state is written after a round.

        An asynchronous round has the updates of a part of the islands: between two
        states it has as many more rounds as its buffer takes of them.
        """
        fragment, round = pending.close.fragment, pending.header.round
        if not pending.close.buffer:
            return round % COMPACT_ROUNDS == 0
        members = self._journal.recorded.members.values()
        islands = sum(not member.has_left for member in members)
        factor = max(1, min(pending.close.buffer, islands))
        first = self._compacted.setdefault(fragment, round - 1)
        if round - first < COMPACT_ROUNDS * factor:
            return False
        self._compacted[fragment] = round
        return True

    def end(self, round: Round) -> None:
        """Drop the pending outcome before an open round, and updates it has not."""
        fragment = round.fragment
        self._pending.pop(fragment, None)
        keys = {key_of(header) for header in round.updates}
        for key in [key for key in self._spool if key[0] == fragment]:
            if key not in keys:
                del self._spool[key]

    def keep(self, header: Header) -> None:
        """Make a staged update durable, because its island departs or has departed."""
        standing = self._spool.get(key_of(header))
        if standing is None:
            return  # its body was never received, and the outcome is almost durable
        frame = as_departing(standing)
        self._journal.stage(frame.header, frame.body)

    def outcome(self, fragment: int, round: int, *, has_body: bool) -> Frame:
        """Return the outcome of a round that is over; its body may be collected.

        Raises:
            OutcomeLost: it was in a lost journal, and no island has restored it.
        """
        if round not in self._journal.recorded.fragments[fragment].positions:
            raise OutcomeLost(
                f"Round {round} of fragment {fragment} is over, and its outcome is "
                "lost. Take the fragment's state."
            )
        header, body = self._journal.outcome(fragment, round, has_body=has_body)
        return Frame(header, np.empty(0, np.uint8) if body is None else body)

    def compact(self) -> list[str]:
        """Write states where means have piled up; the next call retries failures.

        Return the damage found on the disk, in sentences. May run concurrently with all
        other calls.
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

    def _prepare(self, pending: PendingOutcome) -> None:
        # `commit` gets the same error, and is retried
        with suppress(DiskError), span("journal"):
            self._journal.prepare(pending.header, pending.body)


class WriteAhead:
    """Writes departing updates to disk before they are staged. Thread-safe.

    `spool` has the updates of open rounds; other threads change it meanwhile.
    """

    def __init__(self, journal: Journal, spool: Mapping[Key, Frame]) -> None:
        self._journal, self._spool = journal, spool

    def on_received(self, frame: Frame) -> None:
        """Write a received update, if its island departs."""
        if frame.header.kind is FrameKind.DEPARTING:
            with suppress(DiskError):  # staging gets the same error, and reports it
                self._journal.draft(frame.header, frame.body)

    def on_offer(self, header: Header) -> None:
        """Write a staged update, if its island now announces that it departs."""
        if header.kind is not FrameKind.DEPARTING or not header.is_sealed:
            return
        standing = self._spool.get(key_of(header))
        if standing is None or update_digest(standing.header) != update_digest(header):
            return
        self.on_received(as_departing(standing))

    def on_join(self, call: JoinCall, state: CoordinatorState, now_s: float) -> None:
        """Write the open updates of a joining island's earlier incarnation."""
        welcome = _forecast(call, state, now_s)
        if welcome is None:
            return
        for fragment in welcome.spoken_for:
            header = state.rounds[fragment].staged[welcome.member.island]
            standing = self._spool.get(key_of(header))
            if standing is not None:
                self.on_received(as_departing(standing))


def as_departing(frame: Frame) -> Frame:
    """Return an update with the kind DEPARTING."""
    return Frame(replace(frame.header, kind=FrameKind.DEPARTING), frame.body)


def _forecast(call: JoinCall, state: CoordinatorState, now_s: float) -> Welcome | None:
    event = JoinRequested(call.request, blake3_digest(call.key), call.nonce)
    with suppress(AtollError):  # it will be refused
        _, actions = advance(state, event, now_s)
        return next((action for action in actions if isinstance(action, Welcome)), None)
    return None


MAX_UNPROVEN = 100
"""Number of refused holdings kept until the watcher reads them."""

CACHED_RECEIPTS = 2
"""Outcomes per fragment with cached receipts: every island requests them."""


class ReceiptIssuer:
    """Issues and checks the receipts of one run."""

    def __init__(self, journal: Journal) -> None:
        created = journal.recorded.created
        assert created is not None
        self._recorded, self._key = journal.recorded, journal.receipt_key
        self._run = created.run
        self._outcomes: dict[tuple[int, int], bytes] = {}
        self.unproven: deque[tuple[str, int, int]] = deque(maxlen=MAX_UNPROVEN)
        """Island, fragment and round of refused holdings, until they are reported."""

    def of_state(self, fragment: int, round: int, digest: bytes) -> bytes:
        """Return the receipt for the state of a fragment after a committed round."""
        return state_receipt(
            self._key, run=self._run, fragment=fragment, round=round, digest=digest
        )

    def with_receipts(self, agreed: Frame, position: Position) -> Outcome:
        """Return the outcome of a committed round with both of its receipts."""
        fragment, round = agreed.header.fragment, agreed.header.round
        digest = self._recorded.fragments[fragment].digests.get(round)
        after = self.of_state(fragment, round, digest) if digest else b""
        return Outcome(
            replace(agreed, receipt=self._of_outcome(agreed.header)), position, after
        )

    def _of_outcome(self, header: Header) -> bytes:
        key = header.fragment, header.round
        receipt = self._outcomes.get(key)
        if receipt is None:
            receipt = self._outcomes[key] = outcome_receipt(self._key, header)
            if len(self._outcomes) > CACHED_RECEIPTS * max(
                1, len(self._recorded.fragments)
            ):
                del self._outcomes[next(iter(self._outcomes))]
        return receipt

    def proven(
        self, island: str, holds: Sequence[HeldRound], rounds: Sequence[Round]
    ) -> tuple[HeldRound, ...]:
        """Return the holdings without their receipts, after checking them.

        Raises:
            Refused: a holding at or beyond its open round has no receipt of this run.
        """
        for fragment, holding in enumerate(holds):
            open_round = rounds[fragment].number if fragment < len(rounds) else 1
            if holding.round >= open_round and not self._proves(fragment, holding):
                raise self._refused(island, fragment, holding.round, open_round)
        return tuple(HeldRound(holding.round, holding.digest) for holding in holds)

    def proven_beat(self, beat: Heartbeat, rounds: Sequence[Round]) -> Heartbeat:
        """Return a heartbeat with proven holdings; raise Refused if one is not."""
        if not beat.holds:
            return beat
        return replace(beat, holds=self.proven(beat.island, beat.holds, rounds))

    def require_recovery(self, call: RecoverCall, open_round: int) -> None:
        """Check the receipts of a recovery's state and of the outcomes before it.

        A state before the open round needs no proof, because it changes nothing.

        Raises:
            Refused: a receipt is missing or is not this run's.
        """
        header = call.state.header
        if header.round < open_round:
            return
        holding = HeldRound(header.round, header.base, call.state.receipt)
        if not self._proves(header.fragment, holding):
            raise self._refused(call.island, header.fragment, holding.round, open_round)
        shown = (*call.receipts, *[b""] * len(call.outcomes))
        for outcome, receipt in zip(call.outcomes, shown, strict=False):
            if not is_same_receipt(receipt, outcome_receipt(self._key, outcome)):
                self.unproven.append((call.island, outcome.fragment, outcome.round))
                raise Refused(
                    f"Island {call.island!r} brings the {outcome.name} without this "
                    "run's receipt for it. Bring only outcomes that the run gave out."
                )

    def _proves(self, fragment: int, holding: HeldRound) -> bool:
        expected = self.of_state(fragment, holding.round, holding.digest)
        return is_same_receipt(holding.receipt, expected)

    def _refused(
        self, island: str, fragment: int, round: int, open_round: int
    ) -> Refused:
        """Return the error for a refused holding, and record it for the events."""
        self.unproven.append((island, fragment, round))
        return Refused(
            f"Island {island!r} reports that it holds round {round} of fragment "
            f"{fragment}, and round {open_round} is open. That is believed only with "
            "this run's receipt for it. Start the island again: it takes the state of "
            "the run."
        )
