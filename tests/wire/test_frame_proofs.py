"""A receipt proves one state or one outcome of one run, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atoll.wire.frame import (
    RECEIPT_BYTES,
    is_same_receipt,
    outcome_receipt,
    state_receipt,
)
from tests.wire.samples import an_agreed, sealed

KEY = bytes(range(32))
STATE: dict[str, Any] = {
    "run": "lagoon",
    "fragment": 1,
    "round": 7,
    "digest": b"d" * 16,
}
OUTCOME = sealed(an_agreed())


def test_the_bytes_of_a_receipt_are_fixed() -> None:
    """An island keeps them over an upgrade of its coordinator."""
    assert state_receipt(KEY, **STATE).hex() == "4cfacb096cd5b94600995a1edc59152b"


@pytest.mark.parametrize(
    "other",
    [
        {"run": "lagoo"},
        {"fragment": 0},
        {"round": 8},
        {"round": 7 + 2**63},
        {"digest": b"e" * 16},
        {"digest": b"d" * 15, "run": "dlagoon"},
    ],
)
def test_a_receipt_is_for_one_state(other: dict[str, Any]) -> None:
    """Of another run, fragment, round or state it is another."""
    receipt = state_receipt(KEY, **STATE)

    assert len(receipt) == RECEIPT_BYTES
    assert not is_same_receipt(receipt, state_receipt(KEY, **(STATE | other)))
    assert not is_same_receipt(receipt, state_receipt(bytes(32), **STATE))
    assert not is_same_receipt(b"", receipt)


def test_a_receipt_is_for_one_outcome() -> None:
    """Whatever of its header differs; and it is not that of a state."""
    receipt = outcome_receipt(KEY, OUTCOME)

    assert is_same_receipt(receipt, outcome_receipt(KEY, replace(OUTCOME)))
    assert receipt != outcome_receipt(KEY, replace(OUTCOME, epoch=77))
    assert receipt != outcome_receipt(KEY, replace(OUTCOME, base=b"b" * 16))
    assert receipt != outcome_receipt(bytes(32), OUTCOME)
    assert receipt != state_receipt(KEY, **STATE)
