"""One incarnation of an island, observed through its line and its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from atoll.exchange import Frame, Outcome
from atoll.exchange.calls import Call, PublishCall, Reply
from atoll.exchange.coordinator import CoordinatorLine
from atoll.island import Host
from atoll.island.fragment import IslandFragment, UpdateInFlight
from atoll.island.numpy_model import VectorView
from atoll.protocol import JoinReply, Reception, WorkDecision
from atoll.simulate.invariants.claims import (
    BOUNDED,
    F64,
    TOKENS_CONSERVED,
    WORK_CONSERVED,
    History,
    PublishedUpdate,
    Report,
)
from atoll.weights.layout import F32
from atoll.wire import FrameKind, Verdict

CODEC_ERRORS = {"fp32": 1e-6, "bf16": 2.0**-7, "bf16-stochastic": 2.0**-6}
"""The most that a codec changes a value, as a part of it; others are relative to the
largest value of a block."""


class ObservedIncarnation:
    """What one life has sealed, published and given away."""

    def __init__(self, view: VectorView, truth: History, report: Report) -> None:
        self.view, self._truth, self._report = view, truth, report
        self.ledgers: list[FragmentLedger] = []
        self.host: Host | None = None
        self.kept: Callable[[], int] = lambda: 0
        """How many updates without an outcome its exchange keeps."""

        self.fate = "is alive"
        """Or how it ended: it left, or it died, when."""

        self._rests: dict[int, F64] = {}
        self._departed: dict[bytes, tuple[int, PublishedUpdate]] = {}
        self._staged: set[bytes] = set()

    def joined(self, host: Host) -> None:
        """Open the books: the island holds the run's weights, and has done nothing."""
        self.host = host
        self.ledgers = [
            FragmentLedger(host.joined, slot, self._truth, self._report)
            for slot in host.slots
        ]
        for ledger, local in zip(self.ledgers, self.view.local, strict=True):
            ledger.begin(local)

    def published(self, frame: Frame) -> None:
        """Take note of an update on its way, whether for the first time or not."""
        header = frame.header
        update = self._truth.publish(header, frame.body)
        if not self.ledgers:
            return
        ledger = self.ledgers[header.fragment]
        check_unconfirmed(ledger.who, self.kept(), len(self.ledgers), self._report)
        seal = ledger.seal
        if seal is not None and seal.update is None and seal.round == header.round:
            seal.update = update
        if header.kind is FrameKind.DEPARTING:
            self._depart(ledger, update)

    def acknowledged(self, frame: Frame, reception: Reception) -> None:
        """Take note that the run has promised to count a departing update."""
        if frame.header.kind is FrameKind.DEPARTING and reception is Reception.STAGED:
            self._staged.add(self._truth.publish(frame.header, frame.body).digest)

    def read(self, fragment: int) -> None:
        """The host reads live weights: to seal, to adopt or to leave."""
        if self.host is None:
            return
        ledger, local = self.ledgers[fragment], self.view.local[fragment]
        if self.host.has_left:
            ledger.train(local)
            self._rests[fragment] = self._rest(ledger)
        elif ledger.slot.sealed is None:
            round, tokens = ledger.slot.state.round + 1, self.host.tally.tokens
            ledger.sealing(local, round=round, tokens=tokens)

    def before_write(self, fragment: int) -> None:
        if self.host is not None:
            self.ledgers[fragment].train(self.view.local[fragment])

    def after_write(self, fragment: int) -> None:
        if self.host is None:
            return
        ledger = self.ledgers[fragment]
        sealed, tokens = ledger.slot.sealed, self.host.tally.tokens
        assert sealed is not None
        ledger.adopted(self.view.local[fragment], sealed, tokens=tokens)

    def conclude(self) -> list[TokenFates]:
        """Close the books at the end of the run, and return where tokens went."""
        if self.host is None:
            return []
        for ledger in self.ledgers:
            self._close(ledger, self.host.tally.tokens)
        return [ledger.tokens for ledger in self.ledgers]

    def _rest(self, ledger: FragmentLedger) -> F64:
        """Return the work that an island which leaves has not given away yet."""
        flying, seal = ledger.slot.sealed, ledger.seal
        is_awaited = flying and flying.frame is None and flying.outcome is None
        if flying is None or seal is None or is_awaited:
            return ledger.loaded() - ledger.mark + ledger.decay * ledger.residual()
        made_since = seal.local - ledger.mark
        if flying.outcome is not None and flying.outcome.decision is WorkDecision.CARRY:
            return seal.pseudo + made_since + ledger.decay * ledger.residual()
        return made_since + ledger.decay * ledger.left_over(seal)

    def _depart(self, ledger: FragmentLedger, update: PublishedUpdate) -> None:
        seal, header = ledger.seal, update.header
        if seal is not None and seal.update is update:
            self._departed[update.digest] = (seal.tokens, update)
            return
        assert self.host is not None
        self._departed[update.digest] = (self.host.tally.tokens, update)
        held = self._rests.get(header.fragment)
        if held is None:
            return
        worst = np.abs(update.values - held) - _tolerance(header.codec, held)
        if float(worst.max()) > 0.0:
            self._report(
                WORK_CONSERVED,
                ledger.who,
                f"leaves with other work of fragment {header.fragment} than it had: "
                f"off by {float(worst.max()):.3g}",
            )

    def _close(self, ledger: FragmentLedger, tokens: int) -> None:
        seal = ledger.seal
        if seal and seal.update and seal.update.digest not in self._departed:
            counted = None if ledger.settle(seal) else self._truth.counting(seal.update)
            if counted is not None:
                ledger.count_tokens(seal.tokens, counted)
        for digest, (sealed_at, update) in self._departed.items():
            if update.header.fragment == ledger.slot.index:
                self._close_departed(ledger, digest, sealed_at, update)
        left = tokens - ledger.tokens.settled
        if self.fate == "left":
            self._book_departed(ledger, left)
        elif self.fate in ("is alive", "saw the end"):
            ledger.tokens.in_hand = left
        else:
            ledger.tokens.lost[f"{ledger.who} {self.fate}"] = left
        if left < 0:
            self._report(
                TOKENS_CONSERVED,
                ledger.who,
                f"{-left} tokens of fragment {ledger.slot.index} went twice",
            )

    def _book_departed(self, ledger: FragmentLedger, left: int) -> None:
        """Book what an island left behind uncounted: too late, refused or dropped."""
        sealed = ledger.slot.sealed
        outcome = sealed.outcome if sealed is not None else None
        match outcome.decision if outcome is not None else None:
            case WorkDecision.DROP:
                ledger.tokens.dropped += left
            case WorkDecision.REFUSE:
                ledger.tokens.refused += left
            case _:
                ledger.tokens.departed = left

    def _close_departed(
        self,
        ledger: FragmentLedger,
        digest: bytes,
        tokens: int,
        update: PublishedUpdate,
    ) -> None:
        header = update.header
        commit = self._truth.commits.get((header.fragment, header.round))
        if commit is None:
            return
        entry, counted = commit.entry(header.island), self._truth.counting(update)
        if counted is not None:
            ledger.count_tokens(tokens, counted)
        elif (
            not self._truth.has_gaps
            and digest in self._staged - self._truth.excused
            and not (
                entry and entry.digest == digest and entry.verdict is Verdict.REFUSED
            )
        ):
            self._report(
                WORK_CONSERVED,
                ledger.who,
                f"left an update for round {header.round} of fragment "
                f"{header.fragment}, was told that it is staged, and the roster says "
                f"{entry.verdict if entry else 'nothing'} of another",
            )


