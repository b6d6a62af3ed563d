"""The table [data] of a run file."""

from __future__ import annotations

import pytest

from atoll.errors import SettingsError
from atoll.settings import RunSettings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.unit_rows", 64),
        ("data.passes", 0),
        ("data.shuffle", False),
        ("data.seed", 7),
    ],
)
def test_settings_of_dealing_need_a_run_that_deals(key: str, value: object) -> None:
    """A key of [data] says nothing about islands that cut their own share."""
    with pytest.raises(
        SettingsError,
        match=rf"{key}={value} has no effect with data\.order='islands'\. Remove it",
    ):
        RunSettings().with_values({key: value})

    assert RunSettings().with_values({key: value, "data.order": "run"}).data.is_dealt


def test_dealing_needs_a_store_that_can_put_if_absent() -> None:
    """One decider closes rounds, but cannot number the claims of others."""
    with pytest.raises(SettingsError, match=r"decider='i0' does not work with data\.o"):
        RunSettings.from_dict({"data": {"order": "run"}, "store": {"decider": "i0"}})


def test_a_run_that_cuts_its_data_has_the_fingerprint_of_before() -> None:
    """The table [data] changes nothing about a run that does not use it."""
    assert "data" not in RunSettings().to_dict()
    assert RunSettings().fingerprint == RunSettings.from_dict({"data": {}}).fingerprint
