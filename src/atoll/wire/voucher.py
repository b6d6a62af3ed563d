"""An island's own word for the outcome of a round, which nobody else can give.

A run knows the digest of each member's key, and nobody else does but the member. So a
keyed digest of an agreed frame's header, whose pieces name every byte of its body, says
that this very island holds this very frame, whoever brings it.
"""

from __future__ import annotations

from blake3 import blake3

from atoll.wire.digests import blake3_digest
from atoll.wire.frame import pack
from atoll.wire.header import Header

VOUCHER_BYTES = 32
_TAG = b"atoll voucher v1"


def voucher(key: bytes, agreed: Header) -> bytes:
    """Return the word of who holds the key with this digest for a sealed outcome."""
    return blake3(_TAG + blake3_digest(pack(agreed)), key=key).digest()
