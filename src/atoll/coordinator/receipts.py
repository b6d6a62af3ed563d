"""Receipts that a coordinator gives, and asks for when islands report later rounds.

Rule 1: every outcome and every state that is handed out goes with a receipt.
Rule 2: a holding at or beyond the open round is believed only with its receipt, so a
        coordinator that has lost nothing believes none, and no island can bring a
        state, a round or a roster that the run has not committed.
Rule 3: a receipt proves only that the run committed something, not which island
        shows it. `Routes._require_proof` checks the island.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from atoll.errors import Refused
from atoll.exchange import Frame, Outcome, RecoverCall
from atoll.journal import Journal
from atoll.protocol import Beat, Holding, Position
from atoll.protocol.rounds import Round
from atoll.wire import Header
from atoll.wire.receipt import is_same_receipt, outcome_receipt, state_receipt

MAX_UNPROVEN = 100
"""How many refused holdings are remembered until the watcher looks."""

KEPT = 2
"""Outcomes per fragment whose receipts are kept: every island asks for them."""


class ReceiptIssuer:
    """Gives and checks the receipts of one run."""

    def __init__(self, journal: Journal) -> None:
        created = journal.recorded.created
        assert created is not None
        self._recorded, self._key = journal.recorded, journal.receipt_key
        self._run = created.run
        self._outcomes: dict[tuple[int, int], bytes] = {}
        self.unproven: deque[tuple[str, int, int]] = deque(maxlen=MAX_UNPROVEN)
        """Island, fragment and round of what was not believed, until it is reported."""

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
            if len(self._outcomes) > KEPT * max(1, len(self._recorded.fragments)):
                del self._outcomes[next(iter(self._outcomes))]
        return receipt

    def proven(
        self, island: str, holds: Sequence[Holding], rounds: Sequence[Round]
    ) -> tuple[Holding, ...]:
        """Return the holdings without their receipts, which have been checked.

        Raises:
            Refused: one at or beyond its open round has no receipt of this run.
        """
        for fragment, held in enumerate(holds):
            open_round = rounds[fragment].number if fragment < len(rounds) else 1
            if held.round >= open_round and not self._proves(fragment, held):
                raise self._refused(island, fragment, held.round, open_round)
        return tuple(Holding(held.round, held.digest) for held in holds)

    def proven_beat(self, beat: Beat, rounds: Sequence[Round]) -> Beat:
        """Return a beat whose holdings are proven; Refused if one is not."""
        if not beat.holds:
            return beat
        return replace(beat, holds=self.proven(beat.island, beat.holds, rounds))

    def require_recovery(self, call: RecoverCall, open_round: int) -> None:
        """Return if the state of a recovery and the outcomes before it are proven.

        A state before the open round needs no proof, because it changes nothing.

        Raises:
            Refused: a receipt is missing or is not this run's.
        """
        header = call.state.header
        if header.round < open_round:
            return
        held = Holding(header.round, header.base, call.state.receipt)
        if not self._proves(header.fragment, held):
            raise self._refused(call.island, header.fragment, held.round, open_round)
        shown = (*call.receipts, *[b""] * len(call.outcomes))
        for outcome, receipt in zip(call.outcomes, shown, strict=False):
            if not is_same_receipt(receipt, outcome_receipt(self._key, outcome)):
                self.unproven.append((call.island, outcome.fragment, outcome.round))
                raise Refused(
                    f"Island {call.island!r} brings the {outcome.name} without this "
                    "run's receipt for it. Bring only outcomes that the run gave out."
                )

    def _proves(self, fragment: int, held: Holding) -> bool:
        expected = self.of_state(fragment, held.round, held.digest)
        return is_same_receipt(held.receipt, expected)

    def _refused(
        self, island: str, fragment: int, round: int, open_round: int
    ) -> Refused:
        """Return why a holding is not believed, and remember it for the events."""
        self.unproven.append((island, fragment, round))
        return Refused(
            f"Island {island!r} reports that it holds round {round} of fragment "
            f"{fragment}, and round {open_round} is open. That is believed only with "
            "this run's receipt for it. Start the island again: it takes the state of "
            "the run."
        )
