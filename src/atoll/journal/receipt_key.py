"""The key of a run's receipts: `receipts.key`, beside the log.

The file holds 32 random bytes, then 16 bytes of BLAKE3 over a tag and them. The key is
made once and stays for the life of the run. Whoever has it can prove any state to this
coordinator, so no route, no export and no move takes it along.
"""

from __future__ import annotations

import secrets

from atoll.disk import Disk
from atoll.errors import CorruptError, NoSuchFile
from atoll.wire import blake3_digest
from atoll.wire.receipt import KEY_BYTES

NAME = "receipts.key"
CHECK_BYTES = 16
_TAG = b"atoll receipts.key v1"


def load_receipt_key(disk: Disk) -> bytes:
    """Return the key of the run on a disk, made and durable if there was none.

    A journal written before there were receipts has none: it gets one here.

    Raises:
        CorruptError: the file does not hold a key; it is left as it is.
        DiskError: the key cannot be read or written.
    """
    try:
        data = disk.read(NAME)
    except NoSuchFile:
        key = secrets.token_bytes(KEY_BYTES)
        disk.write_new(NAME, [key, _check(key)])
        return key
    key, check = data[:KEY_BYTES], data[KEY_BYTES:]
    if check != _check(key):
        raise CorruptError(
            f"{NAME} is damaged: its {len(data)} bytes do not verify. Restore it from "
            "a copy. Or remove it: the next start makes another key, which does not "
            "know the receipts that islands hold now."
        )
    return key


def _check(key: bytes) -> bytes:
    return blake3_digest(_TAG + key)[:CHECK_BYTES]
