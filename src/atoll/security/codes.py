"""One-time codes: what an invite carries in place of a token.

Rule 1: a code opens once, within an hour, and is kept as a digest.
Rule 2: a wrong code, a used one and an old one get the same answer, in the same time.
Rule 3: after ten wrong codes within a minute everybody waits, who has a right one too.
Rule 4: time is a parameter; codes are in memory only, and a restart forgets them.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque

from atoll.errors import Refused
from atoll.security.secret import Secret, digest_of, is_among

CODE_BYTES = 16
MAX_CODE_CHARACTERS = 128
LIFETIME_S = 3600.0
MAX_OUTSTANDING = 64
MAX_WRONG = 10
WRONG_WITHIN_S = 60.0


class MustWait(Refused):
    """Too many wrong codes came: try again after `wait_s`. Nothing was used up."""

    def __init__(self, *, wait_s: float) -> None:
        super().__init__(
            f"{MAX_WRONG} wrong codes came within {WRONG_WITHIN_S:.0f} s. Try again "
            f"in {wait_s:.0f} s; this code stays good."
        )
        self.wait_s = wait_s


class Codes:
    """The codes that were given out and not used yet. Threads may share it.

    Args:
        grant: What a right code is exchanged for: the token of an island.
    """

    def __init__(self, grant: Secret) -> None:
        self._grant = grant
        self._expiry_s: dict[bytes, float] = {}
        self._wrong_s: deque[float] = deque(maxlen=MAX_WRONG)
        self._lock = threading.Lock()

    def make(self, *, now_s: float) -> Secret:
        """Return a new code.

        Raises:
            Refused: too many are outstanding.
        """
        code = Secret(secrets.token_hex(CODE_BYTES))
        with self._lock:
            self._forget_old(now_s)
            if len(self._expiry_s) >= MAX_OUTSTANDING:
                wait_s = min(self._expiry_s.values()) - now_s
                raise Refused(
                    f"{MAX_OUTSTANDING} invites are not used yet. Use one of them, or "
                    f"wait {wait_s:.0f} s until the oldest expires."
                )
            self._expiry_s[code.digest()] = now_s + LIFETIME_S
        return code

    def redeem(self, code: str, *, now_s: float) -> Secret:
        """Return the island's token for a code, which is thereby used.

        Not safe to repeat: who did not get the answer needs a new invite.

        Raises:
            MustWait: too many wrong ones came; this one was not looked at.
            Refused: it is wrong, used or too old.
        """
        digest = digest_of(code[:MAX_CODE_CHARACTERS])
        with self._lock:
            self._require_calm(now_s)
            self._forget_old(now_s)
            if is_among(digest, list(self._expiry_s)):
                del self._expiry_s[digest]
                return self._grant
            self._wrong_s.append(now_s)
        raise Refused(
            f"This code is wrong, was used, or is older than {LIFETIME_S / 60:.0f} "
            "minutes. Ask for a new invite: atoll invite RUN"
        )

    def outstanding(self, *, now_s: float) -> int:
        """Return how many codes could be redeemed now."""
        with self._lock:
            self._forget_old(now_s)
            return len(self._expiry_s)

    def _require_calm(self, now_s: float) -> None:
        if len(self._wrong_s) < MAX_WRONG:
            return
        wait_s = self._wrong_s[0] + WRONG_WITHIN_S - now_s
        if wait_s > 0:
            raise MustWait(wait_s=wait_s)

    def _forget_old(self, now_s: float) -> None:
        for digest, expiry_s in list(self._expiry_s.items()):
            if expiry_s <= now_s:
                del self._expiry_s[digest]
