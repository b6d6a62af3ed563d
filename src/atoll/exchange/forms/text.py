"""JSON from outside: judged before it is parsed, and parsed without guessing.

Rule 1: size, depth and the number of values are counted in the bytes as they came,
        before anything is made of them.
Rule 2: a key stands in a table once, and a number is finite.
Rule 3: no message repeats the text itself, which may hold an island's key.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Any, NoReturn

from atoll.errors import UsageError
from atoll.settings.rules import shown
from atoll.wire.digests import Bytes, view_of

MAX_SMALL_BYTES = 2**20
"""Of JSON whose size does not depend on the model."""

MAX_LARGE_BYTES = 2**23
"""Of JSON with a row for each tensor or each fragment."""

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


def dump(value: object, *, what: str, most: int = MAX_SMALL_BYTES) -> bytes:
    """Return compact JSON in ASCII.

    Raises:
        UsageError: it is longer than a reader would take.
    """
    data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(data) > most:
        raise UsageError(
            f"The {what} takes {len(data)} bytes of JSON, above the limit of {most}. "
            "Use fewer tensors or fragments, or shorter names."
        )
    return data


def load(data: Bytes, *, what: str, most: int = MAX_SMALL_BYTES) -> object:
    """Return the value that JSON from outside stands for.

    Raises:
        UsageError: it is too large or too deep, or no JSON; nothing else is raised.
    """
    view = view_of(data)
    if len(view) > most:
        raise UsageError(
            f"The {what} has {len(view)} bytes, above the limit of {most}. {SEE}"
        )
    raw = view.tobytes()
    _judge_nesting(raw, what)
    try:
        value: object = json.loads(
            raw.decode(), object_pairs_hook=_once, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as exc:
        raise UsageError(
            f"The {what} is no JSON: {exc.msg} at character {exc.pos}. {SEE}"
        ) from exc
    except (ValueError, RecursionError) as exc:
        # Bytes that are not UTF-8, or an integer of thousands of digits.
        raise UsageError(f"The {what} is no JSON that can be read. {SEE}") from exc
    return value


def _judge_nesting(raw: bytes, what: str) -> None:
    """Count before parsing: the parser recurses, and a thread's stack may be small."""
    bare = _STRING.sub(b"", raw)
    brackets = bare.translate(None, _OTHERS)
    for what_counts, count, most in (
        ("lists and tables", brackets.count(b"[") + brackets.count(b"{"), MAX_LISTS),
        ("commas", bare.count(b","), MAX_COMMAS),
    ):
        if count > most:
            raise UsageError(
                f"The {what} has {count} {what_counts}, above the limit of {most}. "
                f"{SEE}"
            )
    depth = max(accumulate(map(_STEP.__getitem__, brackets)), default=0)
    if depth > MAX_DEPTH:
        raise UsageError(
            f"The {what} is nested {depth} deep, above the limit of {MAX_DEPTH}. {SEE}"
        )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise UsageError(f"The key {shown(key)} stands twice in one table. {SEE}")
        found[key] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise UsageError(f"{name} is no number that JSON can say. {SEE}")
