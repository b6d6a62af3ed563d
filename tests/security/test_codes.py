"""One-time codes in virtual time."""

from __future__ import annotations

import hmac
from concurrent.futures import ThreadPoolExecutor

import pytest

from atoll.errors import Refused
from atoll.security import (
    MustWait,
    OneTimeCodes,
    Role,
    Secret,
    make_token,
)
from atoll.security.tokens import LIFETIME_S, MAX_OUTSTANDING, MAX_WRONG, WrongTries
from tests.security.shown import everything_shown

TOKEN = make_token(Role.ISLAND)
WRONG = "0" * 32
HERE, THERE = "192.0.2.1", "192.0.2.2"


def fail(codes: OneTimeCodes, *, now_s: float) -> None:
    """Try a wrong code."""
    with pytest.raises(Refused, match=r"wrong, was used, or is older.*atoll invite"):
        codes.redeem(WRONG, address=HERE, now_s=now_s)


def test_a_code_opens_once() -> None:
    """The second attempt gets the answer of a wrong code, and not the code back."""
    codes = OneTimeCodes(TOKEN)
    code = codes.make(now_s=0.0)

    assert codes.redeem(code.reveal(), address=HERE, now_s=1.0) == TOKEN
    with pytest.raises(Refused, match="was used") as caught:
        codes.redeem(code.reveal(), address=HERE, now_s=2.0)
    assert code.reveal() not in everything_shown(caught.value)
    assert TOKEN.reveal() not in everything_shown(caught.value)


def test_one_of_many_at_the_same_time_is_let_in() -> None:
    """Threads that bring the same code get one token among them."""
    codes = OneTimeCodes(TOKEN)
    text = codes.make(now_s=0.0).reveal()

    def attempt(_: int) -> Secret | None:
        try:
            return codes.redeem(text, address=HERE, now_s=0.0)
        except Refused:
            return None

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(attempt, range(8)))

    assert got.count(TOKEN) == 1


def test_a_code_expires() -> None:
    """An hour after it was made it is worth nothing; just before, it is."""
    codes = OneTimeCodes(TOKEN)
    first, second = codes.make(now_s=0.0), codes.make(now_s=0.0)

    assert codes.redeem(first.reveal(), address=HERE, now_s=LIFETIME_S - 0.001) == TOKEN
    with pytest.raises(Refused, match="older than 60 minutes"):
        codes.redeem(second.reveal(), address=HERE, now_s=LIFETIME_S)


def test_codes_are_unguessable_and_not_kept() -> None:
    """They have 128 bits, differ, and the memory of the coordinator holds digests."""
    codes = OneTimeCodes(TOKEN)
    made = [codes.make(now_s=0.0) for _ in range(MAX_OUTSTANDING)]

    assert len(set(made)) == MAX_OUTSTANDING
    assert {len(bytes.fromhex(code.reveal())) for code in made} == {16}
    assert not any(code.reveal() in repr(vars(codes)) for code in made)


def test_only_so_many_are_outstanding() -> None:
    """One more is refused until one is used, or expires."""
    codes = OneTimeCodes(TOKEN)
    made = [codes.make(now_s=float(i)) for i in range(MAX_OUTSTANDING)]
    # The oldest was made at 0 and expires at 3600: at 100 that is 3500 s ahead.
    with pytest.raises(Refused, match=r"64 invites are not used yet.* wait 3500 s"):
        codes.make(now_s=100.0)

    codes.redeem(made[5].reveal(), address=HERE, now_s=100.0)
    codes.make(now_s=100.0)
    with pytest.raises(Refused, match="64 invites are not used yet"):
        codes.make(now_s=100.0)
    codes.make(now_s=LIFETIME_S)


def guess(codes: OneTimeCodes, count: int, address: str = HERE) -> None:
    """Try wrong codes, each another one, at times 0, 1, ..."""
    for second in range(count):
        with pytest.raises(Refused, match="wrong, was used, or is older"):
            codes.redeem(f"{second:032}", address=address, now_s=float(second))


