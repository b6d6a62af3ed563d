"""Proofs by keyed BLAKE3: of an island, of a committed state, of an outcome.

Proof of an island (`island_proof`). Islands of a run share one token, and any holder of
the token can read an island's name and incarnation in the status. Only the island knows
its key, and only the run knows the digest of that key. A BLAKE3 keyed by the digest
over the run, the name and the incarnation is therefore a bearer token that only this
incarnation of this island can show. Both sides derive it: nothing is stored, and a
coordinator that restarts derives it again. It is the same for every call of one
incarnation, so it needs the protection of the token that travels beside it: TLS, or a
connection that does not leave the machine.

Receipts (`state_receipt`, `outcome_receipt`). A coordinator sends a receipt with every
state and every outcome. Later an island shows it to prove that the run did commit the
state that the island holds. Only the holder of the run's receipt key can make one. A
receipt does not prove the identity of its sender.

Vouchers (`voucher`). The key digest of a member is known to the run and to that member
only. So a keyed digest of an agreed frame's header, whose pieces fix every byte of its
body, proves that this island holds this frame, whichever island delivers it.
"""

from __future__ import annotations

import hmac
import struct

from blake3 import blake3

from atoll.wire.digests import blake3_digest
from atoll.wire.frame import pack
from atoll.wire.header import Header

PROOF_BYTES = 32
_ISLAND_TAG = b"atoll island v2"
_SIZE = struct.Struct("<I")
_INCARNATION = struct.Struct("<Q")


def island_proof(key: bytes, *, run: str, island: str, incarnation: int) -> bytes:
    """Return the proof of an incarnation of the island whose key digest is `key`."""
    data = [_ISLAND_TAG]
    for name in (run.encode(), island.encode()):
        data += [_SIZE.pack(len(name)), name]
    data.append(_INCARNATION.pack(incarnation))
    return blake3(b"".join(data), key=key).digest()


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


VOUCHER_BYTES = 32
_VOUCHER_TAG = b"atoll voucher v1"


def voucher(key: bytes, agreed: Header) -> bytes:
    """Return the voucher for a sealed outcome, by the island with this key digest."""
    return blake3(_VOUCHER_TAG + blake3_digest(pack(agreed)), key=key).digest()
