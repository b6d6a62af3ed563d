"""A code opens one session, once, for ten minutes."""

from __future__ import annotations

import pytest

from atoll.dashboard import Sessions, WrongCode
from atoll.dashboard.sessions import CODE_S, IDLE_S, MAX_CODES, MAX_SESSIONS
from atoll.security import MustWait

HERE = "127.0.0.1"


def _opened(sessions: Sessions, now_s: float = 0.0) -> str:
    code = sessions.make_code(now_s=now_s).reveal()
    return sessions.open(code, address=HERE, now_s=now_s).reveal()


def test_a_code_opens_one_session() -> None:
    """The second use of the same code is refused."""
    sessions = Sessions()
    code = sessions.make_code(now_s=0.0).reveal()
    session = sessions.open(code, address=HERE, now_s=1.0).reveal()
    assert len(code) == 32
    assert len(session) == 64
    assert sessions.is_open(session, now_s=2.0)
    with pytest.raises(WrongCode, match="was used"):
        sessions.open(code, address=HERE, now_s=3.0)


def test_a_code_lasts_for_ten_minutes() -> None:
    """After that it is as good as a wrong one."""
    sessions = Sessions()
    code = sessions.make_code(now_s=0.0).reveal()
    with pytest.raises(WrongCode, match="ten minutes"):
        sessions.open(code, address=HERE, now_s=CODE_S + 1)


def test_ten_wrong_codes_stop_an_address() -> None:
    """The right one is refused as well, for a minute."""
    sessions = Sessions()
    for number in range(10):
        with pytest.raises(WrongCode):
            sessions.open("wrong", address=HERE, now_s=float(number))
    code = sessions.make_code(now_s=10.0).reveal()
    with pytest.raises(MustWait):
        sessions.open(code, address=HERE, now_s=10.0)
    sessions.open(code, address=HERE, now_s=61.0)


def test_a_session_ends_when_it_is_not_used() -> None:
    """Every use keeps it open for another 12 hours."""
    sessions = Sessions()
    session = _opened(sessions)
    assert sessions.is_open(session, now_s=IDLE_S - 1)
    assert sessions.is_open(session, now_s=2 * IDLE_S - 2)
    assert not sessions.is_open(session, now_s=4 * IDLE_S)


def test_sessions_and_codes_are_bounded() -> None:
    """The one that was not used for the longest time goes first."""
    sessions = Sessions()
    opened = [_opened(sessions, float(number)) for number in range(MAX_SESSIONS + 1)]
    alive = [session for session in opened if sessions.is_open(session, now_s=99.0)]
    assert alive == opened[1:]
    codes = [sessions.make_code(now_s=0.0).reveal() for _ in range(MAX_CODES + 1)]
    with pytest.raises(WrongCode):
        sessions.open(codes[0], address=HERE, now_s=0.0)


def test_a_closed_session_is_over() -> None:
    """Closing it again changes nothing."""
    sessions = Sessions()
    session = _opened(sessions)
    sessions.close(session)
    sessions.close(session)
    assert not sessions.is_open(session, now_s=0.0)
