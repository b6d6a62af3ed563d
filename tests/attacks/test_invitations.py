"""Nobody without a token may keep an invited island out."""

from __future__ import annotations

import json

from atoll.security import Role
from tests.attacks.conftest import Serve
from tests.coordinator.serving import asking


def test_wrong_codes_do_not_lock_out_who_has_a_right_one(serve: Serve) -> None:
    """A stranger tries a hundred codes; then an invitation is redeemed at once."""
    served = serve()
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

    assert {each.status for each in answers} <= {409, 429, 503}
    assert heard.status == 200, heard
    assert json.loads(heard.body)["token"]
    assert asking(served, "POST /invites/redeem", body, role=None).status != 200
