"""The definition of a run's model, as a store keeps it."""

from __future__ import annotations

from atoll.bundle import MAX_BYTES, Bundle
from atoll.errors import CorruptError, NoSuchObject
from atoll.exchange.bucket import keys
from atoll.settings import RunSettings
from atoll.store import Store


def archive_in(store: Store, digest: str) -> bytes:
    """Return the archive that a run's settings name, as it is there.

    Raises:
        CorruptError: it is not there.
    """
    key = keys.bundle(digest)
    try:
        return bytes(store.get(key, 0, MAX_BYTES + 1))
    except NoSuchObject as exc:
        raise CorruptError(
            f"The run's settings name {key}, and there is none: somebody has removed "
            "it. Put it back from a copy."
        ) from exc


def bundle_in(store: Store, settings: RunSettings) -> Bundle | None:
    """Return what defines a run's model; None: every island brings it.

    Raises:
        CorruptError: it is not what the settings name, or is not there.
    """
    digest = settings.run.bundle
    if digest is None:
        return None
    return Bundle.of_archive(archive_in(store, digest), digest=digest)