class WatchedView:
    """Live weights that tell who reads and writes them. Implements `ParameterView`."""

    def __init__(self, inner: VectorView, life: ObservedIncarnation) -> None:
        self._inner, self._life = inner, life
        self.lay_out = inner.lay_out

    def read(self, fragment: int, out: F32) -> None:
        self._inner.read(fragment, out)
        self._life.read(fragment)

    def write(self, fragment: int, values: F32) -> None:
        self._life.before_write(fragment)
        self._inner.write(fragment, values)
        self._life.after_write(fragment)


class WatchedLine:
    """A line that tells what goes over it. Implements `CoordinatorLine`."""

    def __init__(
        self,
        inner: CoordinatorLine,
        life: ObservedIncarnation,
        learn: Callable[[Outcome | Frame], None],
    ) -> None:
        self._inner, self._life, self._learn = inner, life, learn
        self.pause, self.every = inner.pause, inner.every

    def call(self, call: Call) -> Reply:
        if not isinstance(call, PublishCall):
            reply = self._inner.call(call)
            if isinstance(reply, Outcome | Frame):
                self._learn(reply)
            return reply
        self._life.published(call.frame)
        reply = self._inner.call(call)
        assert isinstance(reply, Reception)
        self._life.acknowledged(call.frame, reply)
        return reply


