"""The ledger of one life of an island: where its work and its tokens went.

The law of DESIGN section 3, in fp64 beside the island's fp32: what the rosters counted
of this life, what it still holds and what codecs lost add up to the work it did, less
what was refused or dropped. What counted is taken from the outcomes that were
committed, never from what the island believes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from atoll.island.fragment import IslandFragment, UpdateInFlight
from atoll.protocol import JoinReply, WorkDecision
from atoll.simulate.invariants.claims import TOKENS_CONSERVED, WORK_CONSERVED, Report
from atoll.simulate.invariants.history import (
    F64,
    History,
    PublishedUpdate,
)
from atoll.wire import Verdict

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
            self._require_verdict(arrival.how, seal, is_counted)
        match arrival.how:
            case WorkDecision.DROP:
                self._lost += made_since + (0.0 if is_counted else seal.pseudo)
                self.tokens.dropped += tokens - self.tokens.settled
            case WorkDecision.REFUSE:
                self._lost += made_since + seal.pseudo + seal.residual
                self.tokens.refused += tokens - self.tokens.settled
        self.mark = local.astype(np.float64)
        if is_lost or (arrival.how is WorkDecision.ADOPT and self._mixes):
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
