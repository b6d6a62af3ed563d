"""The definition of a run's model, and the code of its islands, as a store has them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from atoll.bundle import MAX_BYTES, Bundle
from atoll.bundle.archive import MAX_CODE_BYTES
from atoll.errors import CorruptError, NoSuchObject
from atoll.exchange.bucket import keys
from atoll.exchange.bucket.documents import RESTORE
from atoll.settings import RunSettings
from atoll.store import Store
from atoll.wire import blake3_digest

log = logging.getLogger("atoll")


def archive_in(store: Store, digest: str) -> bytes:
    """Return the archive that a run's settings name, as it is there.

    Raises:
        CorruptError: it is not there, or does not have the digest in its name.
    """
    key = keys.bundle(digest)
    try:
        data = bytes(store.get(key, 0, MAX_BYTES + 1))
    except NoSuchObject as exc:
        raise CorruptError(
            f"The run's settings name {key}, and there is none: somebody has removed "
            "it. Put it back from a copy."
        ) from exc
    if blake3_digest(data).hex() != digest:
        raise CorruptError(
            f"{key} was altered: it does not have the digest in its name. {RESTORE}"
        )
    return data


def bundle_in(store: Store, settings: RunSettings) -> Bundle | None:
    """Return what defines a run's model; None: every island brings it.

    Raises:
        CorruptError: it is not what the settings name, or is not there.
    """
    digest = settings.run.bundle
    if digest is None:
        return None
    return Bundle.of_archive(archive_in(store, digest), digest=digest)


def codes_in(store: Store) -> Iterator[tuple[str, bytes]]:
    """Yield the code that islands were launched with, each under its digest.

    What is not what its key says stays behind: no island would run it.
    """
    for item in store.items(keys.CODE):
        digest = item.key.removeprefix(keys.CODE)
        if item.size > MAX_CODE_BYTES:
            log.warning("%s has %d bytes, and stays behind", item.key, item.size)
            continue
        data = bytes(store.get(item.key, 0, MAX_CODE_BYTES))
        if blake3_digest(data).hex() != digest:
            log.warning("%s is not what its name says, and stays behind", item.key)
            continue
        yield digest, data
