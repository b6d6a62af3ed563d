"""The coordinator's certificate and key: made on its first start, loaded ever after.

Rule 1: the key is written before the certificate, so a crash between the two leaves a
key without a certificate, for which one is then made. Nobody has pinned it yet.
Rule 2: what is there is never made anew by itself: every island has pinned it.
Rule 3: a certificate from an authority may be put in its place; then no pin is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from atoll.errors import CorruptError, NoSuchFile, UsageError
from atoll.security.contexts import CERTIFICATE, KEY, fingerprint
from atoll.security.issuing import (
    IssuingKey,
    coordinator_pem,
    new_key,
    parse_certificate,
    parse_key,
)
from atoll.security.private import make_private, read_private, translated

MAX_PEM_BYTES = 2**18


@dataclass(frozen=True)
class Certificate:
    """What the coordinator shows to whoever calls."""

    directory: Path
    pin: str
    """The fingerprint to pin."""

    is_self_signed: bool
    """Whether callers need the pin, because no authority vouches for it."""

    expires_unix_s: float


def coordinator_certificate(
    directory: Path, *, hosts: Sequence[str], unix_s: float
) -> Certificate:
    """Return the certificate in `directory`, made with its key on the first call.

    Two processes that ask at the same time get the same one. `hosts` are names and
    addresses that the coordinator is reached by; they matter to a new one only.

    Raises:
        UsageError: it has expired, its key is another's, absent (`NoSuchFile`) or
            readable by others.
        CorruptError: a file holds no certificate or no key.
        DiskError: the disk failed.
    """
    if not (directory / CERTIFICATE).exists():
        make_private(directory / KEY, new_key())
        key = read_key(directory / KEY, remedy=_anew(directory))
        pem = coordinator_pem(key, hosts=hosts, unix_s=unix_s)
        make_private(directory / CERTIFICATE, pem)
    return load_certificate(directory, unix_s=unix_s)


def load_certificate(directory: Path, *, unix_s: float) -> Certificate:
    """Return the certificate in `directory`; errors as `coordinator_certificate`."""
    certificate = read_certificate(directory / CERTIFICATE, remedy=_anew(directory))
    key = read_key(directory / KEY, remedy=_anew(directory))
    if key.public_key() != certificate.public_key():
        raise UsageError(
            f"{directory / KEY} is not the key of {directory / CERTIFICATE}. "
            f"{_anew(directory)}"
        )
    _require_valid(directory, certificate, unix_s)
    return Certificate(
        directory=directory,
        pin=fingerprint(certificate.public_bytes(Encoding.DER)),
        is_self_signed=certificate.issuer == certificate.subject,
        expires_unix_s=certificate.not_valid_after_utc.timestamp(),
    )


def read_certificate(path: Path, *, remedy: str) -> x509.Certificate:
    """Return the first certificate of a file; what it shows is no secret."""
    with translated(path), path.open("rb") as file:
        pem = file.read(MAX_PEM_BYTES)
    try:
        return parse_certificate(pem)
    except ValueError as exc:
        raise CorruptError(f"{path} holds no certificate in PEM. {remedy}") from exc


def read_key(path: Path, *, remedy: str) -> IssuingKey:
    """Return the key of a file that only this user may read."""
    try:
        pem = read_private(path, what="key", max_bytes=MAX_PEM_BYTES)
    except NoSuchFile as exc:
        raise NoSuchFile(
            f"{path}, a certificate's key, is not there. {remedy}"
        ) from exc
    try:
        return parse_key(pem)
    except ValueError:
        # Without its cause, which might quote what it could not read.
        raise CorruptError(
            f"{path} holds no key in PEM that is without a password. {remedy}"
        ) from None


def _require_valid(
    directory: Path, certificate: x509.Certificate, unix_s: float
) -> None:
    now = datetime.fromtimestamp(unix_s, UTC)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > last:
        raise UsageError(
            f"{directory / CERTIFICATE} expired on {last:%Y-%m-%d}. {_anew(directory)}"
        )
    if now < first:
        raise UsageError(
            f"{directory / CERTIFICATE} is valid from {first:%Y-%m-%d} on, and it is "
            f"{now:%Y-%m-%d} by this machine's clock. Set the clock."
        )


def _anew(directory: Path) -> str:
    return (
        f"Put both files back from a copy, or remove {CERTIFICATE} and {KEY} from "
        f"{directory} to have new ones made; every island then needs a new invite."
    )
