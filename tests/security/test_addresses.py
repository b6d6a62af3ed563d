"""Hosts, ports and the URLs of runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.security import Address, is_loopback, parse_address, parse_run_url


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        ("https://Host.Example:8443/", "https://host.example:8443"),
        ("HTTPS://host.example.", "https://host.example:443"),
        ("https://[2001:DB8:0::1]:9", "https://[2001:db8::1]:9"),
        ("https://10.0.0.7:0080", "https://10.0.0.7:80"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://localhost", "http://localhost:80"),
        ("http://[::1]:1", "http://[::1]:1"),
    ],
)
def test_a_url_has_one_spelling(text: str, spelling: str) -> None:
    """However it was typed, what was remembered is found."""
    assert str(parse_run_url(text)) == spelling
    assert parse_run_url(spelling) == parse_run_url(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("http://10.0.0.7:80", "in the open. Write https://10.0.0.7:80"),
        ("http://host.example", "in the open"),
        ("http://localhost.evil.example:1", "in the open"),
        ("http://127.0.0.1.evil.example:1", "in the open"),
        ("https://user:word@host:1", "holds no name or password"),
        ("https://host:1/path", "ends after its port"),
        ("https://host:1?x=1", "ends after its port"),
        ("https://host:1#x", "ends after its port"),
        ("ftp://host:1", "starts with https"),
        ("host:1", "starts with https"),
        ("", "starts with https"),
        ("https://", "not written as host:port"),
        ("https://host:0", "not within 1 to 65535"),
        ("https://host:65536", "not within 1 to 65535"),
        ("https://host:", "not written as host:port"),
        ("https://::1:5", "not written as host:port"),
        ("https://[abcd]:5", "is no host"),
        ("https://[fe80::1%eth0]:5", "not written as host:port"),
        ("https://a..b:5", "is no host"),
        ("https://-a:5", "is no host"),
        ("https://h\u00f6st:5", "ASCII and no blanks"),
        ("https://ho st:5", "ASCII and no blanks"),
        ("https://host\n:5", "ASCII and no blanks"),
        ("https://" + "a" * 600, "at most 512"),
        ("https://" + "a." * 150 + "a:1", "is no host"),
    ],
)
def test_what_is_no_url_of_a_run_is_refused(text: str, why: str) -> None:
    """The message says what is wrong and how it is written."""
    with pytest.raises(UsageError, match=why):
        parse_run_url(text)


@given(st.text(max_size=80).map(lambda text: "https://" + text) | st.text())
def test_hostile_urls_are_refused_or_have_their_spelling(text: str) -> None:
    """No text raises anything else, and a spelling spells itself."""
    try:
        url = parse_run_url(text)
    except UsageError:
        return
    assert parse_run_url(str(url)) == url


@given(st.ip_addresses(), st.integers(1, 65535))
def test_every_ip_address_is_read_as_it_is_written(ip: object, port: int) -> None:
    """With brackets where they are needed."""
    address = Address(str(ip), port) if "%" not in str(ip) else Address("::1", port)

    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "::ffff:127.0.0.1"]
)
def test_loopback_is_known(host: str) -> None:
    """These reach this machine only."""
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "0",
        "0.0.0.0",
        "10.0.0.1",
        "127.0.0.1.example",
        "127.1",
        "2130706433",
        "::",
        "::ffff:10.0.0.1",
        "fe80::1%lo",
        "host",
        "localhost.example",
    ],
)
def test_all_else_is_beyond_loopback(host: str) -> None:
    """Also what some systems would take for loopback: nothing is guessed."""
    assert not is_loopback(host)
