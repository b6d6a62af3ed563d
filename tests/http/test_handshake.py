"""Handshakes that are refused: why is told, here and to whoever called."""

from __future__ import annotations

import queue
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.errors import Unreachable
from atoll.http import HandshakeFault, HttpClient, Listener
from tests.http.certificates import Certificate, make, unchecked
from tests.http.loopback import PATIENCE_S, Dialogue, head, listening

Told = queue.SimpleQueue[tuple[str, HandshakeFault]]

OLD_HELLO = bytes.fromhex(
    # A record, and in it a hello, of TLS 1.0 with one suite of its time.
    "16 0301 002d 01 000029 0301" + 32 * "aa" + "00 0002 002f 01 00"
)


@pytest.fixture
def told() -> Told:
    return queue.SimpleQueue()


@contextmanager
def refusing(
    certificate: Certificate, other: Certificate, told: Told
) -> Iterator[Listener]:
    """Listen for whoever shows a certificate of `other`; refusals go to `told`."""
    tls = certificate.shown_to(other)
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    hook = lambda address, why: told.put((address, why))  # noqa: E731
    with listening(tls=tls, on_refused_handshake=hook) as listener:
        yield listener


def called(listener: Listener, tls: ssl.SSLContext) -> str:
    """Return what a caller makes of being refused."""
    caller = HttpClient(
        *listener.address, timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S, tls=tls
    )
    try:
        with pytest.raises(Unreachable) as caught:
            caller.call("PUT", "/", body=b"x" * 200_000)
    finally:
        caller.close()
    return str(caught.value)


@pytest.mark.parametrize("attempt", range(5))
def test_who_shows_no_certificate_reads_why(
    certificate: Certificate, tmp_path: Path, told: Told, attempt: int
) -> None:
    """The alert arrives although a request was sent after the handshake, each time.

    A connection that is closed with bytes unread is reset, and a reset destroys what
    was said before it: so the connection lingers.
    """
    with refusing(certificate, make(tmp_path), told) as listener:
        said = called(listener, unchecked())

        assert "certificate required" in said
        assert told.get(timeout=PATIENCE_S) == (
            "127.0.0.1",
            HandshakeFault.NO_CERTIFICATE,
        )


def test_another_authoritys_certificate_is_refused(
    certificate: Certificate, tmp_path: Path, told: Told
) -> None:
    """Both sides know that it was the certificate."""
    with refusing(certificate, make(tmp_path), told) as listener:
        tls = unchecked()
        tls.load_cert_chain(certificate.path, certificate.key_path)
        said = called(listener, tls)

        assert "unknown ca" in said or "certificate" in said
        assert told.get(timeout=PATIENCE_S)[1] is HandshakeFault.WRONG_CERTIFICATE


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (head("GET /"), HandshakeFault.NO_TLS),
        (b"SSH-2.0-OpenSSH_9.6\r\n", HandshakeFault.NO_TLS),
        (OLD_HELLO, HandshakeFault.OLD_TLS),
        (b"\x16\x03\x03\xff\xff" + 70_000 * b"x", HandshakeFault.BAD_TLS),
    ],
)
def test_what_is_no_handshake_is_told(
    certificate: Certificate,
    tmp_path: Path,
    told: Told,
    words: bytes,
    why: HandshakeFault,
) -> None:
    """Plain HTTP, other protocols, old versions and noise each have their word."""
    with (
        refusing(certificate, make(tmp_path), told) as listener,
        Dialogue(listener.address) as dialogue,
    ):
        dialogue.say(words)

        assert told.get(timeout=PATIENCE_S) == ("127.0.0.1", why)


def test_who_goes_away_was_not_refused(
    certificate: Certificate, tmp_path: Path, told: Told
) -> None:
    """A check that the port is open, a reset, and a caller that distrusts us."""
    with refusing(certificate, make(tmp_path), told) as listener:
        Dialogue(listener.address).close()
        with Dialogue(listener.address) as cut:
            cut.say(OLD_HELLO[:20])
            reset = struct.pack("ii", 1, 0)
            cut.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        with pytest.raises(ssl.SSLError):
            Dialogue(listener.address, _distrustful())
        with Dialogue(listener.address) as last:
            last.say(head("GET /"))
            assert last.hear().status == 400

        assert told.get(timeout=PATIENCE_S)[1] is HandshakeFault.NO_TLS
        assert told.empty()


def _distrustful() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    return context
