"""Mutual TLS without other tools: an authority that signs islands' certificates.

The coordinator is given `authority.pem` and answers nobody else; each island is given
its own certificate and key. `authority.key` signs further ones and is needed nowhere
else: keep it off the machines that train.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atoll.errors import UsageError
from atoll.security.certificate import read_certificate, read_key
from atoll.security.issuing import (
    Issuer,
    authority_pem,
    island_pem,
    new_key,
    parse_key,
)
from atoll.security.private import make_private

AUTHORITY = "authority.pem"
AUTHORITY_KEY = "authority.key"

_PUT_BACK = "Put it back from a copy, or make an authority in another directory."


@dataclass(frozen=True)
class IslandCertificate:
    """The two files that an island shows itself by."""

    certificate: Path
    key: Path


def make_authority(directory: Path, *, unix_s: float) -> Path:
    """Return the authority's certificate, made with its key if absent.

    Raises:
        UsageError: others may read its key.
        CorruptError: a file holds no certificate or no key.
        DiskError: the disk failed.
    """
    if not (directory / AUTHORITY).exists():
        make_private(directory / AUTHORITY_KEY, new_key())
        key = read_key(directory / AUTHORITY_KEY, remedy=_PUT_BACK)
        make_private(directory / AUTHORITY, authority_pem(key, unix_s=unix_s))
    return directory / AUTHORITY


def issue_island_certificate(
    directory: Path, name: str, *, into: Path, unix_s: float
) -> IslandCertificate:
    """Sign a new certificate for an island, and put it and its key into `into`.

    Raises:
        UsageError: `into` holds one already, or the name cannot stand in one.
        NoSuchFile: there is no authority in `directory`.
        CorruptError: the authority's files hold no certificate or no key.
    """
    issuer = _issuer(directory)
    made = IslandCertificate(into / "island.pem", into / "island.key")
    key = new_key()
    pem = island_pem(parse_key(key), name=name, issuer=issuer, unix_s=unix_s)
    for path, data in ((made.key, key), (made.certificate, pem)):
        if not make_private(path, data):
            raise UsageError(
                f"{path} exists, and is never written twice. Choose another directory."
            )
    return made


def _issuer(directory: Path) -> Issuer:
    return Issuer(
        certificate=read_certificate(directory / AUTHORITY, remedy=_PUT_BACK),
        key=read_key(directory / AUTHORITY_KEY, remedy=_PUT_BACK),
    )
