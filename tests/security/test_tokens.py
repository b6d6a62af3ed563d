"""Tokens, their files, and who may do what."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import CorruptError, NoSuchFile, Refused, UsageError
from atoll.security import (
    Role,
    Secret,
    Tokens,
    authorization,
    check_token,
    make_token,
    read_token,
    require,
    run_tokens,
    token_file,
)
from tests.security.shown import everything_shown

TOKENS = {role: make_token(role) for role in Role}


def test_a_token_says_what_it_is() -> None:
    """Whoever scans for leaks finds it by its first letters; no two are equal."""
    island = TOKENS[Role.ISLAND].reveal()

    assert re.fullmatch(r"atoll_i_[\w-]{43}", island)
    assert re.fullmatch(r"atoll_o_[\w-]{43}", TOKENS[Role.OPERATOR].reveal())
    assert len({make_token(Role.ISLAND) for _ in range(50)}) == 50


def test_a_run_keeps_its_tokens(tmp_path: Path) -> None:
    """They are made once, private, and the same after a restart."""
    made = run_tokens(tmp_path / "run")

    assert run_tokens(tmp_path / "run") == made
    assert sorted(os.listdir(tmp_path / "run")) == ["island.token", "operator.token"]
    for role, token in made.items():
        path = token_file(tmp_path / "run", role)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert read_token(path) == token


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER  "])
def test_a_token_proves_its_role(role: Role, scheme: str) -> None:
    """In a header as text or as bytes."""
    header = f"{scheme} {TOKENS[role].reveal()}"

    assert Tokens(TOKENS).role_of(header) is role
    assert Tokens(TOKENS).role_of(header.encode()) is role
    assert Tokens(TOKENS).role_of(authorization(TOKENS[role])) is role


def test_anything_else_proves_nothing() -> None:
    """A part of a token, two of them, another scheme, another run's, none."""
    known, token = Tokens(TOKENS), TOKENS[Role.OPERATOR].reveal()
    headers: list[str | bytes | None] = [
        None,
        "",
        "Bearer",
        "Bearer ",
        token,
        f"Basic {token}",
        f"Bearer {token[:-1]}",
        f"Bearer {token}x",
        f"Bearer {token.upper()}",
        f"Bearer {token} {token}",
        f"Bearer {token}\n",
        f"Bearer {token}" + " " * 300,
        f"Bearer {TOKENS[Role.ISLAND].reveal().replace('_i_', '_o_')}",
        authorization(make_token(Role.OPERATOR)),
        b"Bearer \xff\xfe",
        "Bearer \ud800",
    ]

    assert [known.role_of(header) for header in headers] == [None] * len(headers)


@given(st.text() | st.binary())
def test_no_header_is_too_strange(header: str | bytes) -> None:
    """Whatever comes, the answer is that it proves nothing."""
    assert Tokens(TOKENS).role_of(header) is None
    after = header if isinstance(header, bytes) else header.encode(errors="replace")
    assert Tokens(TOKENS).role_of(b"Bearer " + after) is None


def test_the_coordinator_keeps_no_token() -> None:
    """What is in its memory does not open anything."""
    held = repr(vars(Tokens(TOKENS)))

    assert not any(token.reveal() in held for token in TOKENS.values())


def test_an_operator_may_do_what_an_island_may() -> None:
    """And an island not what an operator may; nobody may do either."""
    require(Role.OPERATOR, Role.OPERATOR)
    require(Role.OPERATOR, Role.ISLAND)
    require(Role.ISLAND, Role.ISLAND)
    require(None, None)
    with pytest.raises(Refused, match="token of an operator, and came with that of an"):
        require(Role.ISLAND, Role.OPERATOR)
    with pytest.raises(Refused, match=r"none that is valid.*ATOLL_TOKEN_FILE"):
        require(None, Role.ISLAND)


def test_a_token_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    """Making a run's tokens again does not overlook it."""
    run_tokens(tmp_path)
    token_file(tmp_path, Role.ISLAND).chmod(0o644)

    with pytest.raises(
        UsageError, match=r"mode 644: others may read this token.*chmod"
    ):
        run_tokens(tmp_path)


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    """The path is in the message."""
    with pytest.raises(NoSuchFile, match=r"mine\.token does not exist"):
        read_token(tmp_path / "mine.token")


def test_damage_is_found_and_not_repeated(tmp_path: Path) -> None:
    """A file of another role, or of no token, is refused without being shown."""
    run_tokens(tmp_path)
    path = token_file(tmp_path, Role.ISLAND)
    operator = token_file(tmp_path, Role.OPERATOR).read_text()

    for content, why in (
        (operator, "token of an operator"),
        (operator[:-3], "no token"),
    ):
        path.write_text(content)
        with pytest.raises(CorruptError, match=why) as caught:
            run_tokens(tmp_path)
        assert operator[8:20] not in everything_shown(caught.value)


def test_a_token_that_came_by_the_wire_is_checked() -> None:
    """Text that is none is refused, and not repeated."""
    assert check_token(TOKENS[Role.ISLAND].reveal()) == TOKENS[Role.ISLAND]
    wrong = TOKENS[Role.ISLAND].reveal() + "\n"
    with pytest.raises(UsageError, match="That is no token") as caught:
        check_token(wrong)
    assert wrong[8:20] not in everything_shown(caught.value)


def test_a_damaged_secret_claims_nothing() -> None:
    """Only a well-formed operator's token opens what an operator's opens."""
    assert Tokens({Role.ISLAND: Secret("")}).role_of("Bearer x") is None
