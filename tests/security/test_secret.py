"""Secrets are shown to nobody."""

from __future__ import annotations

import copy
import dataclasses
import hmac
import json
import pickle

import pytest

from atoll.security.tokens import Secret, digest_of, is_among

TEXT = "atoll_o_" + "x" * 43


@dataclasses.dataclass
class Holder:
    secret: Secret


def test_a_secret_is_never_shown() -> None:
    """No way to print it, alone or inside something, prints its text."""
    secret = Secret(TEXT)
    shown = [str(secret), repr(secret), f"{secret}", f"{secret!r:>20}", f"{secret:>9}"]
    shown += ["%s %r".__mod__((secret, [secret])), str(Holder(secret))]

    assert not any("xxx" in each for each in shown)
    assert str(secret) == "<secret>"
    assert secret.reveal() == TEXT


def test_a_secret_is_not_written_by_accident() -> None:
    """What copies or writes a structure without looking stops at a secret."""
    secret = Secret(TEXT)

    with pytest.raises(TypeError):
        json.dumps({"token": secret})
    with pytest.raises(TypeError, match="neither copied nor written"):
        pickle.dumps(secret)
    with pytest.raises(TypeError, match="neither copied nor written"):
        copy.deepcopy(secret)
    with pytest.raises(TypeError, match="neither copied nor written"):
        dataclasses.asdict(Holder(secret))
    with pytest.raises(TypeError):
        vars(secret)


def test_secrets_are_equal_by_their_text() -> None:
    """Two of the same text are one; text itself is not a secret."""
    assert Secret(TEXT) == Secret(TEXT)
    assert Secret(TEXT) != Secret(TEXT[:-1])
    assert Secret(TEXT) != TEXT
    assert len({Secret(TEXT), Secret(TEXT)}) == 1


@pytest.mark.parametrize("sought", ["first", "last", "none of them"])
def test_a_search_takes_as_long_whichever_matches(
    sought: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every digest is compared, by the comparison that takes constant time."""
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def recording(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return compare(known, given)

    monkeypatch.setattr(hmac, "compare_digest", recording)
    digests = [digest_of(each) for each in ("first", "second", "last")]

    assert is_among(digest_of(sought), digests) == (sought != "none of them")
    assert compared == digests
