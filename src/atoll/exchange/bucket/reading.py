"""Reads what a run in a bucket is, and what operators have said. Puts nothing.

Rule 1: the lock is held for a `Sight`, never for a request.
Rule 2: an object that cannot be read as what its key promises is nobody's: it is told
        once and passed over, unless the run cannot go on without it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from atoll.errors import CorruptError, NoSuchObject
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import RunDocument, SettingsDocument, fetch
from atoll.exchange.bucket.known_bases import KnownBases
from atoll.exchange.bucket.known_members import KnownMembers
from atoll.exchange.bucket.known_updates import KnownUpdates
from atoll.exchange.bucket.known_words import KnownWords
from atoll.exchange.bucket.sight import LEASE_S, Sight
from atoll.exchange.bucket.timing import Timing
from atoll.protocol.moving import require_here
from atoll.store import Store

WORD_S = 2.0
"""Between two looks whether a run that is on its way has come or stays."""

log = logging.getLogger("atoll")


class Reading:
    """Tells a `Sight` what a run is. Any thread may call."""

    def __init__(
        self,
        store: Store,
        timing: Timing,
        settings: SettingsDocument,
        *,
        lease_s: float = LEASE_S,
    ) -> None:
        self.store, self.timing = store, timing
        self.run = settings.run
        self.founded: RunDocument | None = None
        self.sight = Sight(settings.run, settings.settings, lease_s=lease_s)
        self.bases, self.updates = KnownBases(self.sight), KnownUpdates(self.sight)
        self.members = KnownMembers(self.sight, self.updates)
        self.words = KnownWords(self.sight, self.members)
        self.lock = threading.RLock()
        self._fingerprint = settings.fingerprint
        self._told: set[str] = set()

    def look_founding(self) -> bool:
        """Return whether the run has its first weights."""
        if self.founded is None:
            try:
                found = fetch(self.store, documents.RUN, keys.RUN, run=self.run)
            except NoSuchObject:
                return False
            if found.fingerprint != self._fingerprint:
                raise CorruptError(
                    f"{keys.SETTINGS} has fingerprint {self._fingerprint[:12]}, and "
                    f"the run was founded with {found.fingerprint[:12]}: somebody has "
                    "edited it. Put the old one back, or make another run."
                )
            with self.lock:
                self.founded = found
                self.sight.found(found.model, self.timing.now_s())
        return True

    def look_controls(self) -> None:
        """Read what operators have said since."""
        while True:
            key = keys.control(len(self.sight.controls) + 1)
            try:
                said = fetch(self.store, documents.CONTROL, key, run=self.run)
            except NoSuchObject:
                return
            with self.lock:
                if key == keys.control(len(self.sight.controls) + 1):
                    self.words.see(said, self.timing.now_s())

    def heed_controls(self) -> None:
        """Read what operators have said since; what is nobody's word is passed over."""
        with suppress(NoSuchObject):
            self.tolerant(keys.CONTROL, self.look_controls)

    def require_here(self) -> None:
        """Return unless the run is known to be elsewhere.

        Raises:
            RunMoved: it is, and where.
        """
        require_here(self.sight.state)

    def require_staying(self) -> None:
        """Return when the run is not on its way, however long that may take.

        Raises:
            RunMoved: it has come where it goes.
        """
        self.heed_controls()
        while self.sight.state.move is not None:
            self.require_here()
            self.timing.pause(WORD_S)
            self.heed_controls()

    def tolerant(self, key: str, read: Callable[[], documents.T]) -> documents.T | None:
        """Return what was read; None: it is not what its key promises, and was told."""
        try:
            return read()
        except CorruptError as exc:
            self.tell(f"{key} is passed over: {exc}")
            return None

    def tell(self, what: str) -> None:
        """Tell people something, once."""
        if what not in self._told:
            self._told.add(what)
            log.warning("%s", what)

    def listed(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix, as a list has them now."""
        return [item.key for item in self.store.items(prefix)]


def require_unchanged(document: SettingsDocument, fingerprint: str) -> None:
    """Return if settings are those that a run was made with."""
    if document.settings.fingerprint != fingerprint:
        raise CorruptError(
            f"{keys.SETTINGS} says fingerprint {fingerprint[:12]}, and its settings "
            f"have {document.settings.fingerprint[:12]}: somebody has edited them. "
            "Put the old ones back; what may change is changed by `atoll control`."
        )
