"""A plan as text: what `--dry-run` prints where an engine has no form of its own."""

from __future__ import annotations

import json
from typing import Any

from atoll.launch.base import Plan


def as_json(data: Any) -> Plan:
    """Return a plan that is printed as JSON, for people and for `jq`."""
    return Plan(data, json.dumps(data, indent=2) + "\n")
