"""Bearer tokens in two roles: an island's, and an operator's, which may do both.

Rule 1: a token is in a private file and in the header of a request, nowhere else.
Rule 2: the coordinator keeps digests, and compares all of them in constant time.
Rule 3: a token says of itself that it is one, so that a leaked one is recognised.
"""

from __future__ import annotations

import enum
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from atoll.errors import CorruptError, Refused, UsageError
from atoll.security.private import make_private, read_private
from atoll.security.secret import Secret, digest_of, is_among

TOKEN_BYTES = 32
MAX_HEADER_BYTES = 256
"""Longer than any token; what is longer is not even looked at."""

_TOKEN = re.compile(r"atoll_([io])_[A-Za-z0-9_-]{43}", re.ASCII)
_BEARER = re.compile(r"bearer +(\S+)", re.ASCII | re.IGNORECASE)


class Role(enum.Enum):
    """What the holder of a token may do."""

    ISLAND = "island"
    OPERATOR = "operator"

    def includes(self, needed: Role) -> bool:
        """Say whether this role may do what `needed` may."""
        return self is needed or self is Role.OPERATOR


_LETTER = {Role.ISLAND: "i", Role.OPERATOR: "o"}


class Tokens:
    """What the coordinator knows its callers by: digests, and no token.

    Safe to use from several threads: it never changes.
    """

    def __init__(self, tokens: Mapping[Role, Secret]) -> None:
        self._digests = {role: [token.digest()] for role, token in tokens.items()}

    def role_of(self, authorization: str | bytes | None) -> Role | None:
        """Return the role that an Authorization header proves, if any."""
        digest = digest_of(_bearer(authorization))
        # Every role is looked at, whichever matches: time tells nothing.
        found = [r for r, known in self._digests.items() if is_among(digest, known)]
        return found[0] if found else None


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

    Two processes that ask at the same time get the same ones.

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
    """Return where the run in `directory` keeps the token of a role."""
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
        path, what="token", max_bytes=MAX_HEADER_BYTES, is_given=is_given
    )
    return _checked(path, text.decode("ascii", "replace").strip(), role)


def check_token(text: str) -> Secret:
    """Return a token that came by another way than a file, if it is one."""
    if not _TOKEN.fullmatch(text):
        raise UsageError(f"That is no token: {_SHAPE}. Ask for a new invite.")
    return Secret(text)


def role_claimed(token: Secret) -> Role | None:
    """Return the role that a token's own text names; it proves nothing."""
    found = _TOKEN.fullmatch(token.reveal())
    return next((r for r in Role if found and _LETTER[r] == found[1]), None)


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
    """Return the token of a header; empty, which is nobody's, for any other."""
    if authorization is None or len(authorization) > MAX_HEADER_BYTES:
        return ""
    if isinstance(authorization, bytes):
        authorization = authorization.decode("latin-1")
    found = _BEARER.fullmatch(authorization.strip(" \t"))
    return found[1] if found else ""
