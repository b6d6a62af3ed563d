"""docs/settings.md and `--settings` have every setting, with its value and default."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path

import pytest

import atoll
from atoll.errors import UsageError
from atoll.settings import EPOCH_KEYS, RunSettings
from atoll.settings.reference import (
    NEVER,
    NOT_SET,
    OTHER_NAMES,
    PROJECTS,
    page,
    references,
    summary,
    values_of,
)
from atoll.settings.run_file import SECTIONS
from tests.cli import stores

KEYS = {
    f"{table}.{declared.name}"
    for table, kind in SECTIONS.items()
    for declared in fields(kind)
}


def test_the_page_is_up_to_date() -> None:
    """Write it again with `python -m atoll.settings.reference > docs/settings.md`."""
    assert (Path(__file__).parents[1] / "docs/settings.md").read_text() == page()


def test_every_setting_is_listed_with_all_its_cells() -> None:
    """Each key once, with values, a default, a meaning, and when it may change."""
    assert [row.key for row in references()] == list(
        dict.fromkeys(row.key for row in references())
    )
    assert {row.key for row in references()} == KEYS
    for row in references():
        assert row.values, row.key
        assert row.default, row.key
        assert row.meaning.endswith("."), row.key
        assert (row.changes == NEVER) == (row.key not in EPOCH_KEYS), row.key


def test_names_of_other_projects_are_of_settings_that_exist() -> None:
    """A renamed key would lose its names."""
    assert set(OTHER_NAMES) <= KEYS
    assert {name for names in OTHER_NAMES.values() for name in names} == set(PROJECTS)


def test_values_that_differ_from_their_defaults_come_first() -> None:
    """Also defaults that follow another setting: e3m0 turns error feedback on."""
    settings = RunSettings.from_dict({"wire": {"up": "e3m0"}, "run": {"quorum": 2}})
    values = {row.key: row for row in values_of(settings)}
    first = [row.key for row in values_of(settings) if not row.is_default]

    assert first == ["run.quorum", "wire.up"]
    assert [row.key for row in values_of(settings)][:2] == first
    assert set(values) == KEYS
    feedback = values["wire.error_feedback"]
    assert (feedback.value, feedback.default) == ("true", "true")
    assert values["run.end_rounds"].value == NOT_SET
    assert (values["outer.lr"].value, values["outer.lr"].default) == ("0.7", "0.7")


def test_a_run_tells_its_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From its address alone; an island logs all of them once when it joins."""
    url = stores.made(tmp_path / "run", end_rounds=2)
    settings = stores.settings(end_rounds=2)

    assert atoll.settings_of(url) == settings
    with caplog.at_level(logging.INFO, logger="atoll"):
        stores.Trained(url).wait()
    joined = [text for text in caplog.messages if "sync.sync_every=4" in text]
    assert len(joined) == 2
    assert all(summary(settings) in text for text in joined)


def test_an_unknown_run_is_refused() -> None:
    """The message has the name, and the ways to give a run."""
    with pytest.raises(UsageError, match="No run is called 'nowhere'"):
        atoll.settings_of("nowhere")
