"""TLS contexts of a coordinator and of its callers, and refusals made readable.

A coordinator signs its own certificate, so no authority vouches for it: the caller has
its fingerprint, the *pin*, from the invite. TLS proves that the other side holds the
certificate's key; the pin proves that it is the right certificate. So a pinned context
checks neither names nor authorities, and is safe only with `check_pin` after the
handshake and before the first byte; `secured` does both.

A coordinator that requires certificates refuses with a TLS alert, and from version 1.3
on only after the caller's handshake: as the response to its first request. The layer
below HTTP reports that as a broken connection; `certificate_refusal` finds the reason.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

from atoll.errors import Refused, Unreachable, UsageError
from atoll.security.private_files import translated

CERTIFICATE = "certificate.pem"
KEY = "certificate.key"

_PIN = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


def fingerprint(der: bytes) -> str:
    """Return the fingerprint of a certificate: `sha256:` and 64 digits."""
    return "sha256:" + hashlib.sha256(der).hexdigest()


def parse_pin(text: str) -> str:
    """Return a pin in its one spelling; colons between pairs and capitals are fine.

    Raises:
        UsageError: it is not a pin.
    """
    lowered = text.strip().lower() if len(text) <= 128 else ""
    head, _, rest = lowered.partition(":")
    digits = rest if head == "sha256" else lowered
    match = _PIN.fullmatch(digits.replace(":", ""))
    if not match:
        raise UsageError(
            "The pin is not a fingerprint: 'sha256:' and 64 hexadecimal digits. Copy "
            "it, or the whole invite, again."
        )
    return f"sha256:{match[1]}"


def listening_context(
    directory: Path, *, require_island_certificates: Path | None = None
) -> ssl.SSLContext:
    """Return the TLS context of the coordinator whose certificate is in `directory`.

    Args:
        directory: The directory of `certificates.coordinator_certificate`.
        require_island_certificates: The file of an authority; a client without a
            certificate from it gets no response, not even to `/health`.

    Raises:
        UsageError: a file is absent, unreadable, or the key is another certificate's.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    _secure(context, directory / CERTIFICATE, directory / KEY)
    if require_island_certificates is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, require_island_certificates)
    return context


def calling_context(
    pin: str | None,
    *,
    certificate: Path | None = None,
    key: Path | None = None,
    authority: Path | None = None,
) -> ssl.SSLContext:
    """Return the TLS context of a client; with a pin, `check_pin` must follow.

    Without a pin the coordinator needs a certificate for its name from an authority
    that this machine trusts, or from `authority`.

    Args:
        pin: The fingerprint that the coordinator's certificate must have.
        certificate: The client certificate, if the coordinator requires one.
        key: That certificate's key; it may be in the same file, and is then left out.
        authority: The file of an authority to trust in place of the machine's.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if pin is not None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif authority is not None:
        _trust(context, authority)
    else:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    _secure(context, certificate, key)
    return context


def check_pin(der: bytes | None, pin: str | None) -> None:
    """Return if the certificate that the other side showed is the pinned one.

    Raises:
        Refused: it is another one, or none was shown. Send nothing secret.
    """
    if pin is None:
        return
    shown = fingerprint(der) if der else "no certificate"
    if not hmac.compare_digest(shown, parse_pin(pin)):
        raise Refused(
            f"The coordinator showed {shown}, but {parse_pin(pin)} is pinned: it has a "
            "new certificate, or another answers at its address. Nothing was sent. "
            "Ask its operator for a new invite."
        )


def secured(
    raw: socket.socket, context: ssl.SSLContext, *, host: str, pin: str | None
) -> ssl.SSLSocket:
    """Return TLS over `raw`, after the handshake and the pin's check.

    On an error `raw` is closed, and nothing but the handshake was sent.

    Raises:
        Refused: the certificate is not the pinned one, or no authority vouches for it.
        Unreachable: the other side ended the handshake, or speaks no TLS. A
            coordinator that requires a client certificate may close as late as at
            the first read, with an `ssl.SSLError`: TLS 1.3 allows it.
    """
    if context.verify_mode is ssl.CERT_NONE and pin is None:
        raw.close()
        raise UsageError("This context trusts anyone. Give the pin it was made for.")
    try:
        line = context.wrap_socket(raw, server_hostname=host)
    except ssl.SSLCertVerificationError as exc:
        raw.close()
        raise Refused(
            f"{host}'s certificate is not trusted: {exc.verify_message}. Use its "
            "invite, which pins it."
        ) from exc
    except OSError as exc:
        raw.close()
        raise Unreachable(f"No TLS with {host}: {exc}. Is it https there?") from exc
    try:
        check_pin(line.getpeercert(binary_form=True), pin)
    except BaseException:
        line.close()
        raise
    return line


def _secure(
    context: ssl.SSLContext, certificate: Path | None, key: Path | None
) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if certificate is None and key is None:
        return
    if certificate is None:
        raise UsageError(f"{key} is the key of no certificate. Give that file too.")
    for path in (certificate, key or certificate):
        _require_file(path)
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as exc:
        raise UsageError(_unfit_pair(certificate, key, exc)) from exc


def _unfit_pair(certificate: Path, key: Path | None, exc: ssl.SSLError) -> str:
    reason = exc.reason or "unreadable"
    if key is None:
        return (
            f"{certificate} does not hold a certificate with its key ({reason}). Give "
            "the file that `atoll certify` wrote, or the key's own file too."
        )
    return (
        f"{key} is not the key of {certificate}, or one of them is damaged ({reason}). "
        "Put both back from where they came."
    )


def _trust(context: ssl.SSLContext, authority: Path) -> None:
    _require_file(authority)
    try:
        context.load_verify_locations(cafile=authority)
    except ssl.SSLError as exc:
        raise UsageError(
            f"{authority} holds no certificate of an authority in PEM. Give that file."
        ) from exc


def _require_file(path: Path) -> None:
    with translated(path):
        path.open("rb").close()


def _no_password() -> str:
    # Otherwise OpenSSL would prompt for a password at the terminal.
    raise UsageError("The key is encrypted. Give one without a password, mode 0600.")


_NONE_SHOWN = {"TLSV13_ALERT_CERTIFICATE_REQUIRED"}
_REFUSED_ALERTS = {
    "SSLV3_ALERT_BAD_CERTIFICATE",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED",
    "SSLV3_ALERT_CERTIFICATE_REVOKED",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
    "TLSV1_ALERT_DECRYPT_ERROR",
    "TLSV1_ALERT_UNKNOWN_CA",
}
_GET_ONE = (
    "Ask its operator for one (`atoll certify RUN NAME`), then join with --certificate "
    "FILE, or set ATOLL_CERTIFICATE=FILE."
)


def certificate_refusal(
    exc: BaseException, *, address: str, shown: Path | None = None
) -> Refused | None:
    """Return the error of a call that failed because of the client certificate.

    Args:
        exc: The exception; its causes are searched.
        address: The address of the call.
        shown: The file of the client certificate, if there was one.
    """
    reasons = {
        cause.reason for cause in _causes(exc) if isinstance(cause, ssl.SSLError)
    }
    if reasons & _NONE_SHOWN:
        return Refused(
            f"{address} asks for a certificate, and none was shown. {_GET_ONE}"
        )
    if reasons & _REFUSED_ALERTS:
        return Refused(
            f"{address} refuses the certificate{f' in {shown}' if shown else ''}: "
            f"another authority has signed it, or it is not valid now. {_GET_ONE}"
        )
    return None


def _causes(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        exc = exc.__cause__
