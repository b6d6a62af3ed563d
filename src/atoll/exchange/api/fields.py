"""JSON of the HTTP API, parsed without guessing, and the field language of its forms.

Rule 1: size, depth and the number of values are counted in the raw bytes, before
        they are parsed.
Rule 2: a table has each key once, and a number is finite.
Rule 3: no message repeats the text itself, which may hold an island's key.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Any, NoReturn

from atoll.errors import UsageError
from atoll.fields import FieldLanguage, JsonField, shown
from atoll.wire.digests import Bytes, view_of
from atoll.wire.roster import name_fault, new_name_fault

MAX_SMALL_BYTES = 2**20
"""Limit of JSON whose size does not depend on the model."""

MAX_LARGE_BYTES = 2**23
"""Limit of JSON with a row for each tensor or each fragment."""

MAX_DEPTH = 8
MAX_LISTS = 2**18
"""Lists and tables in one text: an empty one takes 2 bytes here, and 56 in memory."""

MAX_COMMAS = 2**20
"""One less than values: a short number takes 4 bytes here, and 32 in memory."""

SEE = "docs/http.md describes the form; run the same version of Atoll on both sides."

# Possessive, and the last quote optional, so that hostile text costs one pass.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_OTHERS = bytes(set(range(256)) - _STEP.keys())


def dump(value: object, *, name: str, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
    """Return compact JSON in ASCII.

    Raises:
        UsageError: it is longer than a reader accepts.
    """
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(data) > max_bytes:
        raise UsageError(
            f"The {name} takes {len(data)} bytes of JSON, above the limit of "
            f"{max_bytes}. "
            "Use fewer tensors or fragments, or shorter names."
        )
    return data


def load(data: Bytes, *, name: str, max_bytes: int = MAX_SMALL_BYTES) -> object:
    """Return the value of JSON that another process sent.

    Raises:
        UsageError: it is too large, too deep or invalid; no other error is raised.
    """
    view = view_of(data)
    if len(view) > max_bytes:
        raise UsageError(
            f"The {name} has {len(view)} bytes, above the limit of {max_bytes}. {SEE}"
        )
    raw = view.tobytes()
    _judge_nesting(raw, name)
    try:
        value: object = json.loads(
            raw.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as exc:
        raise UsageError(
            f"The {name} is no JSON: {exc.msg} at character {exc.pos}. {SEE}"
        ) from exc
    except (ValueError, RecursionError) as exc:
        # Bytes that are not UTF-8, or an integer of thousands of digits.
        raise UsageError(f"The {name} is no JSON that can be read. {SEE}") from exc
    return value


def _judge_nesting(raw: bytes, name: str) -> None:
    """Count before parsing: the parser recurses, and a thread's stack may be small."""
    bare = _STRING.sub(b"", raw)
    brackets = bare.translate(None, _OTHERS)
    for unit, count, limit in (
        ("lists and tables", brackets.count(b"[") + brackets.count(b"{"), MAX_LISTS),
        ("commas", bare.count(b","), MAX_COMMAS),
    ):
        if count > limit:
            raise UsageError(
                f"The {name} has {count} {unit}, above the limit of {limit}. {SEE}"
            )
    depth = max(accumulate(map(_STEP.__getitem__, brackets)), default=0)
    if depth > MAX_DEPTH:
        raise UsageError(
            f"The {name} is nested {depth} deep, above the limit of {MAX_DEPTH}. {SEE}"
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise UsageError(f"The key {shown(key)} is in one table twice. {SEE}")
        fields[key] = value
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise UsageError(f"{name} is no number of JSON. {SEE}")


LANGUAGE = FieldLanguage(remedy=SEE)
"""The rules of every form that another process sends, or has stored."""

wrong, require_table = LANGUAGE.wrong, LANGUAGE.require_table
integer, number, text, hexed = (
    LANGUAGE.integer,
    LANGUAGE.number,
    LANGUAGE.text,
    LANGUAGE.hexed,
)
choice, option, maybe = LANGUAGE.choice, LANGUAGE.option, LANGUAGE.maybe
listed, row, table = LANGUAGE.listed, LANGUAGE.row, LANGUAGE.table
FLAG = LANGUAGE.flag()


def require_name(value: object, path: str) -> str:
    """Return the name of an island or run, if it is valid in a frame."""
    if not isinstance(value, str):
        raise wrong(path, value, "a name")
    if len(value) > 128:
        raise wrong(path, value, "a name of at most 128 bytes")
    if fault := name_fault(value, field=path):
        raise UsageError(f"{fault}. Choose another name.")
    return value


def require_target_name(value: object, path: str) -> str:
    """Return the name of an island, if it is valid in the path of a request."""
    name = require_name(value, path)
    if fault := new_name_fault(name, field=path):
        raise UsageError(f"{fault}. Choose another name.")
    return name


NAME = JsonField(str, require_name)
