"""The run's settings as an island is told them: every one, set or not set.

Rule 1: each setting that this version knows stands in `settings` or in `not_set`.
Rule 2: one that stands in neither is one the coordinator does not know, and one that
        is unknown here is one the island would not obey: both are refused by name.
Rule 3: nothing is filled in from a default, except in what an earlier version has
        stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from atoll.errors import SettingsError
from atoll.exchange.forms.fields import listed, require_table, text, wrong
from atoll.settings import RunSettings
from atoll.settings.parsing import SECTIONS
from atoll.settings.rules import shown

SETTINGS_KEYS = frozenset({"settings", "not_set"})

_UPGRADE = "Run the same version of Atoll at the coordinator and here."
_MOST_KEYS = 1024
_NOT_SET = listed(text(128), most=_MOST_KEYS)

KNOWN = frozenset(
    f"{table}.{each.name}" for table, kind in SECTIONS.items() for each in fields(kind)
)
"""Every setting there is, by its dotted key."""


def settings_form(settings: RunSettings) -> dict[str, Any]:
    """Return every value that is set, by table, and the names of all others."""
    tables = settings.to_dict()
    return {"settings": tables, "not_set": sorted(KNOWN - set(_dotted(tables)))}


def read_settings(value: object, where: str) -> RunSettings:
    """Return the settings that a coordinator tells.

    Raises:
        SettingsError: one is missing, unknown or wrong; it is named.
        UsageError: this is no form of settings.
    """
    tables, not_set = _read_form(value, where)
    settings = RunSettings.from_dict(tables)
    _require_complete(settings, frozenset(_dotted(tables)), not_set)
    return settings


def read_stored_settings(value: object, where: str) -> RunSettings:
    """Return the settings of a run that an earlier version may have written.

    A setting that it did not know has its default. The run's fingerprint covers all
    that can never change, so that a wrong default of one of those is found by it.

    Raises:
        SettingsError: one is unknown or wrong; it is named.
        UsageError: this is no form of settings.
    """
    return RunSettings.from_dict(_read_form(value, where)[0])


def _read_form(
    value: object, where: str
) -> tuple[dict[str, dict[str, Any]], frozenset[str]]:
    """Return what is set, by table, and the names of what is not."""
    said = require_table(value, where)
    tables = _tables(said.get("settings"), f"{where}.settings")
    not_set = frozenset(_NOT_SET.read(said.get("not_set"), f"{where}.not_set"))
    _require_known(frozenset(_dotted(tables)) | not_set)
    return tables, not_set


def _tables(value: object, where: str) -> dict[str, dict[str, Any]]:
    tables = require_table(value, where)
    for name, values in tables.items():
        for key, each in require_table(values, f"{where}.{shown(name)}").items():
            if each is None:
                raise wrong(f"{where}.{shown(f'{name}.{key}')}", each, "set")
    return tables


def _dotted(tables: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, values in tables.items():
        for key in values:
            yield f"{name}.{key}"


def _require_known(keys: frozenset[str]) -> None:
    for key in sorted(keys - KNOWN):
        raise SettingsError(
            f"The coordinator has a setting {shown(key)}, which is unknown to this "
            f"version of Atoll. {_UPGRADE}"
        )


def _require_complete(
    settings: RunSettings, given: frozenset[str], not_set: frozenset[str]
) -> None:
    """Refuse what would have been filled in, and what is said to be set and is not."""
    for key in sorted(KNOWN - given - not_set):
        raise SettingsError(
            f"The coordinator does not say {key!r}, which this version of Atoll needs. "
            f"{_UPGRADE}"
        )
    in_force = frozenset(_dotted(settings.to_dict()))
    for key in sorted((in_force & not_set) | (given - in_force)):
        raise SettingsError(
            f"The coordinator does not say whether {key!r} is set, and must. {_UPGRADE}"
        )
