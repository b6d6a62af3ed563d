"""One-time codes: what an invite carries in place of a token.

Rule 1: a code opens once, within an hour, and is kept as a digest.
Rule 2: a wrong code, a used one and an old one get the same answer, in the same time.
Rule 3: after ten wrong codes within a minute an address waits, and so does a code that
was wrong ten times. A right code opens all the same, from every address: with 128 bits
it cannot be guessed, so that a wait would only let strangers lock others out.
Rule 4: time is a parameter; codes are in memory only, and a restart forgets them.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Hashable

from atoll.errors import Refused
from atoll.security.addresses import network_of
from atoll.security.secret import Secret, digest_of, is_among

CODE_BYTES = 16
MAX_CODE_CHARACTERS = 128
LIFETIME_S = 3600.0
MAX_OUTSTANDING = 64
MAX_WRONG = 10
WRONG_WITHIN_S = 60.0
MAX_COUNTED = 4096
"""Addresses and codes whose wrong tries are remembered; the oldest is forgotten."""


class MustWait(Refused):
    """Too many wrong tries of one address or one code: try again after `wait_s`."""

    def __init__(self, *, wait_s: float) -> None:
        super().__init__(
            f"{MAX_WRONG} wrong tries came within {WRONG_WITHIN_S:.0f} s from this "
            "address or with this code, and this code is wrong too. Try again in "
            f"{wait_s:.0f} s with a new invite: atoll invite RUN"
        )
        self.wait_s = wait_s


class WrongTries:
    """Wrong tries of the last minute, by address and by code, within bounded memory."""

    def __init__(self, *, max_counted: int = MAX_COUNTED) -> None:
        self._max_counted = max_counted
        self._tries_s: OrderedDict[Hashable, deque[float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tries_s)

    def require_calm(self, key: Hashable, now_s: float) -> None:
        """Raise MustWait if this key was wrong too often within a minute."""
        tries_s = self._tries_s.get(key)
        if tries_s is not None and len(tries_s) == MAX_WRONG:
            wait_s = tries_s[0] + WRONG_WITHIN_S - now_s
            if wait_s > 0:
                raise MustWait(wait_s=wait_s)

    def add(self, key: Hashable, now_s: float) -> None:
        """Count one wrong try; the key whose last one is oldest makes room."""
        self._tries_s.setdefault(key, deque(maxlen=MAX_WRONG)).append(now_s)
        self._tries_s.move_to_end(key)
        if len(self._tries_s) > self._max_counted:
            self._tries_s.popitem(last=False)


class Codes:
    """The codes that were given out and not used yet. Threads may share it.

    Args:
        grant: What a right code is exchanged for: the token of an island.
    """

    def __init__(self, grant: Secret) -> None:
        self._grant = grant
        self._expiry_s: dict[bytes, float] = {}
        self._wrong = WrongTries()
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

    def redeem(self, code: str, *, address: str, now_s: float) -> Secret:
        """Return the island's token for a code, which is thereby used.

        Not safe to repeat: who did not get the answer needs a new invite.

        Raises:
            Refused: it is wrong, used or too old.
            MustWait: likewise, and too often from this address or with this code.
        """
        digest = digest_of(code[:MAX_CODE_CHARACTERS])
        with self._lock:
            self._forget_old(now_s)
            if is_among(digest, list(self._expiry_s)):
                del self._expiry_s[digest]
                return self._grant
            for key in (network_of(address), digest):
                self._wrong.require_calm(key, now_s)
            for key in (network_of(address), digest):
                self._wrong.add(key, now_s)
        raise Refused(
            f"This code is wrong, was used, or is older than {LIFETIME_S / 60:.0f} "
            "minutes. Ask for a new invite: atoll invite RUN"
        )

    def outstanding(self, *, now_s: float) -> int:
        """Return how many codes could be redeemed now."""
        with self._lock:
            self._forget_old(now_s)
            return len(self._expiry_s)

    def _forget_old(self, now_s: float) -> None:
        for digest, expiry_s in list(self._expiry_s.items()):
            if expiry_s <= now_s:
                del self._expiry_s[digest]