def test_after_ten_wrong_codes_an_address_waits() -> None:
    """Waiting attempts do not lengthen the wait, and other addresses do not wait."""
    codes = OneTimeCodes(TOKEN)
    guess(codes, MAX_WRONG)

    # The first of the ten came at 0, so the minute is over at 60.
    with pytest.raises(
        MustWait, match=r"10 wrong tries.*from this address or with this code.*in 50 s"
    ) as caught:
        codes.redeem("f" * 32, address=HERE, now_s=10.0)
    assert caught.value.wait_s == 50.0
    for _ in range(100):
        with pytest.raises(MustWait):
            codes.redeem("f" * 32, address=HERE, now_s=59.9)
    for address, now_s in ((THERE, 10.0), (HERE, 60.0)):
        with pytest.raises(Refused, match="This code is wrong"):
            codes.redeem("e" * 32, address=address, now_s=now_s)


@pytest.mark.parametrize("address", [HERE, THERE, "2001:db8::1"])
def test_a_right_code_opens_from_every_address_at_every_time(address: str) -> None:
    """Nobody who guesses keeps out who was invited, not even from the same address."""
    codes = OneTimeCodes(TOKEN)
    code = codes.make(now_s=0.0)
    for guesser in (HERE, "2001:db8::2"):
        guess(codes, MAX_WRONG, guesser)

    assert codes.redeem(code.reveal(), address=address, now_s=10.0) == TOKEN


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("192.0.2.1", "192.0.2.2", False),
    ],
)
def test_a_caller_with_many_addresses_is_one(
    one: str, other: str, is_same: bool
) -> None:
    """A /64 of IPv6 belongs to one caller; IPv4 is IPv4 however it is written."""
    codes = OneTimeCodes(TOKEN)
    guess(codes, MAX_WRONG, one)

    expected = MustWait if is_same else Refused
    with pytest.raises(Refused) as caught:
        codes.redeem("f" * 32, address=other, now_s=10.0)
    assert type(caught.value) is expected


def test_a_code_that_was_wrong_ten_times_waits_wherever_it_comes_from() -> None:
    """A script that repeats a used code from many machines is told to wait."""
    codes = OneTimeCodes(TOKEN)
    for number in range(MAX_WRONG):
        with pytest.raises(Refused, match="This code is wrong"):
            codes.redeem(WRONG, address=f"198.51.100.{number}", now_s=0.0)

    with pytest.raises(MustWait):
        codes.redeem(WRONG, address=HERE, now_s=0.0)


def test_wrong_tries_take_bounded_memory() -> None:
    """Addresses beyond the limit push out the oldest, and no more."""
    tries = WrongTries(max_counted=100)
    for number in range(10_000):
        tries.add(number, now_s=0.0)

    assert len(tries) == 100


def test_slow_mistakes_make_nobody_wait() -> None:
    """Nine wrong codes a minute are nine refusals."""
    codes = OneTimeCodes(TOKEN)
    for attempt in range(50):
        fail(codes, now_s=attempt * 6.7)

    assert (
        codes.redeem(codes.make(now_s=340.0).reveal(), address=HERE, now_s=340.0)
        == TOKEN
    )


@pytest.mark.parametrize("strange", ["", "x" * 10**6, "\ud800", "\0" * 32, "ö" * 32])
def test_strange_codes_are_wrong_codes(strange: str) -> None:
    """Whatever comes by the wire gets the one answer."""
    codes = OneTimeCodes(TOKEN)
    codes.make(now_s=0.0)

    with pytest.raises(Refused, match="This code is wrong"):
        codes.redeem(strange, address=HERE, now_s=0.0)


@pytest.mark.parametrize("which", [0, 1, 2, None])
def test_a_code_is_compared_with_all(
    which: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long an answer takes does not say how near the code was."""
    codes = OneTimeCodes(TOKEN)
    made = [codes.make(now_s=0.0) for _ in range(3)]
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def recording(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return compare(known, given)

    monkeypatch.setattr(hmac, "compare_digest", recording)
    if which is None:
        fail(codes, now_s=1.0)
    else:
        codes.redeem(made[which].reveal(), address=HERE, now_s=1.0)

    assert compared == [code.digest() for code in made]
