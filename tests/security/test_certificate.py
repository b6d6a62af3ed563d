"""The coordinator's certificate: made once, loaded ever after."""

from __future__ import annotations

import hashlib
import os
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtensionOID

from atoll.errors import CorruptError, NoSuchFile, UsageError
from atoll.security import fingerprint, parse_pin
from atoll.security.certificates import coordinator_certificate, load_certificate
from tests.security.shown import everything_shown

NOW = 1_800_000_000.0  # 2027-01-15
YEAR_S = 365.25 * 86400

ASK = """
import sys
from pathlib import Path
from atoll.security.certificates import coordinator_certificate
print(coordinator_certificate(Path(sys.argv[1]), hosts=[], unix_s=1.8e9).pin)
"""


def parsed(directory: Path) -> x509.Certificate:
    """Return the certificate in a directory, as others read it."""
    pem = (directory / "certificate.pem").read_bytes()
    return x509.load_pem_x509_certificate(pem)


def test_a_certificate_is_made_once(tmp_path: Path) -> None:
    """The next start finds the same one; both files are private, no draft is left."""
    directory = tmp_path / "run" / "tls"
    made = coordinator_certificate(directory, hosts=["0.0.0.0"], unix_s=NOW)
    again = coordinator_certificate(directory, hosts=["other"], unix_s=NOW + 5)

    assert again == made == load_certificate(directory, unix_s=NOW)
    certificate = parsed(directory)
    assert certificate.issuer == certificate.subject
    assert sorted(os.listdir(directory)) == ["certificate.key", "certificate.pem"]
    for path in directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_pin_is_the_digest_of_what_is_shown(tmp_path: Path) -> None:
    """It is what other tools print as the SHA-256 fingerprint."""
    made = coordinator_certificate(tmp_path, hosts=[], unix_s=NOW)
    der = ssl.PEM_cert_to_DER_cert((tmp_path / "certificate.pem").read_text())

    assert made.pin == fingerprint(der) == f"sha256:{hashlib.sha256(der).hexdigest()}"


def test_it_names_the_hosts_and_this_machine(tmp_path: Path) -> None:
    """Each once, whatever its spelling; every interface is no name."""
    hosts = ["0.0.0.0", "::", "", "Host.Example", "host.example", "10.0.0.7", "::1"]
    coordinator_certificate(tmp_path, hosts=hosts, unix_s=NOW)
    oid = ExtensionOID.SUBJECT_ALTERNATIVE_NAME
    names = parsed(tmp_path).extensions.get_extension_for_oid(oid).value

    assert isinstance(names, x509.SubjectAlternativeName)
    assert names.get_values_for_type(x509.DNSName) == ["host.example", "localhost"]
    ips = [str(ip) for ip in names.get_values_for_type(x509.IPAddress)]
    assert ips == ["10.0.0.7", "::1", "127.0.0.1"]


def test_it_is_valid_for_ten_years(tmp_path: Path) -> None:
    """With a key on P-256, from a day ago on, for clocks that are behind."""
    coordinator_certificate(tmp_path, hosts=[], unix_s=NOW)
    certificate = parsed(tmp_path)
    key = certificate.public_key()

    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert isinstance(key.curve, ec.SECP256R1)
    assert certificate.not_valid_after_utc.timestamp() == NOW + 3653 * 86400
    assert certificate.not_valid_before_utc.timestamp() == NOW - 86400


def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    """The message says since when, and how to have another made."""
    coordinator_certificate(tmp_path, hosts=[], unix_s=NOW)
    load_certificate(tmp_path, unix_s=NOW + 9.9 * YEAR_S)

    with pytest.raises(UsageError, match=r"expired on 2037-01-15.*remove certificate"):
        coordinator_certificate(tmp_path, hosts=[], unix_s=NOW + 10.1 * YEAR_S)
    with pytest.raises(UsageError, match=r"valid from 2027-01-14.*Set the clock"):
        load_certificate(tmp_path, unix_s=NOW - 2 * 86400)


def test_another_key_is_refused(tmp_path: Path) -> None:
    """A key that does not belong to the certificate is found at the start."""
    for name in ("a", "b"):
        coordinator_certificate(tmp_path / name, hosts=[], unix_s=NOW)
    os.replace(tmp_path / "a/certificate.key", tmp_path / "b/certificate.key")

    with pytest.raises(UsageError, match=r"is not the key of.*Put both files back"):
        coordinator_certificate(tmp_path / "b", hosts=[], unix_s=NOW)


def test_a_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    """No new one is made: islands have pinned this one."""
    coordinator_certificate(tmp_path, hosts=[], unix_s=NOW)
    (tmp_path / "certificate.key").unlink()

    with pytest.raises(
        NoSuchFile, match=r"key, does not exist.*every island then needs"
    ):
        coordinator_certificate(tmp_path, hosts=[], unix_s=NOW)


def test_a_key_without_a_certificate_gets_one(tmp_path: Path) -> None:
    """That is what a first start that was killed leaves behind."""
    coordinator_certificate(tmp_path, hosts=[], unix_s=NOW)
    key = (tmp_path / "certificate.key").read_bytes()
    (tmp_path / "certificate.pem").unlink()
    coordinator_certificate(tmp_path, hosts=[], unix_s=NOW)

    assert (tmp_path / "certificate.key").read_bytes() == key


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    """The message says how to mend it."""
    coordinator_certificate(tmp_path, hosts=[], unix_s=NOW)
    (tmp_path / "certificate.key").chmod(0o644)

    with pytest.raises(UsageError, match=r"mode 644: others may read this key.*chmod"):
        load_certificate(tmp_path, unix_s=NOW)


@pytest.mark.parametrize("name", ["certificate.pem", "certificate.key"])
@pytest.mark.parametrize("kept_bytes", [0, 100])
def test_damaged_files_are_refused(tmp_path: Path, name: str, kept_bytes: int) -> None:
    """Cut anywhere, they are damage, and nothing of a key is shown."""
    coordinator_certificate(tmp_path, hosts=[], unix_s=NOW)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:kept_bytes])

    with pytest.raises(
        CorruptError, match=r"holds no (certificate|key) in PEM"
    ) as seen:
        load_certificate(tmp_path, unix_s=NOW)
    assert content[40:60].decode() not in everything_shown(seen.value)


def test_a_host_that_is_none_is_refused(tmp_path: Path) -> None:
    """Before there is a certificate with a name that nobody can use."""
    with pytest.raises(UsageError, match="'a b' is no host"):
        coordinator_certificate(tmp_path, hosts=["a b"], unix_s=NOW)
    assert not (tmp_path / "certificate.pem").exists()


def test_processes_that_start_at_the_same_time_share_one(tmp_path: Path) -> None:
    """Whoever is first makes it, and nobody has another's key."""
    command = [sys.executable, "-c", ASK, str(tmp_path)]
    asking = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    pins = {process.communicate()[0].decode().strip() for process in asking}

    assert pins == {load_certificate(tmp_path, unix_s=NOW).pin}


def test_a_pin_has_one_spelling() -> None:
    """What other tools print is read; what is no fingerprint is refused."""
    pairs = ":".join(["AB"] * 32)

    for text in ("ab" * 32, f"sha256:{'ab' * 32}", pairs, f"SHA256:{pairs}\n"):
        assert parse_pin(text) == "sha256:" + "ab" * 32
    for text in ("", "ab" * 31, "sha1:" + "ab" * 32, "xy" * 32, "a" * 10**6):
        with pytest.raises(UsageError, match="64 hexadecimal digits"):
            parse_pin(text)
