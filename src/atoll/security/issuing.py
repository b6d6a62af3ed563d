"""Certificates as values: keys made, certificates written and read. No files here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

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

from atoll.errors import UsageError
from atoll.security.addresses import ip_of, spelt

VALIDITY = timedelta(days=3653)
"""Ten years: longer than any run, so that no run ends by its certificate."""

CLOCK_SKEW = timedelta(days=1)
"""A caller whose clock is behind still finds the certificate valid."""

MAX_COMMON_NAME = 64

IssuingKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
"""Ours are of the first kind; an authority's certificate may have either."""


@dataclass(frozen=True)
class Issuer:
    """Who signs: a certificate and its key."""

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
    """Return each host once; every interface (0.0.0.0) is an address of nobody."""
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
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    above = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    limits = x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None)
    draft = draft.add_extension(own, critical=False).add_extension(
        above, critical=False
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
