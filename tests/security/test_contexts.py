"""Real handshakes over pairs of sockets: pins, authorities, islands' certificates."""

from __future__ import annotations

import socket
import ssl
import stat
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
)

from atoll.errors import NoSuchFile, Refused, Unreachable, UsageError
from atoll.security import (
    calling_context,
    check_pin,
    fingerprint,
    listening_context,
    secured,
)
from atoll.security.certificates import (
    Certificate,
    coordinator_certificate,
    issue_island_certificate,
    make_authority,
)

OTHER_PIN = "sha256:" + "00" * 32


@pytest.fixture
def shown(tmp_path: Path) -> Certificate:
    """Return a certificate that is valid now: TLS itself looks at the clock."""
    directory = tmp_path / "tls"
    return coordinator_certificate(directory, hosts=[], unix_s=time.time())


def answer(raw: socket.socket, context: ssl.SSLContext) -> bytes:
    """Shake hands as a coordinator does, and return what was said, after a reply."""
    try:
        with context.wrap_socket(raw, server_side=True) as line:
            said = line.recv(100)
            if said:
                line.sendall(b"welcome")
            return said
    except (ConnectionError, ssl.SSLEOFError):
        return b""  # the caller left, perhaps before the handshake's last message


def talk(line: ssl.SSLSocket) -> bytes:
    """Say hello and return the reply."""
    line.sendall(b"hello")
    return line.recv(100)


@contextmanager
def calling(context: ssl.SSLContext) -> Iterator[tuple[socket.socket, Future[bytes]]]:
    """Give a socket to somebody who answers in `context`, and what they will hear."""
    here, there = socket.socketpair()
    here.settimeout(30)
    there.settimeout(30)
    with here, there, ThreadPoolExecutor(1) as pool:
        yield here, pool.submit(answer, there, context)


def test_the_pinned_coordinator_is_talked_to(shown: Certificate) -> None:
    """Whatever it is called, over TLS 1.2 at least."""
    context = calling_context(shown.pin)
    with calling(listening_context(shown.directory)) as (raw, heard):
        with secured(raw, context, host="any.example", pin=shown.pin) as line:
            reply = talk(line)
            version = line.version()

        assert heard.result() == b"hello"
    assert reply == b"welcome"
    assert version in {"TLSv1.2", "TLSv1.3"}


def test_another_certificate_hears_nothing(shown: Certificate) -> None:
    """The wrong pin ends the call before its first byte, and both pins are named."""
    context = calling_context(OTHER_PIN)
    with calling(listening_context(shown.directory)) as (raw, heard):
        with pytest.raises(Refused, match=rf"{shown.pin}, but {OTHER_PIN} is pinned"):
            secured(raw, context, host="localhost", pin=OTHER_PIN)

        assert heard.result() == b""


def test_a_context_that_trusts_anyone_needs_its_pin(shown: Certificate) -> None:
    """Forgetting the check is an error, not an open door."""
    here, there = socket.socketpair()
    with here, there, pytest.raises(UsageError, match="trusts anyone"):
        secured(here, calling_context(shown.pin), host="localhost", pin=None)


def test_no_certificate_is_not_the_pinned_one() -> None:
    """Nothing shown, or something else, is refused; the right one is not."""
    with pytest.raises(Refused, match="showed no certificate"):
        check_pin(None, OTHER_PIN)
    with pytest.raises(Refused, match="Ask its operator for a new invite"):
        check_pin(b"", OTHER_PIN)
    check_pin(b"der", fingerprint(b"der"))
    check_pin(b"der", None)


def test_without_a_pin_an_authority_must_vouch(shown: Certificate) -> None:
    """A certificate that signed itself is refused, with a way out."""
    context = calling_context(None)
    with calling(listening_context(shown.directory)) as (raw, heard):
        with pytest.raises(Refused, match=r"not trusted: self.signed.*Use its invite"):
            secured(raw, context, host="localhost", pin=None)

        with pytest.raises(ssl.SSLError):
            heard.result()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_a_trusted_certificate_is_checked_by_name(
    shown: Certificate, host: str
) -> None:
    """With an authority in place of a pin, the certificate must be for that host."""
    context = calling_context(None, authority=shown.directory / "certificate.pem")
    with calling(listening_context(shown.directory)) as (raw, heard):
        with secured(raw, context, host=host, pin=None) as line:
            assert talk(line) == b"welcome"
        assert heard.result() == b"hello"
    with calling(listening_context(shown.directory)) as (raw, heard):
        with pytest.raises(Refused, match="not trusted: Hostname mismatch"):
            secured(raw, context, host="other.example", pin=None)
        with pytest.raises(ssl.SSLError):
            heard.result()


def test_who_speaks_no_tls_is_unreachable(shown: Certificate) -> None:
    """The usual mistake, https for http, is named; a closed line too."""
    for reply in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b""):
        here, there = socket.socketpair()
        with here, there:
            there.sendall(reply)
            there.shutdown(socket.SHUT_WR)
            context = calling_context(shown.pin)
            with pytest.raises(Unreachable, match="Is it https there"):
                secured(here, context, host="localhost", pin=shown.pin)


