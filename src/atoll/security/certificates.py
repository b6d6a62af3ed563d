"""Certificates: the coordinator's own, and an authority for mutual TLS.

The coordinator's certificate and key are made on its first start, and loaded from then
on.
Rule 1: the key is written before the certificate, so a crash between the two leaves a
key without a certificate, for which one is then made. No island has pinned it yet.
Rule 2: an existing certificate is never replaced automatically: every island has pinned
it.
Rule 3: a certificate from an authority may be put in its place; then no pin is needed.

For mutual TLS without other tools an authority signs the islands' certificates. The
coordinator gets `authority.pem` and answers only their holders; each machine that
trains gets one file with a certificate and its key. `authority.key` signs further ones
and is needed nowhere else: keep it off the machines that train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.errors import CorruptError, NoSuchFile, UsageError
from atoll.security.addresses import ip_of, spelt
from atoll.security.private_files import make_private, read_private, translated
from atoll.security.tls import CERTIFICATE, KEY, fingerprint

MAX_PEM_BYTES = 2**18


@dataclass(frozen=True)
class Certificate:
    """The certificate that the coordinator shows to its callers."""

    directory: Path
    pin: str
    """The fingerprint to pin."""


def coordinator_certificate(
    directory: Path, *, hosts: Sequence[str], unix_s: float
) -> Certificate:
    """Return the certificate in `directory`, made with its key on the first call.

    Concurrent processes get the same one. `hosts` are the names and addresses of the
    coordinator; they are used only for a new certificate.

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
    )


def read_certificate(path: Path, *, remedy: str) -> x509.Certificate:
    """Return the first certificate of a file; its content is not secret."""
    with translated(path), path.open("rb") as file:
        pem = file.read(MAX_PEM_BYTES)
    try:
        return parse_certificate(pem)
    except ValueError as exc:
        raise CorruptError(f"{path} holds no certificate in PEM. {remedy}") from exc


def read_key(path: Path, *, remedy: str) -> IssuingKey:
    """Return the key of a file that only this user may read."""
    try:
        pem = read_private(path, content="key", max_bytes=MAX_PEM_BYTES)
    except NoSuchFile as exc:
        raise NoSuchFile(
            f"{path}, a certificate's key, does not exist. {remedy}"
        ) from exc
    try:
        return parse_key(pem)
    except ValueError:
        # Without its cause, which might quote the content.
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
        UsageError: the file exists already, or the name is not allowed in one.
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
            "directory, or remove it if it is not in use."
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


VALIDITY = timedelta(days=3653)
"""Ten years: longer than any run, so that no run ends by its certificate."""

CLOCK_SKEW = timedelta(days=1)
"""A caller whose clock is behind still finds the certificate valid."""

MAX_COMMON_NAME = 64

IssuingKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
"""Ours are of the first kind; an authority's certificate may have either."""


@dataclass(frozen=True)
class Issuer:
    """The signer: a certificate and its key."""

    certificate: x509.Certificate
    key: IssuingKey


def new_key() -> bytes:
    """Return a new P-256 key in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def coordinator_pem(key: IssuingKey, *, hosts: Sequence[str], unix_s: float) -> bytes:
    """Return a certificate for `hosts` and this machine, signed by its own key."""
    names = x509.SubjectAlternativeName(_names([*hosts, *_THIS_MACHINE]))
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    subject = _subject("atoll coordinator")
    draft = _draft(subject, subject, key, unix_s).add_extension(names, critical=False)
    return _signed(draft.add_extension(usage, critical=False), key, key, is_ca=False)


def authority_pem(key: IssuingKey, *, unix_s: float) -> bytes:
    """Return the certificate of an authority, signed by its own key."""
    subject = _subject("atoll islands' authority")
    return _signed(_draft(subject, subject, key, unix_s), key, key, is_ca=True)


def island_pem(key: IssuingKey, *, name: str, issuer: Issuer, unix_s: float) -> bytes:
    """Return an island's certificate, signed by an authority."""
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    signer = issuer.certificate.subject
    draft = _draft(_subject(name), signer, key, unix_s)
    return _signed(
        draft.add_extension(usage, critical=False), key, issuer.key, is_ca=False
    )


def parse_certificate(pem: bytes) -> x509.Certificate:
    """Return the first certificate of a PEM file; ValueError if there is none."""
    return x509.load_pem_x509_certificate(pem)


def parse_key(pem: bytes) -> IssuingKey:
    """Return a private key that can sign certificates; ValueError if it is none."""
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError as exc:  # it has a password
        raise ValueError("encrypted") from exc
    if not isinstance(key, IssuingKey):
        raise ValueError("neither EC nor RSA")
    return key


_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


def _names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Return each host once; leave 0.0.0.0 (every interface) out."""
    names: dict[str, x509.GeneralName] = {}
    for host in map(spelt, filter(None, hosts)):
        ip = ip_of(host)
        if ip is None:
            names[host] = x509.DNSName(host)
        elif not ip.is_unspecified:
            names[host] = x509.IPAddress(ip)
    return list(names.values())


def _subject(common_name: str) -> x509.Name:
    if not 0 < len(common_name) <= MAX_COMMON_NAME or not common_name.isprintable():
        raise UsageError(
            f"{common_name[:MAX_COMMON_NAME]!r} cannot stand in a certificate: a name "
            f"has 1 to {MAX_COMMON_NAME} printable characters there. Choose another."
        )
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _draft(
    subject: x509.Name, issuer: x509.Name, key: IssuingKey, unix_s: float
) -> x509.CertificateBuilder:
    now = datetime.fromtimestamp(unix_s, UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + VALIDITY)
    )


def _signed(
    draft: x509.CertificateBuilder, key: IssuingKey, signer: IssuingKey, *, is_ca: bool
) -> bytes:
    own_key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    signer_key_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(
        signer.public_key()
    )
    limits = x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None)
    draft = draft.add_extension(own_key_id, critical=False).add_extension(
        signer_key_id, critical=False
    )
    draft = draft.add_extension(limits, critical=True)
    draft = draft.add_extension(_usage(is_ca), critical=True)
    return draft.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM)


def _usage(is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
