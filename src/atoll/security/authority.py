"""Mutual TLS without other tools: an authority that signs islands' certificates.

The coordinator is given `authority.pem` and answers nobody else; each machine that
trains is given one file with a certificate and its key. `authority.key` signs further
ones and is needed nowhere else: keep it off the machines that train.
"""

from __future__ import annotations

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
) -> Path:
    """Return the new file NAME.pem in `into`: a certificate for an island and its key.

    Raises:
        UsageError: it is there already, or the name cannot stand in one.
        NoSuchFile: there is no authority in `directory`.
        CorruptError: the authority's files hold no certificate or no key.
    """
    path = into / f"{_file_name(name)}.pem"
    key = new_key()
    pem = island_pem(
        parse_key(key), name=name, issuer=_issuer(directory), unix_s=unix_s
    )
    if not make_private(path, key + pem):
        raise UsageError(
            f"{path} exists, and is never written twice. Choose another name or "
            "directory, or remove it if nobody uses it."
        )
    return path


def _file_name(name: str) -> str:
    if "/" in name or name.startswith((".", "-")):
        raise UsageError(
            f"{name[:64]!r} names no file. Choose a name without '/' that begins with "
            "a letter or a digit."
        )
    return name


def _issuer(directory: Path) -> Issuer:
    return Issuer(
        certificate=read_certificate(directory / AUTHORITY, remedy=_PUT_BACK),
        key=read_key(directory / AUTHORITY_KEY, remedy=_PUT_BACK),
    )
