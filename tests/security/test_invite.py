"""Invites: one paste, read exactly."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.security import (
    Address,
    Invite,
    Role,
    Secret,
    is_invite,
    make_token,
    parse_invite,
)
from tests.security.shown import everything_shown

CODE = "0123456789abcdef0123456789abcdef"
PIN = "sha256:" + "ab" * 32
TEXT = f"atoll://host.example:8443/first,pin={'ab' * 32},code={CODE}"

hosts = st.ip_addresses().map(str).filter(lambda ip: "%" not in ip) | st.from_regex(
    r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?(\.[a-z]{2,5}){0,3}", fullmatch=True
)
runs = st.text(min_size=1, max_size=32).filter(
    lambda run: "/" not in run and run not in (".", "..") and run.isprintable()
)
invites = st.builds(
    Invite,
    address=st.builds(Address, hosts, st.integers(1, 65535)),
    run=runs,
    pin=st.none() | st.binary(min_size=32, max_size=32).map(bytes.hex),
    code=st.binary(min_size=16, max_size=16).map(bytes.hex).map(Secret),
)


def test_an_invite_is_read_as_it_is_written() -> None:
    """Every part is there, and the URL is one of TLS."""
    invite = parse_invite(f"  {TEXT}\n")

    assert invite.address == Address("host.example", 8443)
    assert str(invite.url) == "https://host.example:8443"
    assert (invite.run, invite.pin, invite.code.reveal()) == ("first", PIN, CODE)
    assert invite.reveal() == TEXT
    assert CODE not in repr(invite)


@given(invites)
def test_every_invite_comes_back(invite: Invite) -> None:
    """Whatever the host and the run's name, in plain characters and within bounds."""
    text = invite.reveal()

    assert parse_invite(text) == invite
    assert text.isascii()
    assert len(text) <= 1024
    assert is_invite(text)


@given(invites, st.data())
def test_a_changed_invite_is_refused_or_another_whole_one(
    invite: Invite, data: st.DataObject
) -> None:
    """One character cut, put in or changed never gives a second spelling."""
    text = invite.reveal()
    place = data.draw(st.integers(0, len(text) - 1))
    put = data.draw(st.characters() | st.sampled_from(list("/,#&=:@%[]0af \n")))
    cut = data.draw(st.integers(0, 1))
    changed = text[:place] + put + text[place + cut :]
    shown = ""
    try:
        assert parse_invite(changed).reveal() == changed.strip()
    except UsageError as exc:
        shown = everything_shown(exc)
    assert invite.code.reveal() not in shown


@given(st.text() | st.text().map(lambda text: "atoll://" + text))
def test_hostile_text_is_refused(text: str) -> None:
    """Nothing but a usage error, and nothing of the text in it."""
    with pytest.raises(UsageError, match="no whole invite"):
        parse_invite(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("https://host:1", "does not start with atoll://"),
        (TEXT.upper(), "does not start with atoll://"),
        ("atoll://", "names no host:port/run"),
        (TEXT[:-1], "its code has not 32 digits"),
        (TEXT + "0", "its code has not 32 digits"),
        (TEXT.partition(",code")[0], "its code is missing"),
        (TEXT.replace("pin=ab", "pin=b"), "then its pin, then its code"),
        (TEXT.replace("pin=", "pin=sha256:"), "then its pin, then its code"),
        (TEXT.replace(":8443", ""), "address or its run's name is malformed"),
        (TEXT.replace("8443", "99999"), "address or its run's name is malformed"),
        (TEXT.replace("host", "me@host"), "address or its run's name is malformed"),
        (TEXT.replace("first", "%ff"), "address or its run's name is malformed"),
        (TEXT.replace("first", "a%2fb"), "address or its run's name is malformed"),
        (TEXT.replace("first", ".."), "address or its run's name is malformed"),
        (TEXT.replace("first", "%0a"), "address or its run's name is malformed"),
        (TEXT.replace("first", "%66irst"), "spelt another way"),
        (TEXT.replace("host", "Host"), "spelt another way"),
        (TEXT.replace("8443", "08443"), "spelt another way"),
        (TEXT.replace(",", ", "), "a blank or a foreign character"),
        (TEXT.replace("first", "\u202efirst"), "a blank or a foreign character"),
        (TEXT + "x" * 1024, "more than 1024 characters"),
    ],
)
def test_what_is_wrong_is_said_without_the_code(text: str, why: str) -> None:
    """The message helps whoever copied half of it, and shows nothing to bystanders."""
    with pytest.raises(UsageError, match=why) as caught:
        parse_invite(text)
    assert CODE[:16] not in everything_shown(caught.value)


def test_a_token_pasted_by_mistake_is_not_repeated() -> None:
    """It is no invite, and the message does not publish it."""
    token = make_token(Role.OPERATOR).reveal()
    for pasted in (token, f"atoll://{token}", f"atoll://{token}:1/r,code={CODE}"):
        with pytest.raises(UsageError) as caught:
            parse_invite(pasted)
        assert token[8:] not in everything_shown(caught.value)


@pytest.mark.parametrize("run", ["", "a/b", ".", "..", "x" * 129, "a\nb", "\ud800"])
def test_a_run_without_a_name_invites_nobody(run: str) -> None:
    """What could not be read is not written."""
    with pytest.raises(UsageError, match="names no run"):
        Invite(address=Address("h", 1), run=run, pin=None, code=Secret(CODE))


def test_a_code_of_another_shape_is_not_written() -> None:
    """The message does not show it."""
    with pytest.raises(UsageError, match="32 hexadecimal digits") as caught:
        Invite(address=Address("h", 1), run="r", pin=None, code=Secret("sesame"))
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("shell", ["sh", "bash", "zsh"])
@pytest.mark.parametrize(
    "run", ["first", "~a b", "$(x) `y` 'z' \"", "a&b;c|d*?#!", "île"]
)
def test_a_shell_leaves_an_invite_alone(shell: str, run: str) -> None:
    """Pasted without quotes, it arrives as it was printed."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    invite = Invite(address=Address("10.0.0.7", 1), run=run, pin=PIN, code=Secret(CODE))
    command = [shell, "-c", f"printf %s {invite.reveal()}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout == invite.reveal()
