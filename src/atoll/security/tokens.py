"""Bearer tokens in two roles, and one-time codes.

A traceback, a log line or a formatted message that meets a `Secret` shows `<secret>`.
Code that needs the text calls `reveal`, which is easy to search for.

A token is an island's, or an operator's, which may do both.
Rule 1: a token is in a private file and in the header of a request, nowhere else.
Rule 2: the coordinator keeps digests, and compares all of them in constant time.
Rule 3: a token begins with its own mark, so that a leaked one is recognised.

A one-time code is in an invite in place of a token.
Rule 4: a code opens once, within an hour, and is kept as a digest.
Rule 5: a wrong code, a used one and an old one get the same answer, in the same time.
Rule 6: after ten wrong codes within a minute an address waits, and so does a code that
was wrong ten times. A right code opens all the same, from every address: with 128 bits
it cannot be guessed, so that a wait would only let strangers lock others out.
Rule 7: time is a parameter; codes are in memory only, and a restart forgets them.

`routes.ROUTES` has the role that each route needs.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import NoReturn

from atoll.errors import CorruptError, Refused, UsageError
from atoll.routes import Role
from atoll.security.addresses import is_loopback, network_of
from atoll.security.private_files import make_private, read_private

SHOWN = "<secret>"


class Secret:
    """Holds text, compares it in constant time, and never shows it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text itself: for a header, a private file or an invite only."""
        return self._text

    def digest(self) -> bytes:
        """Return its digest, which may be stored."""
        return digest_of(self._text)

    def __repr__(self) -> str:
        return SHOWN

    def __format__(self, spec: str) -> str:
        return SHOWN

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self.digest(), other.digest())

    def __hash__(self) -> int:
        return hash(self.digest())

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # `copy` and `dataclasses.asdict` use it, too.
        raise TypeError("A secret is neither copied nor written by accident.")


def digest_of(text: str) -> bytes:
    """Return the SHA-256 of a secret's text.

    One pass suffices: tokens and codes are random, so they cannot be guessed.
    """
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def is_among(digest: bytes, digests: list[bytes]) -> bool:
    """Return whether `digest` is in `digests`, in a time independent of which."""
    is_found = False
    for candidate in digests:
        is_found |= hmac.compare_digest(candidate, digest)
    return is_found


TOKEN_BYTES = 32
MAX_HEADER_BYTES = 256
"""Longer than any token; longer headers are ignored."""

_TOKEN = re.compile(r"atoll_([io])_[A-Za-z0-9_-]{43}", re.ASCII)
_BEARER = re.compile(r"bearer +(\S+)", re.ASCII | re.IGNORECASE)


_LETTER = {Role.ISLAND: "i", Role.OPERATOR: "o"}


class Tokens:
    """The digests of the run's tokens, by which the coordinator verifies callers.

    Safe to use from several threads: it never changes.
    """

    def __init__(self, tokens: Mapping[Role, Secret]) -> None:
        self._digests = {role: [token.digest()] for role, token in tokens.items()}

    def role_of(self, authorization: str | bytes | None) -> Role | None:
        """Return the role that an Authorization header proves, if any."""
        digest = digest_of(_bearer(authorization))
        # Compare with every role, so that the time does not depend on the match.
        roles = [r for r, digests in self._digests.items() if is_among(digest, digests)]
        return roles[0] if roles else None


def require(role: Role | None, needed: Role | None) -> None:
    """Return if `role` may do what needs `needed`; `None` needs nothing.

    Raises:
        Refused: it may not; without a role this is HTTP's 401, with one its 403.
    """
    if needed is None or (role is not None and role.includes(needed)):
        return
    if role is None:
        raise Refused(
            f"This needs the token of an {needed.value}, and none that is valid came "
            "with it. Set ATOLL_TOKEN_FILE, or use an invite."
        )
    raise Refused(
        f"This needs the token of an {needed.value}, and came with that of an "
        f"{role.value}. Ask the operator of the run."
    )


def make_token(role: Role) -> Secret:
    """Return a new token of 256 random bits."""
    return Secret(f"atoll_{_LETTER[role]}_{secrets.token_urlsafe(TOKEN_BYTES)}")


def run_tokens(directory: Path) -> dict[Role, Secret]:
    """Return the tokens of the run in `directory`, made on the first call.

    Concurrent processes get the same ones.

    Raises:
        UsageError: others may read a file, or the directory cannot be written.
        CorruptError: a file holds no token of its role.
        DiskError: the disk failed.
    """
    for role in Role:
        path = token_file(directory, role)
        if not path.exists():
            make_private(path, f"{make_token(role).reveal()}\n".encode())
    return {role: read_token(token_file(directory, role), role=role) for role in Role}


def token_file(directory: Path, role: Role) -> Path:
    """Return the token file of a role for the run in `directory`."""
    return directory / f"{role.value}.token"


def read_token(
    path: Path, *, role: Role | None = None, is_given: bool = False
) -> Secret:
    """Return the token in a file; of any role, or of the given one.

    A path that the user has given may lead to a mounted secret: see `read_private`.

    Raises:
        NoSuchFile: there is no such file.
        UsageError: others may read it.
        CorruptError: it holds no token of that role.
    """
    text = read_private(
        path, content="token", max_bytes=MAX_HEADER_BYTES, is_given=is_given
    )
    return _checked(path, text.decode("ascii", "replace").strip(), role)


def check_token(text: str) -> Secret:
    """Return a token that was not read from a file, if it is well-formed."""
    if not _TOKEN.fullmatch(text):
        raise UsageError(f"That is no token: {_SHAPE}. Ask for a new invite.")
    return Secret(text)


def role_claimed(token: Secret) -> Role | None:
    """Return the role that a token's text claims; it is not verified."""
    match = _TOKEN.fullmatch(token.reveal())
    return next((r for r in Role if match and _LETTER[r] == match[1]), None)


