"""Certificates that nobody but a test trusts."""

from __future__ import annotations

import datetime
import hashlib
import ssl
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate in files."""

    path: Path
    key_path: Path
    pin: str

    def shown(self) -> ssl.SSLContext:
        """Return the context of a listener that shows it."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path, self.key_path)
        return context

    def shown_to(self, other: Certificate) -> ssl.SSLContext:
        """Return one that shows it, and asks for `other`."""
        context = self.shown()
        context.load_verify_locations(other.path)
        context.verify_mode = ssl.CERT_OPTIONAL
        return context


def unchecked() -> ssl.SSLContext:
    """Return the context of a caller that trusts its pin alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def make(folder: Path) -> Certificate:
    """Make a certificate for loopback."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "atoll")])
    now = datetime.datetime.now(datetime.UTC)
    loopback = x509.IPAddress(ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([loopback]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path, key_path = folder / "certificate.pem", folder / "key.pem"
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    der = made.public_bytes(serialization.Encoding.DER)
    return Certificate(path, key_path, hashlib.sha256(der).hexdigest())
