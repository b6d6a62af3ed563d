"""Which settings make a run the run it is, and their digest.

The digest covers the schema version and the immutable keys that differ from their
defaults, one line each in order of key. So a later version may add a key without
changing the fingerprint of a run that does not set it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from atoll.settings.rules import Section, unset_value
from atoll.settings.sections import LimitsSection

SCHEMA_VERSION = 1
"""Raised when a default or the meaning of a key changes."""

EPOCH_KEYS = frozenset(
    {
        "outer.lr",
        "outer.momentum",
        "run.quorum",
        "run.patience",
        "run.end_rounds",
        "run.end_tokens",
        "run.decay_round",
        *(f"limits.{field.name}" for field in fields(LimitsSection)),
    }
)
"""Settings that may change during a run; each change makes a new epoch."""


def digest(by_table: Mapping[str, Section]) -> str:
    """Return the SHA-256, in hex, of the canonical lines described above."""
    lines = [f"schema={SCHEMA_VERSION}"]
    lines += [
        f"{key}={_canonical(value)}"
        for key, value in sorted(non_default(by_table).items())
        if key not in EPOCH_KEYS
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def non_default(by_table: Mapping[str, Section]) -> dict[str, Any]:
    """Return dotted keys and values that differ from their defaults."""
    return {
        f"{table}.{field.name}": getattr(section, field.name)
        for table, section in by_table.items()
        for field in fields(section)
        if getattr(section, field.name) != unset_value(section, field)
    }


def _canonical(value: float | str) -> str:
    # A float's hexadecimal form is exact and leaves no choice of digits.
    return value.hex() if isinstance(value, float) else json.dumps(value)
