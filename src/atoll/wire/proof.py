"""The proof that a call comes from the island that it speaks for.

Islands of a run share one token, and anybody with the token can read an island's name
and incarnation in the status. The key of an island is known to the island alone, and
its digest to the run. A BLAKE3 keyed by that digest over the run, the name and the
incarnation is therefore a bearer that only this life of this island can show. Both
sides derive it: nothing is stored, and a run that restarts has it again.

It is the same for every call of one life, so it needs the protection of the token that
travels beside it: TLS, or a line that does not leave the machine.
"""

from __future__ import annotations

import struct

from blake3 import blake3

PROOF_BYTES = 32
_TAG = b"atoll island v2"
_SIZE = struct.Struct("<I")
_INCARNATION = struct.Struct("<Q")


def island_proof(key: bytes, *, run: str, island: str, incarnation: int) -> bytes:
    """Return the proof of the life of an island whose key has the digest `key`."""
    data = [_TAG]
    for name in (run.encode(), island.encode()):
        data += [_SIZE.pack(len(name)), name]
    data.append(_INCARNATION.pack(incarnation))
    return blake3(b"".join(data), key=key).digest()
