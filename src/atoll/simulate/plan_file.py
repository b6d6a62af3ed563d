"""Between plans of faults and TOML: one `[[fault]]` table for each fault.

    [[fault]]
    kind = "kill"
    process = "i2"
    at_s = 3.0
    back_after_s = 5.0

Rule 1: everything read here may be hostile; its size is judged before it is parsed.
Rule 2: an unknown key is an error that names the nearest known one.
Rule 3: the values themselves are judged by the faults, here as anywhere.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from atoll.errors import UsageError
from atoll.settings.rules import nearest, shown
from atoll.simulate.faults import KINDS, Fault

MAX_FILE_BYTES = 2**20
MAX_FAULTS = 10_000


def written(faults: Iterable[Fault]) -> str:
    """Return the faults as TOML; `parsed` of it gives equal ones."""
    return "\n".join(
        "".join(
            f"{line}\n"
            for line in (
                "[[fault]]",
                f"kind = {_literal(fault.kind)}",
                *(f"{key} = {_literal(v)}" for key, v in fault.values().items()),
            )
        )
        for fault in faults
    )


def read(path: Path) -> tuple[Fault, ...]:
    """Return the faults of a file; `UsageError` says what is wrong with it."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise UsageError(
            f"The fault plan {str(path)!r} cannot be read: {exc.strerror}. "
            "Check the path and its permissions."
        ) from exc
    return parsed(data, where=f"The fault plan {str(path)!r}")


def parsed(data: bytes, *, where: str = "The fault plan") -> tuple[Fault, ...]:
    """Return the faults that `data` writes as TOML."""
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(
            f"{where} is larger than {MAX_FILE_BYTES} bytes. "
            "A plan holds a few tables; check the path."
        )
    try:
        tables = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"{where} is not valid TOML: {exc}. Correct it.") from exc
    rows = tables.pop("fault", [])
    if tables or not isinstance(rows, list) or len(rows) > MAX_FAULTS:
        keys = ", ".join(shown(key) for key in list(tables)[:3]) or "no other key"
        raise UsageError(
            f"{where} must hold at most {MAX_FAULTS} [[fault]] tables and nothing "
            f"else, but has {keys} beside them, or too many. Keep only [[fault]]."
        )
    return tuple(
        _fault(row, where=f"{where}, fault {at}") for at, row in enumerate(rows, 1)
    )


def _fault(row: Any, *, where: str) -> Fault:
    if not isinstance(row, dict):
        raise UsageError(f"{where}: {shown(row)} is not a table. Write [[fault]].")
    values = dict(row)
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise UsageError(
            f"{where}: kind={shown(kind)} is not a kind of fault. "
            f"Did you mean {nearest(str(kind), KINDS)!r}?"
        )
    _check_keys(KINDS[kind], values, where=where)
    try:
        return KINDS[kind](**values)
    except UsageError as exc:
        raise UsageError(f"{where}: {exc}") from exc


def _check_keys(kind: type[Fault], values: dict[str, Any], *, where: str) -> None:
    known = {each.name: each.default is MISSING for each in fields(kind)}
    for key in values:
        if key not in known:
            raise UsageError(
                f"{where}: a {kind.kind} has no {shown(key)}. "
                f"Did you mean {nearest(key, known)!r}?"
            )
    for key, is_needed in known.items():
        if is_needed and key not in values:
            raise UsageError(f"{where}: a {kind.kind} needs {key!r}. Add it.")


def _literal(value: object) -> str:
    """Return a value as TOML: names are printable, so JSON's text is TOML's."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
