"""docs/http.md shows the bytes that the code writes; `/info` errors name the key."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import NameKnown, SettingsError, UsageError
from atoll.exchange.api import (
    FAILURES,
    Info,
    error_parts,
    info_parts,
    model_fingerprint,
    parse_info,
    reply_parts,
    to_request,
)
from atoll.exchange.api.messages import ALL_SETTINGS
from atoll.exchange.api.replies import catalogue_parts
from atoll.exchange.calls import HeartbeatCall, KeepReply
from atoll.protocol import ModelSpec, Reception
from atoll.routes import ROUTES, BodyKind, ProofRule
from tests.exchange.api_samples import (
    BEAT,
    CATALOGUE,
    CLAIM_CALL,
    CLAIMED,
    DATA_CALL,
    JOIN,
    MODEL,
    POSITION,
    REPLY,
    RUN,
    SETTINGS,
    body_bytes,
)

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()

KNOWN_NAME = NameKnown(
    "The run knows incarnation 2 of island 'tokyo-1'. Join again, after that one.",
    incarnation=2,
)
INFO = json.loads(body_bytes(info_parts(RUN)))
WRITTEN: dict[str, Any] = {
    "join": json.loads(body_bytes(to_request(JOIN))),
    "joined": json.loads(body_bytes(reply_parts(REPLY)))
    | dict.fromkeys(("settings", "not_set"), "as in /info"),
    "beat": json.loads(body_bytes(to_request(HeartbeatCall(BEAT)))),
    "position": json.loads(body_bytes(reply_parts(POSITION))),
    "reception": json.loads(body_bytes(reply_parts(Reception.STAGED))),
    "kept": json.loads(body_bytes(reply_parts(KeepReply(2**24)))),
    "data": json.loads(body_bytes(to_request(DATA_CALL))),
    "claim": json.loads(body_bytes(to_request(CLAIM_CALL))),
    "claimed": json.loads(body_bytes(reply_parts(CLAIMED))),
    "constants": json.loads(body_bytes(catalogue_parts(CATALOGUE))),
    "info": INFO,
    "error": json.loads(body_bytes(error_parts(KNOWN_NAME))),
}


def examples() -> dict[str, Any]:
    """Return the examples of the page, by the name of their form."""
    found = re.findall(r"<!-- form: (\w+) -->\n```json\n(.*?)```", PAGE, re.DOTALL)
    return {name: json.loads(text) for name, text in found}


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_an_example_of_the_page_is_what_the_code_writes(name: str) -> None:
    """Whoever reads the page reads the form, field by field and in its order."""
    example = examples()[name]

    assert example == WRITTEN[name]
    assert list(example) == list(WRITTEN[name])


def test_every_form_of_the_page_is_compared() -> None:
    """No example stands there unchecked."""
    assert set(examples()) == set(WRITTEN)


def test_the_page_lists_every_route() -> None:
    """Method, path, query, body, role and proof of the page are those of the code."""
    cells = " ?".join([r"^\| `(\w+ /\S*)`", *[r"\| ?(.*?)"] * 4, r"\| .* \|$"])
    rows = re.findall(cells, PAGE, re.MULTILINE)
    listed = [
        (title, frozenset(re.findall(r"`(\w+)`", query)), body.partition(":")[0], *rest)
        for title, query, body, *rest in rows
    ]

    assert listed == [
        (
            route.title,
            route.query,
            "" if route.body is BodyKind.EMPTY else route.body.name.lower(),
            f"{route.role.value}s" if route.role else "all",
            "" if route.proof is ProofRule.NEVER else route.proof.value,
        )
        for route in ROUTES
    ]


def test_the_page_lists_every_error() -> None:
    """The table of errors is the code's, in its order."""
    rows = re.findall(r"^\| `(\w+)` \| (\d{3}) \| `(\w+)` \| (.*?) ?\|$", PAGE, re.M)
    expected = [
        (each.code, str(each.status), each.kind.__name__, each.extra)
        for each in FAILURES
    ]

    assert [(*row[:3], row[3].strip("`")) for row in rows[:-1]] == expected
    assert rows[-1] == ("fault", "500", "Unreachable", "")


def read(said: Any) -> Info:
    """Read a form of `/info` as an island does."""
    return parse_info(json.dumps(said).encode())


