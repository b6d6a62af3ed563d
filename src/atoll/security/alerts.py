"""What a coordinator that asks for certificates says to who has none, made readable.

TLS says no with an alert, and from version 1.3 on only after the caller's handshake: as
the answer to its first request. What is below HTTP calls that a broken line, so whoever
asks looks here for what broke it.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

from atoll.errors import Refused

_NONE_SHOWN = {"TLSV13_ALERT_CERTIFICATE_REQUIRED"}
_NOT_TAKEN = {
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
    exc: BaseException, *, where: str, shown: Path | None = None
) -> Refused | None:
    """Return what a failed call means if it failed for the caller's certificate.

    Args:
        exc: What was raised; what it was raised from is looked at.
        where: Whom the call was for.
        shown: The file of the certificate that was shown, if that is known.
    """
    reasons = {each.reason for each in _causes(exc) if isinstance(each, ssl.SSLError)}
    if reasons & _NONE_SHOWN:
        return Refused(
            f"{where} asks for a certificate, and none was shown. {_GET_ONE}"
        )
    if reasons & _NOT_TAKEN:
        return Refused(
            f"{where} does not take the certificate{f' in {shown}' if shown else ''}: "
            f"another authority has signed it, or it is not valid now. {_GET_ONE}"
        )
    return None


def _causes(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        exc = exc.__cause__