def test_old_versions_are_not_spoken(shown: Certificate) -> None:
    """On neither side."""
    contexts = [listening_context(shown.directory), calling_context(shown.pin)]
    contexts.append(calling_context(None))

    assert {each.minimum_version for each in contexts} == {ssl.TLSVersion.TLSv1_2}


def test_islands_show_certificates_where_they_must(
    shown: Certificate, tmp_path: Path
) -> None:
    """One that the authority signed is let in; none, and another's, are not."""
    now_s = time.time()
    ours = make_authority(tmp_path / "ours", unix_s=now_s)
    make_authority(tmp_path / "theirs", unix_s=now_s)
    issued = {
        whose: issue_island_certificate(
            tmp_path / whose, "tokyo-1", into=tmp_path / f"{whose}-1", unix_s=now_s
        )
        for whose in ("ours", "theirs")
    }
    strict = listening_context(shown.directory, require_island_certificates=ours)

    def heard_from(whose: str | None) -> bytes:
        own = issued[whose] if whose else None
        context = calling_context(shown.pin, certificate=own)
        # From 1.3 on, a refusal comes only after the island's own handshake.
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with calling(strict) as (raw, heard):
            try:
                with secured(raw, context, host="x", pin=shown.pin) as line:
                    assert talk(line) == b"welcome"
            except Unreachable:
                pass
            return heard.result()

    assert heard_from("ours") == b"hello"
    with pytest.raises(ssl.SSLError, match="peer did not return a certificate"):
        heard_from(None)
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        heard_from("theirs")


def test_an_authority_is_made_once_and_issues_once(tmp_path: Path) -> None:
    """Nothing is written over, and a name that cannot stand there is refused."""
    now_s = time.time()
    path = make_authority(tmp_path, unix_s=now_s)
    content = path.read_bytes()
    into = tmp_path / "a"
    file = issue_island_certificate(tmp_path, "île", into=into, unix_s=now_s)

    assert file == into / "île.pem"
    assert make_authority(tmp_path, unix_s=now_s).read_bytes() == content
    with pytest.raises(UsageError, match="never written twice"):
        issue_island_certificate(tmp_path, "île", into=into, unix_s=now_s)
    for name in ("../b", ".b", "-b", "b/c"):
        with pytest.raises(UsageError, match="names no file"):
            issue_island_certificate(tmp_path, name, into=into, unix_s=now_s)
    for name in ("", "x" * 65, "a\nb"):
        with pytest.raises(UsageError, match="cannot stand in a certificate"):
            issue_island_certificate(tmp_path, name, into=tmp_path / "c", unix_s=now_s)
    with pytest.raises(NoSuchFile, match=r"authority\.pem does not exist"):
        issue_island_certificate(tmp_path / "a", "b", into=tmp_path / "c", unix_s=now_s)


def test_keys_are_the_users_own(tmp_path: Path) -> None:
    """The authority's and the island's have mode 0600 in directories of mode 0700."""
    now_s = time.time()
    make_authority(tmp_path / "run", unix_s=now_s)
    issue_island_certificate(tmp_path / "run", "a", into=tmp_path / "b", unix_s=now_s)

    made = [path for folder in ("run", "b") for path in (tmp_path / folder).iterdir()]
    assert {path.name for path in made} == {"authority.key", "authority.pem", "a.pem"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o600}
    assert {stat.S_IMODE(path.parent.stat().st_mode) for path in made} == {0o700}


def test_files_that_do_not_fit_are_refused(shown: Certificate, tmp_path: Path) -> None:
    """A missing, damaged, foreign or encrypted file is named before anyone calls."""
    certificate, key = shown.directory / "certificate.pem", tmp_path / "other.key"
    with pytest.raises(NoSuchFile, match=r"certificate\.pem does not exist"):
        listening_context(tmp_path)
    with pytest.raises(UsageError, match="does not hold a certificate with its key"):
        calling_context(None, certificate=certificate)
    with pytest.raises(UsageError, match="is the key of no certificate"):
        calling_context(None, key=shown.directory / "certificate.key")
    with pytest.raises(UsageError, match=r"holds no certificate of an authority"):
        calling_context(None, authority=shown.directory / "certificate.key")

    key.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n")
    with pytest.raises(UsageError, match="is not the key of"):
        calling_context(None, certificate=certificate, key=key)
    locked = BestAvailableEncryption(b"sesame")
    made = ec.generate_private_key(ec.SECP256R1())
    key.write_bytes(made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
    with pytest.raises(UsageError, match=r"is encrypted\. Give one without a password"):
        calling_context(None, certificate=certificate, key=key)
    other = coordinator_certificate(tmp_path / "o", hosts=[], unix_s=time.time())
    with pytest.raises(UsageError, match="is not the key of"):
        calling_context(
            None, certificate=certificate, key=other.directory / "certificate.key"
        )