def _tolerance(codec: str, held: F64) -> F64:
    """Return how far the codec may move each value."""
    size: F64 = np.abs(held)
    if codec in CODEC_ERRORS:
        return np.asarray(CODEC_ERRORS[codec] * size + 1e-4)
    if codec == "int8":
        return np.full_like(held, size.max() / 127 + 1e-4)
    if codec == "e3m0":
        return np.asarray(0.5 * size + size.max() * 2.0**-5)
    return np.full_like(held, size.max())


ROUNDING = 2.0**-18
"""Of the largest value: some dozens of fp32 roundings over a run."""


@dataclass
class SealRecord:
    """What an island held when it sealed."""

    round: int
    local: F64
    pseudo: F64
    residual: F64
    tokens: int
    update: PublishedUpdate | None = None
    """What was published of it; None while it is under way, or when nothing is."""


@dataclass
class TokenFates:
    """What became of a fragment's tokens."""

    committed: int = 0
    refused: int = 0
    dropped: int = 0
    in_hand: int = 0
    """At the end of the run; some of it may have been carried."""

    departed: int = 0
    """Given away when leaving, and not counted."""

    lost: dict[str, int] = field(default_factory=dict)
    """By the name of the death."""

    @property
    def settled(self) -> int:
        return self.committed + self.refused + self.dropped


def total(fates: Iterable[TokenFates]) -> dict[str, int]:
    """Return the sums, by what became of the tokens."""
    sums = Counter[str]()
    for each in fates:
        sums["committed"] += each.committed
        sums["refused"] += each.refused
        sums["dropped"] += each.dropped
        sums["departed"] += each.departed
        sums["in hand"] += each.in_hand
        sums.update(each.lost)
    return dict(sums)


