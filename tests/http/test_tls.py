"""TLS: the same requests, with handshakes that cost no thread while they wait."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from atoll.http import Request, Response, as_json
from tests.http.certificates import Certificate, make, unchecked
from tests.http.loopback import Dialogue, head, hello, listening, talking


def test_requests_on_one_encrypted_connection(certificate: Certificate) -> None:
    """Pipelined, small and large requests are served as without TLS."""

    def echo(request: Request) -> Response:
        return Response(body=request.body.read(2**30))

    with talking(echo, certificate=certificate) as dialogue:
        for size in (0, 5, 20_000, 65_537, 3_000_000):
            assert dialogue.ask("PUT /", b"a" * size).body == b"a" * size
        piped = head("PUT /", content_length="9000") + b"b" * 9000
        dialogue.say(piped * 20)
        assert {dialogue.hear().body for _ in range(20)} == {b"b" * 9000}


def test_who_does_not_speak_tls_is_not_served(certificate: Certificate) -> None:
    """Plain words are told of https; silence ends after its time; others go on."""
    with (
        listening(tls=certificate.shown(), handshake_s=1.0) as listener,
        Dialogue(listener.address) as plain,
        Dialogue(listener.address) as silent,
    ):
        plain.say(head("GET /"))
        heard = plain.hear()
        assert (heard.status, heard.error) == (400, "no_tls")
        assert b"Use https://" in heard.body
        assert plain.hear_end() == b""

        assert silent.hear_end() == b""
        with Dialogue(listener.address, unchecked()) as dialogue:
            assert dialogue.ask("GET /").body == b"hello"


def test_silent_handshakes_hold_no_thread(certificate: Certificate) -> None:
    """More unfinished handshakes than threads: another one is made."""
    with listening(tls=certificate.shown(), small_threads=1) as listener:
        crowd = [Dialogue(listener.address) for _ in range(5)]
        for each in crowd:
            each.say(b"\x16\x03\x01")
        with Dialogue(listener.address, unchecked()) as dialogue:
            assert dialogue.ask("GET /").body == b"hello"
        for each in crowd:
            each.close()


@pytest.mark.parametrize("shows", [True, False])
def test_a_handler_sees_the_certificate_of_who_asks(
    shows: bool, certificate: Certificate, tmp_path: Path
) -> None:
    """Mutual TLS: what was shown and verified reaches the handler; nothing is None."""
    other = make(tmp_path)

    def handle(request: Request) -> Response:
        return as_json(request.certificate is not None)

    trusted = unchecked()
    if shows:
        trusted.load_cert_chain(other.path, other.key_path)
    with (
        listening(handle, tls=certificate.shown_to(other)) as listener,
        Dialogue(listener.address, trusted) as dialogue,
    ):
        assert dialogue.ask("GET /").body == (b"true" if shows else b"false")


def test_an_old_version_of_tls_is_refused(certificate: Certificate) -> None:
    """What the context does not allow does not get through the handshake."""
    shown = certificate.shown()
    shown.minimum_version = ssl.TLSVersion.TLSv1_3
    trusted = unchecked()
    trusted.maximum_version = ssl.TLSVersion.TLSv1_2
    with listening(hello, tls=shown) as listener, pytest.raises(ssl.SSLError):
        Dialogue(listener.address, trusted)
