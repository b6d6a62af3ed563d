"""A broken call that was a refusal of the caller's certificate is called one."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from atoll.errors import Unreachable
from atoll.security import certificate_refusal

FILE = Path("tokyo-1.pem")
URL = "https://host.example:8443"


def broken(reason: str | None) -> Unreachable:
    """Return what a caller raises when TLS ended its line."""
    cause = ssl.SSLError(1, "an alert")
    cause.reason = reason  # type: ignore[assignment] # as OpenSSL sets it
    middle, error = RuntimeError(), Unreachable("gone")
    middle.__cause__, error.__cause__ = cause, middle
    return error


def test_none_was_shown() -> None:
    """Who has no certificate learns how to get one, and how to show it."""
    error = broken("TLSV13_ALERT_CERTIFICATE_REQUIRED")
    said = str(certificate_refusal(error, address=URL, shown=None))

    assert f"{URL} asks for a certificate, and none was shown" in said
    assert "atoll certify RUN NAME" in said
    assert "ATOLL_CERTIFICATE=FILE" in said


@pytest.mark.parametrize(
    "reason", ["TLSV1_ALERT_UNKNOWN_CA", "SSLV3_ALERT_CERTIFICATE_EXPIRED"]
)
def test_the_wrong_one_was_shown(reason: str) -> None:
    """The file is named."""
    said = str(certificate_refusal(broken(reason), address=URL, shown=FILE))

    assert "refuses the certificate in tokyo-1.pem" in said


def test_any_other_end_is_what_it_was() -> None:
    """A line that broke for another reason is not called a refusal."""
    for error in (broken("UNEXPECTED_EOF_WHILE_READING"), broken(None), OSError()):
        assert certificate_refusal(error, address=URL, shown=FILE) is None