def authorization(token: Secret) -> str:
    """Return the header that carries a token. It is secret too."""
    return f"Bearer {token.reveal()}"


_SHAPE = "a token is 'atoll_i_' or 'atoll_o_' and 43 letters, digits, '-' and '_'"


def _checked(path: Path, text: str, role: Role | None) -> Secret:
    token = Secret(text)
    claimed = role_claimed(token)
    if claimed is None:
        raise CorruptError(f"{path} holds no token: {_SHAPE}. Put the token back.")
    if role is not None and claimed is not role:
        raise CorruptError(
            f"{path} holds the token of an {claimed.value}, not of an {role.value}. "
            "Put the right one back, or remove the file to have one made."
        )
    return token


def _bearer(authorization: str | bytes | None) -> str:
    """Return the token of a header; empty, which matches none, for any other."""
    if authorization is None or len(authorization) > MAX_HEADER_BYTES:
        return ""
    if isinstance(authorization, bytes):
        authorization = authorization.decode("latin-1")
    match = _BEARER.fullmatch(authorization.strip(" \t"))
    return match[1] if match else ""


CODE_BYTES = 16
MAX_CODE_CHARACTERS = 128
LIFETIME_S = 3600.0
MAX_OUTSTANDING = 64
MAX_WRONG = 10
WRONG_WITHIN_S = 60.0
MAX_COUNTED = 4096
"""Addresses and codes whose wrong tries are counted; the oldest is dropped."""


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
        """Count one wrong try; beyond the limit, drop the key with the oldest one."""
        self._tries_s.setdefault(key, deque(maxlen=MAX_WRONG)).append(now_s)
        self._tries_s.move_to_end(key)
        if len(self._tries_s) > self._max_counted:
            self._tries_s.popitem(last=False)


class OneTimeCodes:
    """The codes that were issued and not used yet. Threads may share it.

    Args:
        grant: The token of an island, which is returned for a valid code.
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

        Not safe to repeat: a caller that missed the answer needs a new invite.

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

    def _forget_old(self, now_s: float) -> None:
        for digest, expiry_s in list(self._expiry_s.items()):
            if expiry_s <= now_s:
                del self._expiry_s[digest]


def require_safe_listening(host: str, *, has_tls: bool) -> None:
    """Return if a coordinator may listen at `host`; empty means every interface.

    Raises:
        UsageError: other machines could reach it, and tokens would be unencrypted.
    """
    if has_tls or is_loopback(host):
        return
    raise UsageError(
        f"Listening at {host[:64] or 'every interface'!r} without TLS would let tokens "
        "travel in the open. Listen with TLS, or at 127.0.0.1 only."
    )
