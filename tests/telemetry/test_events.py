"""The table of events: what is refused, and what is bounded."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.security import (
    AuditAnswer,
    AuditEvent,
    AuditKind,
    OneTimeCodes,
    Role,
    make_token,
)
from atoll.telemetry import (
    EVENTS,
    Event,
    EventBus,
    ValueKind,
)
from atoll.telemetry.events import MAX_ITEMS, MAX_NAME, MAX_TEXT, RESERVED, checked

VALUES: dict[ValueKind, st.SearchStrategy[Any]] = {
    ValueKind.TEXT: st.text() | st.text("\ud800\x00\x1b\n…", max_size=2000),
    ValueKind.FLAG: st.booleans(),
    ValueKind.INTEGER: st.integers(),
    ValueKind.NUMBER: st.floats() | st.integers(),
    ValueKind.NAMES: st.lists(st.text()) | st.just(["i"] * 500),
    ValueKind.NUMBERS: st.dictionaries(st.text(), st.floats() | st.integers()),
    ValueKind.VALUES: st.dictionaries(st.text(), st.floats() | st.text() | st.none()),
}


@st.composite
def emitted(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Draw an event of the table with values of the right kinds."""
    name = draw(st.sampled_from(sorted(EVENTS)))
    fields = EVENTS[name].fields.items()
    return name, {key: draw(VALUES[field.kind]) for key, field in fields}


def test_an_event_says_when_and_what() -> None:
    """A line has its number, time and name, then the fields in the table's order."""
    fields = checked("run_stopped", {"last_round": 7})

    assert Event(3, 1.5, "run_stopped", fields).as_dict() == {
        "number": 3,
        "at": 1.5,
        "event": "run_stopped",
        "last_round": 7,
    }


def test_no_field_hides_the_head_of_a_line() -> None:
    """Number, time and name of an event cannot be overwritten by a field."""
    for name, event in EVENTS.items():
        assert not set(RESERVED) & set(event.fields), name


def test_a_name_that_is_not_in_the_table_is_refused() -> None:
    """A misspelt event is a mistake of ours, found when it is emitted first."""
    with pytest.raises(UsageError, match="No event is called 'run_startd'"):
        checked("run_startd", {})


def test_a_field_that_is_not_in_the_table_is_refused() -> None:
    """What readers were not promised is not written."""
    with pytest.raises(UsageError, match=r"has no field 'token'\. It has: island"):
        checked("island_silent", {"island": "i0", "token": "x"})


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("run_ended", {}, "wants a whole number as 'round', and got NoneType"),
        ("run_ended", {"round": 1.0}, "got float"),
        ("run_ended", {"round": True}, "got bool"),
        ("island_silent", {"island": b"i0"}, "wants text as 'island', and got bytes"),
        ("epoch_set", {"epoch": 1, "values": [1]}, "wants values by name"),
    ],
)
def test_a_value_of_another_kind_is_refused(
    name: str, fields: dict[str, object], said: str
) -> None:
    """Readers get the types that they were promised."""
    with pytest.raises(UsageError, match=said):
        checked(name, fields)


def test_text_is_cut() -> None:
    """A message of any length does not make a line of any length."""
    message = checked("disk_failed", {"message": "x" * 10_000})["message"]

    assert isinstance(message, str)
    assert message == "x" * (MAX_TEXT - 1) + "…"


def test_lists_are_cut() -> None:
    """A thousand missing islands do not make a line of a thousand names."""
    fields = {"fragment": 0, "round": 1, "staged": 2, "missing": ["i" * 999] * 999}

    missing = checked("round_closing", fields)["missing"]

    assert missing == ("i" * (MAX_NAME - 1) + "…",) * MAX_ITEMS


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, None])
def test_a_loss_that_is_no_number_is_none(loss: float | None) -> None:
    """A diverged island is told of, and no line holds what is not JSON."""
    fields = {"island": "i0", "round": 1, "inner_steps": 2, "tokens": 3, "loss": loss}

    assert checked("loss_reported", fields)["loss"] is None


def test_an_optional_field_may_be_absent() -> None:
    """What nobody knew is not in the line."""
    assert dict(checked("run_stopped", {})) == {}


@given(emitted())
def test_whatever_is_emitted_is_one_line_of_json(
    drawn: tuple[str, dict[str, Any]],
) -> None:
    """Values of the right kinds never raise, and always fit on a line."""
    name, fields = drawn

    event = EventBus(unix_s=lambda: 1.0).emit(name, **fields)

    line = json.dumps(event.as_dict(), allow_nan=False)
    assert "\n" not in line
    assert json.loads(line)["event"] == name


def test_secrets_are_blotted_out() -> None:
    """A token or a code that got into a message is not written."""
    token = make_token(Role.OPERATOR)
    code = OneTimeCodes(token).make(now_s=0.0)
    message = f"GET with Bearer {token.reveal()} at atoll://h:1/r,code={code.reveal()}."

    kept = checked("disk_failed", {"message": message})["message"]

    assert isinstance(kept, str)
    assert token.reveal()[8:] not in kept
    assert code.reveal() not in kept
    assert "[secret]" in kept


def test_an_audit_is_an_event() -> None:
    """What security records is emitted as it stands."""
    audit = AuditEvent(
        kind=AuditKind.REQUEST,
        answer=AuditAnswer.NO_TOKEN,
        address="10.0.0.7",
        at_unix_s=1.0,
    )

    event = EventBus().emit("audit", **audit.as_event())

    assert event.fields["answer"] == "no_token"
