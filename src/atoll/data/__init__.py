"""Owns the rows of a run's dataset: their order, their holders and their state.

Does not know the content of a row, nor how islands ask for rows.
Start reading at `ledger`; `spans` are its sets of rows, `order` the order of the run.
"""

from atoll.data.batches import batches
from atoll.data.ledger import Ask, Claim, DataSpec, RowCounts, RowLedger
from atoll.data.order import RunOrder
from atoll.data.spans import Spans

__all__ = [
    "Ask",
    "Claim",
    "DataSpec",
    "RowCounts",
    "RowLedger",
    "RunOrder",
    "Spans",
    "batches",
]
