"""A dealer that is the ledger itself, for islands without a run."""

from __future__ import annotations

from atoll.data import Ask, Claim, DataSpec, RowLedger
from atoll.data.spans import Spans


class LedgerDealer:
    """Deals the rows of a ledger. Implements `Dealer`."""

    def __init__(self, *, unit_rows: int, passes: int = 1, num_live: int = 1) -> None:
        self.ledger = RowLedger(unit_rows=unit_rows, passes=passes, num_fragments=1)
        self.asks: list[Ask] = []
        self._num_live = num_live

    def open_data(self, island: str, incarnation: int, data: DataSpec) -> DataSpec:
        self.ledger = self.ledger.opened(data)
        return self.ledger.data

    def claim(self, ask: Ask) -> Claim:
        self.asks.append(ask)
        earlier = self.ledger.answered(ask.island, ask.number)
        if earlier is not None:
            return Claim(spans=earlier)
        spans = self.ledger.chosen(ask.want, start=ask.start, num_live=self._num_live)
        if spans:
            self.ledger = self.ledger.claimed(ask.island, ask.number, spans)
        return Claim(spans=spans, is_over=not self.ledger.has_free)

    def held(self, island: str) -> Spans:
        """Return the turns that the next incarnation of an island trains on."""
        return self.ledger.to_train(island)
