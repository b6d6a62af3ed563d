"""Text that is shown to nobody: a token or a one-time code in the process's memory.

A traceback, a log line or a formatted message that meets a secret shows `<secret>`.
Whoever needs the text says so with `reveal`, which is easy to search for.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import NoReturn

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
        """Return what may be kept in its place."""
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
        # Also what copying into another structure, as `dataclasses.asdict`, goes by.
        raise TypeError("A secret is neither copied nor written by accident.")


def digest_of(text: str) -> bytes:
    """Return the SHA-256 of a secret's text.

    One pass suffices: tokens and codes are random, so nobody can try them all.
    """
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def is_among(digest: bytes, digests: list[bytes]) -> bool:
    """Say whether one of `digests` is `digest`, in a time that does not tell which."""
    found = False
    for each in digests:
        found |= hmac.compare_digest(each, digest)
    return found
