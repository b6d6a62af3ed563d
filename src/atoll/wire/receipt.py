"""Receipts: a run's own proof of what it has committed.

A coordinator hands a receipt out with every state and every outcome. Later an island
shows it to prove that the run did commit what the island holds. Only the holder of the
run's receipt key can make one, and it says nothing about who shows it.
"""

from __future__ import annotations

import hmac
import struct

from blake3 import blake3

from atoll.wire.digests import blake3_digest
from atoll.wire.frame import pack
from atoll.wire.header import Header

KEY_BYTES = 32
RECEIPT_BYTES = 16

_STATE_TAG = b"atoll receipt v1"
_OUTCOME_TAG = b"atoll outcome v1"
_STATE = struct.Struct("<IQB")


def state_receipt(
    key: bytes, *, run: str, fragment: int, round: int, digest: bytes
) -> bytes:
    """Return the receipt for a fragment's state after a round.

    BLAKE3, keyed, over the tag, the fragment, the round, the state digest with its
    length, and the run's name.
    """
    head = _STATE.pack(fragment, round, len(digest))
    return _mac(key, _STATE_TAG + head + digest + run.encode())


def outcome_receipt(key: bytes, agreed: Header) -> bytes:
    """Return the receipt for the outcome of a round: its header, and so its body."""
    return _mac(key, _OUTCOME_TAG + blake3_digest(pack(agreed)))


def is_same_receipt(shown: bytes, expected: bytes) -> bool:
    """Return whether a receipt is the expected one, in constant time."""
    return hmac.compare_digest(shown, expected)


def _mac(key: bytes, data: bytes) -> bytes:
    return blake3(data, key=key).digest(length=RECEIPT_BYTES)
