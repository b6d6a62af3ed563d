"""One-time codes, and the sessions of browsers that have used one.

Rule 1: a code opens one session, for ten minutes at most, and ten wrong ones a minute
        are refused without a look.
Rule 2: only digests are stored; a restart forgets all.
Rule 3: a session that is not used for 12 hours ends, and the 17th ends the one that
        was not used for the longest time.
"""

from __future__ import annotations

import secrets
import threading
from typing import Final

from atoll.errors import Refused
from atoll.security import Secret
from atoll.security.tokens import WrongTries, digest_of, is_among

CODE_BYTES: Final = 16
SESSION_BYTES: Final = 32
CODE_S: Final = 600.0
IDLE_S: Final = 12 * 3600.0
MAX_SESSIONS: Final = 16
MAX_CODES: Final = 16
MAX_SECRET_CHARACTERS: Final = 128


class WrongCode(Refused):
    """A code that was never made, was used, or is too old."""


class Sessions:
    """The codes that are not used yet, and the open sessions. Threads may share it."""

    def __init__(self) -> None:
        self._code_expiry_s: dict[bytes, float] = {}
        self._used_s: dict[bytes, float] = {}
        """Last use of each session."""

        self._wrong = WrongTries()
        self._lock = threading.Lock()

    def make_code(self, *, now_s: float) -> Secret:
        """Return a new code; of more than `MAX_CODES` the oldest is void."""
        code = Secret(secrets.token_hex(CODE_BYTES))
        with self._lock:
            self._code_expiry_s[code.digest()] = now_s + CODE_S
            while len(self._code_expiry_s) > MAX_CODES:
                del self._code_expiry_s[next(iter(self._code_expiry_s))]
        return code

    def open(self, code: str, *, address: str, now_s: float) -> Secret:
        """Return the secret of a new session for a code, which is thereby used.

        Raises:
            WrongCode: it is wrong, used or too old.
            MustWait: ten wrong codes came from this address within a minute.
        """
        digest = digest_of(code[:MAX_SECRET_CHARACTERS])
        with self._lock:
            self._wrong.require_calm(address, now_s)
            expiry_s = self._code_expiry_s
            if not is_among(digest, list(expiry_s)) or expiry_s[digest] < now_s:
                self._wrong.add(address, now_s)
                raise WrongCode(
                    "This link is wrong, was used, or is older than ten minutes. "
                    "Press Enter where `atoll dashboard` runs: it prints a new one."
                )
            del self._code_expiry_s[digest]
            session = Secret(secrets.token_hex(SESSION_BYTES))
            self._used_s[session.digest()] = now_s
            while len(self._used_s) > MAX_SESSIONS:
                oldest = min(self._used_s, key=lambda key: self._used_s[key])
                del self._used_s[oldest]
            return session

    def is_open(self, secret: str, *, now_s: float) -> bool:
        """Return whether a session is open; this counts as a use of it."""
        digest = digest_of(secret[:MAX_SECRET_CHARACTERS])
        with self._lock:
            if not is_among(digest, list(self._used_s)):
                return False
            if now_s - self._used_s[digest] > IDLE_S:
                del self._used_s[digest]
                return False
            self._used_s[digest] = now_s
            return True

    def close(self, secret: str) -> None:
        """End a session. Safe to repeat."""
        with self._lock:
            self._used_s.pop(digest_of(secret[:MAX_SECRET_CHARACTERS]), None)