class FragmentLedger:
    """One fragment of one life. `sealing` and `adopted` are told by its weights."""

    def __init__(
        self, joined: JoinReply, slot: IslandFragment, truth: History, report: Report
    ) -> None:
        self._joined, self.slot, self._truth = joined, slot, truth
        self.who = f"{joined.island} (incarnation {joined.incarnation})"
        self._report = report
        self.decay = float(np.float32(joined.settings.wire.error_feedback_decay))
        self._mixes = joined.settings.sync.adopt == "mix"
        zero = np.zeros(slot.layout.elements)
        self._work, self._committed = zero.copy(), zero.copy()
        self._error, self._lost = zero.copy(), zero.copy()
        self.mark: F64 = zero
        """The live weights when they were last looked at."""

        self.seal: SealRecord | None = None
        self.tokens = TokenFates()

    def begin(self, local: np.ndarray) -> None:
        """Start from the weights that the island has just loaded."""
        self.mark = local.astype(np.float64)

    def train(self, local: np.ndarray) -> None:
        """Book as work whatever has changed since the weights were last looked at."""
        now = local.astype(np.float64)
        self._work += self.mark - now
        self.mark = now

    def sealing(self, local: np.ndarray, *, round: int, tokens: int) -> None:
        """Take note of what the island seals from here."""
        self.train(local)
        self.seal = SealRecord(
            round=round,
            local=self.mark,
            pseudo=self.loaded() - self.mark,
            residual=self.residual(),
            tokens=tokens,
        )

    def adopted(
        self, local: np.ndarray, sealed: UpdateInFlight, *, tokens: int
    ) -> None:
        """Book an outcome that the island has just taken into its weights."""
        arrival, seal = sealed.outcome, self.seal
        assert arrival is not None
        assert seal is not None
        made_since = seal.local - self.mark
        is_counted = self.settle(seal)
        is_lost = arrival.position is None and self._truth.has_gaps
        if not is_lost:
            self._require_verdict(arrival.decision, seal, is_counted)
        match arrival.decision:
            case WorkDecision.DROP:
                self._lost += made_since + (0.0 if is_counted else seal.pseudo)
                self.tokens.dropped += tokens - self.tokens.settled
            case WorkDecision.REFUSE:
                self._lost += made_since + seal.pseudo + seal.residual
                self.tokens.refused += tokens - self.tokens.settled
        self.mark = local.astype(np.float64)
        if is_lost or (arrival.decision is WorkDecision.ADOPT and self._mixes):
            # The papers' blend gives up steps made in flight: what is left is in hand.
            # So it is where a journal has lost whether the update had counted.
            self._lost -= self._difference()
        self.seal = None
        self.check(tokens)

    def check(self, tokens: int) -> None:
        """Report unless both sides of the law are equal, to rounding."""
        worst = _largest(self._difference())
        # A scale is at least 1, so that it is seldom needed.
        if not worst <= ROUNDING and not worst <= ROUNDING * self._scale():
            self._report(
                WORK_CONSERVED,
                self.who,
                f"after round {self.slot.state.round} of fragment {self.slot.index} "
                f"the two sides differ by {worst:.3g}",
            )
        if self.tokens.settled > tokens:
            self._report(
                TOKENS_CONSERVED,
                self.who,
                f"of {tokens} tokens {self.tokens} went through fragment "
                f"{self.slot.index}",
            )

    def settle(self, seal: SealRecord) -> bool:
        """Book what the committed outcome says of the sealed update."""
        update = seal.update
        commit = self._truth.commits.get((self.slot.index, seal.round))
        if update is None or commit is None or not commit.counts(update):
            return False
        self._committed += update.values
        self._error += self._lost_by_codec(seal, update)
        self.count_tokens(seal.tokens, update)
        return True

    def count_tokens(self, tokens: int, update: PublishedUpdate) -> None:
        """Book the tokens of a counted update, sealed when there were `tokens`."""
        said = update.header.progress.tokens - self._joined.tokens
        if said != tokens:
            self._report(
                TOKENS_CONSERVED,
                self.who,
                f"its update for round {update.header.round} of fragment "
                f"{self.slot.index} says {said} tokens, and it had {tokens}",
            )
        self.tokens.committed += tokens - self.tokens.settled

    def left_over(self, seal: SealRecord) -> F64:
        """Return what the codec left of a sealed update for the next one."""
        if self.slot.residual is None or seal.update is None:
            return np.zeros_like(seal.pseudo)
        return seal.pseudo + self.decay * seal.residual - seal.update.values

    def _lost_by_codec(self, seal: SealRecord, update: PublishedUpdate) -> F64:
        if self.slot.residual is None:
            return seal.pseudo - update.values
        return (1.0 - self.decay) * seal.residual

    def _require_verdict(
        self, how: WorkDecision, seal: SealRecord, is_counted: bool
    ) -> None:
        commit = self._truth.commits.get((self.slot.index, seal.round))
        entry = commit.entry(self._joined.island) if commit else None
        is_refused = (
            entry is not None
            and seal.update is not None
            and entry.digest == seal.update.digest
            and entry.verdict is Verdict.REFUSED
        )
        says = {
            WorkDecision.ADOPT: is_counted,
            WorkDecision.REBASE: is_counted,
            WorkDecision.CARRY: not is_counted and not is_refused,
            WorkDecision.DROP: not is_refused,
            WorkDecision.REFUSE: is_refused,
        }
        if not says[how]:
            self._report(
                WORK_CONSERVED,
                self.who,
                f"took round {seal.round} of fragment {self.slot.index} as {how}, and "
                f"its roster says {entry.verdict if entry else 'nothing'}",
            )

    def _scale(self) -> float:
        return max(1.0, _largest(self.mark), _largest(self._work))

    def _difference(self) -> F64:
        in_hand = self.residual() + self.loaded() - self.mark
        found = self._committed + in_hand + self._error
        return np.asarray(found - (self._work - self._lost))

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


def check_unconfirmed(who: str, kept: int, fragments: int, report: Report) -> None:
    """Report an island that keeps more updates than are in flight or departing."""
    if kept > 2 * fragments:
        report(
            BOUNDED,
            who,
            f"keeps {kept} updates without an outcome, of {fragments} fragments",
        )