@pytest.mark.parametrize("settings", SETTINGS)
def test_info_arrives_as_it_was_made(settings: Any) -> None:
    """An island reads exactly the run's settings, without a default of its own."""
    info = Info(**(vars(RUN) | {"settings": settings, "model_fingerprint": "ab"}))

    assert parse_info(body_bytes(info_parts(info))) == info


def test_info_is_complete_and_has_no_null() -> None:
    """Every setting that there is stands there, as set or as not set."""
    said = {f"{t}.{key}" for t, keys in INFO["settings"].items() for key in keys}

    assert said | set(INFO["not_set"]) == ALL_SETTINGS
    assert said & set(INFO["not_set"]) == set()
    assert "null" not in json.dumps(INFO)
    assert INFO["settings_authority"] == "run"


@pytest.mark.parametrize("key", sorted(ALL_SETTINGS))
def test_a_setting_that_the_coordinator_lacks_is_refused_by_name(key: str) -> None:
    """An older coordinator's run is not joined with a default in its place."""
    said = deepcopy(INFO)
    table, _, name = key.partition(".")
    said["settings"].get(table, {}).pop(name, None)
    said["not_set"] = [each for each in said["not_set"] if each != key]
    with pytest.raises(SettingsError, match=f"did not send '{key}', which this"):
        read(said)


@pytest.mark.parametrize("key", ["sync.sync_every", "wire.error_feedback", "outer.lr"])
def test_a_setting_that_must_be_set_cannot_be_left_open(key: str) -> None:
    """Saying that a setting is not set does not make this version choose it."""
    said = deepcopy(INFO)
    table, _, name = key.partition(".")
    del said["settings"][table][name]
    said["not_set"].append(key)
    with pytest.raises(SettingsError, match=f"whether '{key}' is set"):
        read(said)


def test_a_setting_is_never_null() -> None:
    """Null would be filled in where a default follows from other settings."""
    said = deepcopy(INFO)
    said["settings"]["wire"]["error_feedback"] = None
    with pytest.raises(UsageError, match=r"'wire\.error_feedback'=None must be set"):
        read(said)


def test_a_setting_of_a_later_version_is_refused_by_name() -> None:
    """An island never takes part in a run whose rules it would not obey."""
    later = deepcopy(INFO)
    later["settings"]["sync"]["gravity"] = 9.8
    with pytest.raises(SettingsError, match=r"a setting 'sync\.gravity', .* unknown"):
        read(later)
    with pytest.raises(SettingsError, match=r"a setting 'sync\.gravity', .* unknown"):
        read(INFO | {"not_set": [*INFO["not_set"], "sync.gravity"]})


def test_a_setting_with_another_meaning_is_refused() -> None:
    """Equal words with another fingerprint are other settings."""
    with pytest.raises(SettingsError, match="mean something else to this version"):
        read(INFO | {"fingerprint": "00"})


@pytest.mark.parametrize("spoken", [1, 0, 3, "2", True, 2.0])
def test_a_coordinator_of_another_protocol_is_refused_first(spoken: object) -> None:
    """Nothing else is read of a form that may have changed."""
    with pytest.raises(UsageError, match=r"speaks protocol .* \(Atoll '1\.2\.3'\)"):
        read({"protocol": spoken, "version": "1.2.3", "anything": None})


def test_what_is_no_coordinator_is_said_to_be_none() -> None:
    """Another program at the address is named as such."""
    with pytest.raises(UsageError, match="no coordinator of Atoll"):
        read({"status": "ok"})


@pytest.mark.parametrize("heartbeat_s", [0.0, 15.0, 20.0])
def test_a_heartbeat_must_fit_its_lease(heartbeat_s: float) -> None:
    """An island that beats too rarely would lose its lease again and again."""
    with pytest.raises(UsageError, match=r"heartbeat_s=.* below info\.lease_s=15\.0"):
        read(INFO | {"heartbeat_s": heartbeat_s})


def test_a_model_has_one_fingerprint() -> None:
    """Whatever differs in a model differs in its fingerprint."""
    other = ModelSpec(MODEL.tensors[::-1])

    assert model_fingerprint(None) == ""
    assert len(model_fingerprint(MODEL)) == 64
    assert model_fingerprint(MODEL) != model_fingerprint(other)
