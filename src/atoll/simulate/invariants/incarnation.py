"""One incarnation of an island: its ledger of work and tokens, kept from outside.

The law of DESIGN section 3, in fp64 beside the island's fp32: the work that rosters
counted, the work in hand and the loss of codecs add up to all work of the incarnation,
less refused and dropped work. Counted work is taken from the committed outcomes, never
from the island's own state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from atoll.exchange import Frame, Outcome
from atoll.exchange.calls import Call, PublishCall, Reply
from atoll.exchange.coordinator import CoordinatorTransport
from atoll.island import Host
from atoll.island.fragment import IslandFragment, UpdateInFlight
from atoll.island.numpy_model import VectorView
from atoll.protocol import JoinReply, Reception, WorkDecision
from atoll.simulate.invariants.claims import (
    BOUNDED,
    F64,
    ROWS_TRUE,
    TOKENS_CONSERVED,
    WORK_CONSERVED,
    CommittedRound,
    History,
    PublishedUpdate,
    Report,
)
from atoll.simulate.invariants.rows import GivenRows
from atoll.weights.layout import F32
from atoll.wire import FrameKind, Header, Verdict

CODEC_ERRORS = {"fp32": 1e-6, "bf16": 2.0**-7, "bf16-stochastic": 2.0**-6}
"""Largest relative error of codecs whose error does not depend on a block's maximum."""


