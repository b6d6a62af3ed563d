"""A plan, and what was launched by the same words: they are to be the same thing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.launch import IslandSpec
from atoll.launch.api import Launched, launch_spec, plan_spec
from atoll.launch.base import LaunchPlan
from atoll.launch.launches import LaunchRecords
from atoll.launch.spec import PASS

SECRETS = ("ZED", "HIDDEN", PASS)
"""What every island of `both` is given, by their names."""

PLANNED = "atoll-far-00000000"


@dataclass(frozen=True)
class Both:
    """One plan, and one launch."""

    plan: LaunchPlan
    launched: Launched

    def as_planned(self, form: Any) -> Any:
        """Return what was submitted, under the id that a plan has."""
        return json.loads(json.dumps(form).replace(self.launched.handle.id, PLANNED))


def both(
    engine: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    options: Mapping[str, str] | None = None,
    **fields: Any,
) -> Both:
    """Plan and launch two islands of a run."""
    for name in ("ZED", "HIDDEN"):
        monkeypatch.setenv(name, f"hush-{name}")
    run = str(place / "run")
    atoll.init(run, atoll.RunSettings())
    spec = IslandSpec(
        command=("python", "-c", "print('here')"),
        run=run,
        name="far",
        environment={"A": "b"},
        secrets={"ZED": "env:ZED", "HIDDEN": "env:HIDDEN"},
        **fields,
    )
    plan = plan_spec(engine, 2, spec, options=options)
    launch_records = LaunchRecords(place / "book")
    launched = launch_spec(
        engine, 2, spec, options=options, launch_records=launch_records
    )
    assert "hush" not in plan.text + json.dumps(plan.data)
    return Both(plan, launched)
