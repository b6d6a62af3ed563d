"""Nobody without a token may keep an invited island out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.security import Role
from atoll.security.tokens import MAX_WRONG
from atoll.testing.fixtures import plain_settings
from tests.coordinator.apart import Apart, serving_apart
from tests.coordinator.serving import asking


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Apart]:
    """Serve a run whose time stands still, so that nobody's wait ends."""
    settings = plain_settings().to_dict()
    with serving_apart(tmp_path / "run", settings, is_still=True) as apart:
        yield apart


def test_wrong_codes_do_not_lock_out_who_has_a_right_one(served: Apart) -> None:
    """A stranger tries a hundred codes; then an invitation is redeemed at once.

    After the first ten wrong codes every answer to the stranger says to wait.
    """
    made = asking(served, "POST /invites", role=Role.OPERATOR)
    code = json.loads(made.body)["code"]
    answers = [
        asking(
            served,
            "POST /invites/redeem",
            json.dumps({"code": f"{number:032}"}).encode(),
            role=None,
        )
        for number in range(100)
    ]
    body = json.dumps({"code": code}).encode()
    heard = asking(served, "POST /invites/redeem", body, role=None)

    assert {each.status for each in answers} == {409}
    waits = [b"Try again in 60 s" in each.body for each in answers]
    assert waits == [False] * MAX_WRONG + [True] * (100 - MAX_WRONG)
    assert heard.status == 200, heard
    assert json.loads(heard.body)["token"]
    assert asking(served, "POST /invites/redeem", body, role=None).status != 200