class ObservedIncarnation:
    """Updates that one incarnation has sealed and published, and its ledgers."""

    def __init__(
        self,
        view: VectorView,
        history: History,
        report: Report,
        on_staged: Callable[[Header], None],
    ) -> None:
        self.view, self._history, self._report = view, history, report
        self._on_staged = on_staged
        """Called with each update that the island knows as staged."""

        self.ledgers: list[FragmentLedger] = []
        self.rows = GivenRows()
        self.host: Host | None = None
        self.num_unconfirmed: Callable[[], int] = lambda: 0
        """Returns the number of updates without an outcome in its exchange."""

        self.fate = "is alive"
        """Or its end: it left, saw the end, or died at a time."""

        self._remaining_work: dict[int, F64] = {}
        self._remaining_steps: dict[int, slice] = {}
        self._departed: dict[bytes, tuple[int, PublishedUpdate]] = {}
        self._staged: set[bytes] = set()

    def joined(self, host: Host) -> None:
        """Open the ledgers: the island has the run's weights, and has not trained."""
        self.host = host
        self.ledgers = [
            FragmentLedger(host.joined, slot, self._history, self._report)
            for slot in host.slots
        ]
        for ledger, local in zip(self.ledgers, self.view.local, strict=True):
            ledger.begin(local)

    def published(self, frame: Frame) -> None:
        """Note an update that is being sent, for the first time or again."""
        header = frame.header
        update = self._history.publish(header, frame.body)
        if not self.ledgers:
            return
        ledger = self.ledgers[header.fragment]
        check_unconfirmed(
            ledger.subject, self.num_unconfirmed(), len(self.ledgers), self._report
        )
        seal = ledger.seal
        if seal is not None and seal.update is None and seal.round == header.round:
            seal.update = update
            self._require_rows(ledger, header, seal.steps)
        if header.kind is FrameKind.DEPARTING:
            self._depart(ledger, update)

    def acknowledged(self, frame: Frame, reception: Reception) -> None:
        """Note an update that was acknowledged as staged."""
        if reception is not Reception.STAGED or not frame.header.kind.is_update:
            return
        self._on_staged(frame.header)
        if frame.header.kind is FrameKind.DEPARTING:
            self._staged.add(self._history.publish(frame.header, frame.body).digest)

    def read(self, fragment: int) -> None:
        """Book a read of the live weights by the host, to seal, adopt or leave."""
        if self.host is None:
            return
        ledger, local = self.ledgers[fragment], self.view.local[fragment]
        if self.host.has_left:
            ledger.train(local)
            self._remaining_work[fragment] = self._remaining(ledger)
            first = self._first_remaining(ledger)
            self._remaining_steps[fragment] = slice(first, len(self.rows.steps))
        elif ledger.slot.sealed is None:
            round, tokens = ledger.slot.state.round + 1, self.host.counters.tokens
            num_steps = self.host.counters.inner_steps
            ledger.sealing(local, round=round, tokens=tokens, num_steps=num_steps)

    def before_write(self, fragment: int) -> None:
        if self.host is not None:
            self.ledgers[fragment].train(self.view.local[fragment])

    def after_write(self, fragment: int) -> None:
        if self.host is None:
            return
        ledger = self.ledgers[fragment]
        sealed, tokens = ledger.slot.sealed, self.host.counters.tokens
        assert sealed is not None
        ledger.adopted(
            self.view.local[fragment],
            sealed,
            tokens=tokens,
            num_steps=self.host.counters.inner_steps,
        )

    def conclude(self) -> list[TokenFates]:
        """Close the ledgers at the end of the run, and return the tokens by outcome."""
        if self.host is None:
            return []
        for ledger in self.ledgers:
            self._close(ledger, self.host.counters.tokens)
        return [ledger.tokens for ledger in self.ledgers]

    def _remaining(self, ledger: FragmentLedger) -> F64:
        """Return the work of a leaving island that is in no update yet."""
        seal = ledger.seal
        if seal is None or _is_awaited(ledger):
            return ledger.loaded() - ledger.mark + ledger.decay * ledger.residual()
        made_since = seal.local - ledger.mark
        if _is_carried(ledger):
            return seal.pseudo + made_since + ledger.decay * ledger.residual()
        return made_since + ledger.decay * ledger.left_over(seal)

    def _first_remaining(self, ledger: FragmentLedger) -> int:
        """Return the first inner step of a leaving island that is in no update yet."""
        seal = ledger.seal
        if seal is None or _is_awaited(ledger) or _is_carried(ledger):
            return ledger.settled_steps
        stop: int = seal.steps.stop
        return stop

    def _require_rows(
        self, ledger: FragmentLedger, header: Header, steps: slice
    ) -> None:
        """Check the rows of an update when it is sent for the first time."""
        fault = self.rows.fault(header.progress.cursor, steps)
        if fault:
            detail = f"its update for round {header.round} of fragment "
            self._report(
                ROWS_TRUE, ledger.subject, f"{detail}{header.fragment} {fault}"
            )

    def _depart(self, ledger: FragmentLedger, update: PublishedUpdate) -> None:
        seal, header = ledger.seal, update.header
        if seal is not None and seal.update is update:
            self._departed[update.digest] = (seal.tokens, update)
            return
        assert self.host is not None
        self._departed[update.digest] = (self.host.counters.tokens, update)
        expected = self._remaining_work.get(header.fragment)
        if expected is None:
            return
        self._require_rows(ledger, header, self._remaining_steps[header.fragment])
        worst = np.abs(update.values - expected) - _tolerance(header.codec, expected)
        if float(worst.max()) > 0.0:
            self._report(
                WORK_CONSERVED,
                ledger.subject,
                f"leaves with other work of fragment {header.fragment} than it had: "
                f"off by {float(worst.max()):.3g}",
            )

    def _close(self, ledger: FragmentLedger, tokens: int) -> None:
        seal = ledger.seal
        if seal and seal.update and seal.update.digest not in self._departed:
            counted = (
                None if ledger.settle(seal) else self._history.counting(seal.update)
            )
            if counted is not None:
                ledger.count_tokens(seal.tokens, counted)
        for digest, (sealed_tokens, update) in self._departed.items():
            if update.header.fragment == ledger.slot.index:
                self._close_departed(ledger, digest, sealed_tokens, update)
        remaining = tokens - ledger.tokens.settled
        if self.fate == "left":
            self._book_departed(ledger, remaining)
        elif self.fate in ("is alive", "saw the end"):
            ledger.tokens.in_hand = remaining
        else:
            ledger.tokens.lost[f"{ledger.subject} {self.fate}"] = remaining
        if remaining < 0:
            self._report(
                TOKENS_CONSERVED,
                ledger.subject,
                f"{-remaining} tokens of fragment {ledger.slot.index} went twice",
            )

    def _book_departed(self, ledger: FragmentLedger, tokens: int) -> None:
        """Book the uncounted tokens of a departed island: late, refused or dropped."""
        sealed = ledger.slot.sealed
        outcome = sealed.outcome if sealed is not None else None
        match outcome.decision if outcome is not None else None:
            case WorkDecision.DROP:
                ledger.tokens.dropped += tokens
            case WorkDecision.REFUSE:
                ledger.tokens.refused += tokens
            case _:
                ledger.tokens.departed = tokens

    def _close_departed(
        self,
        ledger: FragmentLedger,
        digest: bytes,
        tokens: int,
        update: PublishedUpdate,
    ) -> None:
        header = update.header
        commit = self._history.listing(digest) or self._history.commits.get(
            (header.fragment, header.round)
        )
        if commit is None or self._still_stands(ledger, digest):
            return
        entry, counted = commit.entry(header.island), self._history.counting(update)
        if counted is not None:
            ledger.count_tokens(tokens, counted)
        elif (
            not self._history.has_gaps
            and digest in self._staged - self._history.excused
            and not (
                entry and entry.digest == digest and entry.verdict is Verdict.REFUSED
            )
        ):
            self._report(
                WORK_CONSERVED,
                ledger.subject,
                f"left an update for round {header.round} of fragment "
                f"{header.fragment}, which was acknowledged as staged, and the roster "
                f"has {entry.verdict if entry else 'no entry'} for another",
            )

    def _still_stands(self, ledger: FragmentLedger, digest: bytes) -> bool:
        """Return whether an asynchronous run stopped before a round that lists it.

        Its last islands have left, and a quorum of them never came back.
        """
        is_async = ledger.joined.settings.sync.is_async
        is_over = self._history.has_ended(ledger.slot.index)
        return is_async and not is_over and self._history.listing(digest) is None


