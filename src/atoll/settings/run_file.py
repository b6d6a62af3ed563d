"""Run files, dictionaries and `--set` assignments, converted to sections and back.

Rule 1: everything read here may be hostile; its size is judged before it is parsed.
Rule 2: an unknown key is an error that names the nearest known one.
Rule 3: the values themselves are judged by the sections, here as anywhere.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from atoll.errors import SettingsError
from atoll.fields import JsonField, nearest, shown
from atoll.settings import sections
from atoll.settings.rules import Section, written_value, wrong_type

MAX_RUN_FILE_BYTES = 2**20
"""A larger run file is refused unread."""

SECTIONS: dict[str, type[Section]] = {
    "run": sections.RunSection,
    "sync": sections.SyncSection,
    "wire": sections.WireSection,
    "outer": sections.OuterSection,
    "async": sections.AsyncSection,
    "data": sections.DataSection,
    "store": sections.StoreSection,
    "limits": sections.LimitsSection,
}
"""Tables of a run file, in the order in which they are written."""

ATTRIBUTES = {
    table: "asynchronous" if table == "async" else table for table in SECTIONS
}
"""Tables of a run file and their names in Python, where `async` is a keyword."""

_KEYS = {
    table: tuple(field.name for field in fields(section))
    for table, section in SECTIONS.items()
}


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a run file."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RUN_FILE_BYTES + 1)
    except OSError as exc:
        raise SettingsError(
            f"The run file {str(path)!r} cannot be read: {exc.strerror}. "
            "Check the path and its permissions."
        ) from exc
    if len(data) > MAX_RUN_FILE_BYTES:
        raise SettingsError(
            f"The run file {str(path)!r} is larger than {MAX_RUN_FILE_BYTES} bytes. "
            "A run file holds a few lines of settings; check the path."
        )
    return _parse_toml(data, source=f"The run file {str(path)!r}")


def sections_of(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return sections by attribute name; `SettingsError` for an unknown name."""
    if not isinstance(tables, Mapping):
        raise wrong_type("settings", tables, "a table of tables")
    return {
        ATTRIBUTES[table]: SECTIONS[table](**_known_keys(table, values))
        for table, values in _known_tables(tables).items()
    }


def tables_of(by_table: Mapping[str, Section]) -> dict[str, dict[str, Any]]:
    """Return values as tables of a run file, without those that are not set."""
    written = {
        table: {field.name: written_value(section, field) for field in fields(section)}
        for table, section in by_table.items()
    }
    set_values = {
        table: {key: value for key, value in values.items() if value is not None}
        for table, values in written.items()
    }
    return {table: values for table, values in set_values.items() if values}


def nested(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return tables from dotted keys: `{"sync.sync_every": 50}` becomes nested."""
    tables: dict[str, dict[str, Any]] = {}
    for dotted, value in values.items():
        table, dot, key = str(dotted).partition(".")
        if not dot:
            raise _unknown(table)
        tables.setdefault(table, {})[key] = value
    return tables


def parse_assignment(text: str) -> tuple[str, Any]:
    """Return key and value of `sync.sync_every=50`.

    The value is TOML's true, false, number or quoted text; anything else is text
    unchanged, so that `sync.adopt=mix` needs no quotes. `none` is None for a key that
    may be unset, such as `run.end_rounds=none`.
    """
    key, equals, value = text.partition("=")
    if not (equals and key.strip()):
        raise SettingsError(
            f"{shown(text)} is not an assignment. Write KEY=VALUE, for example "
            "sync.sync_every=50."
        )
    key, value = key.strip(), value.strip()
    if value == "none" and _may_be_unset(key):
        return key, None
    return key, _scalar(value)


def _may_be_unset(dotted: str) -> bool:
    """Return whether the value of a key may be None."""
    table, _, key = dotted.partition(".")
    if key not in _KEYS.get(table, ()):
        return False
    declared = {field.name: field for field in fields(SECTIONS[table])}
    rule: JsonField[Any] = declared[key].metadata["rule"]
    try:
        return rule.read(None, dotted) is None
    except SettingsError:
        return False


def _scalar(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = parsed["value"]
    is_scalar = isinstance(value, bool | int | float | str)
    return value if is_scalar and parsed.keys() == {"value"} else text


def _parse_toml(data: bytes, *, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise SettingsError(
            f"{source} is not UTF-8 text: byte {data[exc.start]:#04x} in line {line}. "
            "Save it as UTF-8."
        ) from exc
    except (ValueError, RecursionError) as exc:
        # At the end of a document the parser gives no line.
        last_line = data.count(b"\n") + 1
        lines = "" if " line " in str(exc) else f" (in lines 1 to {last_line})"
        raise SettingsError(
            f"{source} is not valid TOML: {exc}{lines}. Correct that line."
        ) from exc


def _known_tables(tables: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    for table, values in tables.items():
        if table not in SECTIONS:
            raise _unknown(table)
        if not isinstance(values, Mapping):
            raise wrong_type(table, values, "a table of settings")
    return dict(tables)


def _known_keys(table: str, values: Mapping[str, Any]) -> dict[str, Any]:
    for key in values:
        if key not in _KEYS[table]:
            raise _unknown(f"{table}.{key}")
    return dict(values)


def _unknown(name: object) -> SettingsError:
    text = str(name)
    dotted = [f"{table}.{key}" for table, keys in _KEYS.items() for key in keys]
    bare = text.rpartition(".")[2]
    same_key = [key for key in dotted if key.endswith(f".{bare}")]
    candidates = same_key or (dotted if "." in text else list(SECTIONS))
    return SettingsError(
        f"{shown(text)} is not a setting. Did you mean {nearest(text, candidates)!r}?"
    )