class WatchedView:
    """Live weights that report reads and writes. Implements `ParameterView`."""

    def __init__(self, inner: VectorView, incarnation: ObservedIncarnation) -> None:
        self._inner, self._incarnation = inner, incarnation
        self.lay_out = inner.lay_out

    def read(self, fragment: int, out: F32) -> None:
        self._inner.read(fragment, out)
        self._incarnation.read(fragment)

    def write(self, fragment: int, values: F32) -> None:
        self._incarnation.before_write(fragment)
        self._inner.write(fragment, values)
        self._incarnation.after_write(fragment)


class WatchedLine:
    """A line that reports updates and outcomes. Implements `CoordinatorTransport`."""

    def __init__(
        self,
        inner: CoordinatorTransport,
        incarnation: ObservedIncarnation,
        learn: Callable[[Outcome | Frame], None],
    ) -> None:
        self._inner, self._incarnation, self._learn = inner, incarnation, learn
        self.runtime = inner.runtime

    def call(self, call: Call) -> Reply:
        if not isinstance(call, PublishCall):
            reply = self._inner.call(call)
            if isinstance(reply, Outcome | Frame):
                self._learn(reply)
            return reply
        self._incarnation.published(call.frame)
        reply = self._inner.call(call)
        assert isinstance(reply, Reception)
        self._incarnation.acknowledged(call.frame, reply)
        return reply


def _is_awaited(ledger: FragmentLedger) -> bool:
    """Return whether nothing is in flight, or a seal that has made no update yet."""
    update = ledger.slot.sealed
    return update is None or (update.frame is None and update.outcome is None)


def _is_carried(ledger: FragmentLedger) -> bool:
    update = ledger.slot.sealed
    outcome = update.outcome if update is not None else None
    return outcome is not None and outcome.decision is WorkDecision.CARRY


def _tolerance(codec: str, values: F64) -> F64:
    """Return the largest error of the codec for each value."""
    size: F64 = np.abs(values)
    if codec in CODEC_ERRORS:
        return np.asarray(CODEC_ERRORS[codec] * size + 1e-4)
    if codec == "int8":
        return np.full_like(values, size.max() / 127 + 1e-4)
    if codec == "e3m0":
        return np.asarray(0.5 * size + size.max() * 2.0**-5)
    return np.full_like(values, size.max())


ROUNDING = 2.0**-18
"""Tolerance relative to the largest value: dozens of fp32 roundings over a run."""


@dataclass
class SealRecord:
    """Weights, work and tokens of an island at a seal."""

    round: int
    local: F64
    pseudo: F64
    residual: F64
    tokens: int
    steps: slice
    """Its inner steps, of which no settled update has one."""

    update: PublishedUpdate | None = None
    """The published update; None before, or if there is none."""


@dataclass
class TokenFates:
    """Tokens of a fragment by outcome."""

    committed: int = 0
    refused: int = 0
    dropped: int = 0
    in_hand: int = 0
    """Not in an update at the end of the run; some may have been carried."""

    departed: int = 0
    """In a departing update that was not counted."""

    lost: dict[str, int] = field(default_factory=dict)
    """Lost with a death, by its description."""

    @property
    def settled(self) -> int:
        return self.committed + self.refused + self.dropped


def total(fates: Iterable[TokenFates]) -> dict[str, int]:
    """Return the sums of tokens by outcome."""
    sums = Counter[str]()
    for fate in fates:
        sums["committed"] += fate.committed
        sums["refused"] += fate.refused
        sums["dropped"] += fate.dropped
        sums["departed"] += fate.departed
        sums["in hand"] += fate.in_hand
        sums.update(fate.lost)
    return dict(sums)


class FragmentLedger:
    """Work and tokens of one fragment of one incarnation."""

    def __init__(
        self, joined: JoinReply, slot: IslandFragment, history: History, report: Report
    ) -> None:
        self.joined, self.slot, self._history = joined, slot, history
        self.subject = f"{joined.island} (incarnation {joined.incarnation})"
        self._report = report
        self.decay = float(np.float32(joined.settings.wire.error_feedback_decay))
        self._mixes = joined.settings.sync.adopt == "mix"
        zero = np.zeros(slot.layout.elements)
        self._work, self._committed = zero.copy(), zero.copy()
        self._error, self._lost = zero.copy(), zero.copy()
        self.mark: F64 = zero
        """The live weights at the last call."""

        self.seal: SealRecord | None = None
        self.tokens = TokenFates()
        self.settled_steps = 0
        """Inner steps that no further update has to hold."""

    def begin(self, local: np.ndarray) -> None:
        """Start from the weights that the island has loaded."""
        self.mark = local.astype(np.float64)

    def train(self, local: np.ndarray) -> None:
        """Book the change of the weights since the last call as work."""
        now = local.astype(np.float64)
        self._work += self.mark - now
        self.mark = now

    def sealing(
        self, local: np.ndarray, *, round: int, tokens: int, num_steps: int
    ) -> None:
        """Note the weights and the work that the island seals."""
        self.train(local)
        self.seal = SealRecord(
            round=round,
            local=self.mark,
            pseudo=self.loaded() - self.mark,
            residual=self.residual(),
            tokens=tokens,
            steps=slice(self.settled_steps, num_steps),
        )

    def adopted(
        self,
        local: np.ndarray,
        sealed: UpdateInFlight,
        *,
        tokens: int,
        num_steps: int,
    ) -> None:
        """Book an outcome that the island has adopted into its weights."""
        arrival, seal = sealed.outcome, self.seal
        assert seal is not None
        if arrival is None:
            self._end_without_outcome(local, seal)
            return
        made_since = seal.local - self.mark
        is_counted = self.settle(seal)
        is_lost = arrival.position is None and self._history.has_gaps
        if not is_lost:
            self._require_verdict(arrival.decision, seal, is_counted)
        match arrival.decision:
            case WorkDecision.DROP:
                self._lost += made_since + (0.0 if is_counted else seal.pseudo)
                self.tokens.dropped += tokens - self.tokens.settled
                self.settled_steps = num_steps
            case WorkDecision.REFUSE:
                self._lost += made_since + seal.pseudo + seal.residual
                self.tokens.refused += tokens - self.tokens.settled
                self.settled_steps = num_steps
        self.mark = local.astype(np.float64)
        if is_lost or (arrival.decision is WorkDecision.ADOPT and self._mixes):
            # The papers' blend gives up steps made in flight, so the difference is lost
            # work. The same holds if a journal lost whether the update had counted.
            self._lost -= self._difference()
        self.seal = None
        self.check(tokens)

    def _end_without_outcome(self, local: np.ndarray, seal: SealRecord) -> None:
        """Book an update that no roster lists, at the end of an asynchronous run."""
        listing = self._history.listing(seal.update.digest) if seal.update else None
        if listing is not None or not self._history.has_ended(self.slot.index):
            self._report(
                WORK_CONSERVED,
                self.subject,
                f"gives up its update for round {seal.round} of fragment "
                f"{self.slot.index}, which round "
                f"{listing.header.round if listing else 'none'} lists",
            )
        self._lost += seal.pseudo
        self.mark = local.astype(np.float64)
        self.seal = None

    def check(self, tokens: int) -> None:
        """Report unless both sides of the law are equal, up to rounding."""
        worst = _largest(self._difference())
        # The scale is at least 1, so that it is seldom computed.
        if not worst <= ROUNDING and not worst <= ROUNDING * self._scale():
            self._report(
                WORK_CONSERVED,
                self.subject,
                f"after round {self.slot.state.round} of fragment {self.slot.index} "
                f"the two sides differ by {worst:.3g}",
            )
        if self.tokens.settled > tokens:
            self._report(
                TOKENS_CONSERVED,
                self.subject,
                f"of {tokens} tokens {self.tokens} went through fragment "
                f"{self.slot.index}",
            )

    def settle(self, seal: SealRecord) -> bool:
        """Book the sealed update if its committed outcome counts it."""
        update, commit = seal.update, self._receipt(seal)
        if update is None or commit is None or not commit.counts(update):
            return False
        self._committed += update.values
        self._error += self._lost_by_codec(seal, update)
        self.count_tokens(seal.tokens, update)
        self.settled_steps = seal.steps.stop
        return True

    def _receipt(self, seal: SealRecord) -> CommittedRound | None:
        """Return the round that lists the sealed update, if the island has taken it."""
        listing = self._history.listing(seal.update.digest) if seal.update else None
        if listing is None or listing.header.round > self.slot.state.round:
            return None
        return listing

    def count_tokens(self, tokens: int, update: PublishedUpdate) -> None:
        """Book the tokens of a counted update, sealed when there were `tokens`."""
        reported = update.header.progress.tokens - self.joined.tokens
        if reported != tokens:
            self._report(
                TOKENS_CONSERVED,
                self.subject,
                f"its update for round {update.header.round} of fragment "
                f"{self.slot.index} reports {reported} tokens, and it had {tokens}",
            )
        self.tokens.committed += tokens - self.tokens.settled

    def left_over(self, seal: SealRecord) -> F64:
        """Return the codec's residual of a sealed update, for the next one."""
        if self.slot.residual is None or seal.update is None:
            return np.zeros_like(seal.pseudo)
        return seal.pseudo + self.decay * seal.residual - seal.update.values

    def _lost_by_codec(self, seal: SealRecord, update: PublishedUpdate) -> F64:
        if self.slot.residual is None:
            return seal.pseudo - update.values
        return (1.0 - self.decay) * seal.residual

    def _require_verdict(
        self, decision: WorkDecision, seal: SealRecord, is_counted: bool
    ) -> None:
        receipt = self._receipt(seal)
        commit = receipt or self._history.commits.get((self.slot.index, seal.round))
        entry = commit.entry(self.joined.island) if commit else None
        is_refused = receipt is not None and not is_counted
        # An update of an asynchronous run stands until it is listed: nothing is late.
        stands = self.joined.settings.sync.is_async
        allowed = {
            WorkDecision.ADOPT: is_counted,
            WorkDecision.REBASE: is_counted,
            WorkDecision.CARRY: receipt is None and not (stands and seal.update),
            WorkDecision.DROP: not is_refused and not stands,
            WorkDecision.REFUSE: is_refused,
        }
        if not allowed[decision]:
            self._report(
                WORK_CONSERVED,
                self.subject,
                f"took round {seal.round} of fragment {self.slot.index} as {decision}, "
                f"and its roster says {entry.verdict if entry else 'nothing'}",
            )

    def _scale(self) -> float:
        return max(1.0, _largest(self.mark), _largest(self._work))

    def _difference(self) -> F64:
        in_hand = self.residual() + self.loaded() - self.mark
        booked = self._committed + in_hand + self._error
        return np.asarray(booked - (self._work - self._lost))

    def loaded(self) -> F64:
        out = np.empty(self.slot.layout.elements, np.float32)
        self.slot.layout.load(self.slot.state.anchor, out)
        return out.astype(np.float64)

    def residual(self) -> F64:
        residual = self.slot.residual
        if residual is None:
            return np.zeros(self.slot.layout.elements)
        return residual.astype(np.float64)


def _largest(values: F64) -> float:
    return float(np.maximum.reduce(np.abs(values)))


def check_unconfirmed(
    island: str, num_updates: int, fragments: int, report: Report
) -> None:
    """Report an island that keeps more updates than are in flight or departing."""
    if num_updates > 2 * fragments:
        report(
            BOUNDED,
            island,
            f"keeps {num_updates} updates without an outcome, of {fragments} fragments",
        )
