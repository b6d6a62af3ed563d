"""Every setting with its values, default, meaning, and its name in other projects.

Values are the words of the rule that checks them, and meanings the docstrings of the
sections: neither is written twice. `docs/settings.md` is `page()`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from atoll.errors import SettingsError
from atoll.settings import sections
from atoll.settings.fingerprint import EPOCH_KEYS
from atoll.settings.rules import Section, unset_value
from atoll.settings.run_file import ATTRIBUTES, SECTIONS
from atoll.settings.run_settings import RunSettings

NEVER, IMMEDIATELY, NEXT_ROUND = (
    "never",
    "immediately",
    "from each fragment's next round",
)
NOT_SET = "not set"

OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "sync.sync_every": {
        "MaxText": "`diloco_sync_period`",
        "torchft": "`sync_every`",
        "Forgather": "`--sync-every`",
        "OpenDiLoCo": "`hv.local_steps`",
    },
    "sync.num_fragments": {
        "MaxText": "`num_diloco_fragments`",
        "torchft": "the list of model fragments",
        "Forgather": "`--num-fragments`",
    },
    "sync.fragment_order": {"MaxText": "`use_sequential_layers`"},
    "sync.rest": {"MaxText": "always `own`: its fragment 0"},
    "sync.overlap_steps": {
        "MaxText": "`num_communication_overlapping_steps`",
        "torchft": "`fragment_sync_delay`",
    },
    "sync.keep_local": {
        "MaxText": "`communication_overlapping_alpha`",
        "torchft": "`fragment_update_alpha`",
    },
    "sync.mode": {
        "Forgather": "`--async`",
        "OpenDiLoCo": "`hv.all_reduce_strategy`, `NO_WAIT`",
    },
    "sync.dynamic_local_updates": {"Forgather": "`--dylu`"},
    "wire.up": {
        "torchft": "`should_quantize`",
        "Forgather": "`upload_dtype`",
        "OpenDiLoCo": "`hv.hivemind_compression`",
    },
    "wire.down": {"Forgather": "`download_dtype`"},
    "outer.optimizer": {
        "MaxText": "always `nesterov`",
        "torchft": "the outer optimizer object",
        "Forgather": "`--no-nesterov`",
        "OpenDiLoCo": "always `nesterov`",
    },
    "outer.lr": {
        "MaxText": "`diloco_outer_lr`",
        "torchft": "of the outer optimizer object",
        "Forgather": "`--outer-lr`",
        "OpenDiLoCo": "`hv.outer_lr`",
    },
    "outer.momentum": {
        "MaxText": "`diloco_outer_momentum`",
        "torchft": "of the outer optimizer object",
        "Forgather": "`--outer-momentum`",
        "OpenDiLoCo": "always 0.9",
    },
    "run.start_islands": {
        "MaxText": "`dcn_diloco_parallelism`",
        "torchft": "`min_replica_size`",
        "Forgather": "`--num-workers`, which does not wait",
        "OpenDiLoCo": "`hv.galaxy_size`, which does not wait",
    },
    "limits.deadline_max_s": {
        "torchft": "`--join_timeout_ms` of its lighthouse",
        "OpenDiLoCo": "`hv.timeout_waiting_for_peers`",
    },
    "run.quorum": {"torchft": "`min_replica_size`", "Forgather": "`--min-workers`"},
    "run.end_tokens": {"Forgather": "`--token-budget`"},
    "async.buffer": {"Forgather": "`--dn-buffer-size`"},
    "async.grace_s": {"Forgather": "`--grace-period`"},
}
"""By key and project; a missing one has no such setting."""


@dataclass(frozen=True)
class SettingReference:
    """One setting, as people look it up."""

    key: str
    values: str
    default: str
    meaning: str
    changes: str
    """When a change takes effect in a run."""

    other_names: Mapping[str, str]


@dataclass(frozen=True)
class SettingValue:
    """One setting of a run, with its default."""

    key: str
    written: object
    """The value as JSON has it; None: not set."""

    written_default: object
    changes: str

    @property
    def value(self) -> str:
        return _text(self.written)

    @property
    def default(self) -> str:
        return _text(self.written_default)

    @property
    def is_default(self) -> bool:
        return self.value == self.default


@cache
def references() -> tuple[SettingReference, ...]:
    """Return every setting, in the order of a run file."""
    return tuple(
        SettingReference(
            key=f"{table}.{declared.name}",
            values=_values(table, declared),
            default=_default(table, declared),
            meaning=_meanings()[kind.__name__, declared.name],
            changes=_changes(f"{table}.{declared.name}"),
            other_names=OTHER_NAMES.get(f"{table}.{declared.name}", {}),
        )
        for table, kind, declared in _declared()
    )


def values_of(settings: RunSettings) -> tuple[SettingValue, ...]:
    """Return every value of a run; those that differ from their defaults first."""
    values = []
    for table, _, declared in _declared():
        key = f"{table}.{declared.name}"
        section: Section = getattr(settings, ATTRIBUTES[table])
        value = _written(declared, getattr(section, declared.name))
        default = _written(declared, unset_value(section, declared))
        values.append(SettingValue(key, value, default, _changes(key)))
    return tuple(sorted(values, key=lambda row: row.is_default))


def summary(settings: RunSettings) -> str:
    """Return every value in one line, those that differ from their defaults first."""
    values = values_of(settings)
    changed = [f"{row.key}={row.value}" for row in values if not row.is_default]
    others = [f"{row.key}={row.value}" for row in values if row.is_default]
    return f"{', '.join(changed) or 'none'}; at their defaults: {', '.join(others)}"


def _declared() -> Iterator[tuple[str, type[Any], Field[Any]]]:
    for table, kind in SECTIONS.items():
        for declared in fields(kind):
            yield table, kind, declared


def _values(table: str, declared: Field[Any]) -> str:
    """Return the accepted values: the part of the rule's error after "must be"."""
    try:
        declared.metadata["rule"].read([], f"{table}.{declared.name}")
    except SettingsError as exc:
        _, _, accepted = str(exc).partition(" must be ")
        return accepted.split(". ")[0].removesuffix(".").removeprefix("one of ")
    raise AssertionError(f"{table}.{declared.name} accepts a list")


def _default(table: str, declared: Field[Any]) -> str:
    if "default" in declared.metadata:
        return _text(unset_value(SECTIONS[table](), declared)) + ", by other settings"
    rule = declared.metadata["rule"]
    return _text(rule.read(declared.default, declared.name))


def _written(declared: Field[Any], value: object) -> object:
    """Return a value as JSON has it, fp32 numbers in their shortest form."""
    written = None if value is None else declared.metadata["rule"].write(value)
    plain = value if written is None else written
    return float(f"{plain:.7g}") if isinstance(plain, float) else plain


def _text(value: object) -> str:
    """Return a value as a run file has it; fp32 numbers in their shortest form."""
    if isinstance(value, float):
        return f"{value:.7g}"
    if value is None:
        return NOT_SET
    return value if isinstance(value, str) else json.dumps(value)


def _changes(key: str) -> str:
    if key not in EPOCH_KEYS:
        return NEVER
    return NEXT_ROUND if key.startswith("outer.") else IMMEDIATELY


@cache
def _meanings() -> dict[tuple[str, str], str]:
    """Return the docstring of each field of each section."""
    tree = ast.parse(Path(sections.__file__).read_text())
    meanings = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        for statement, following in zip(node.body, node.body[1:], strict=False):
            is_field = isinstance(statement, ast.AnnAssign)
            if is_field and isinstance(following, ast.Expr):
                assert isinstance(statement, ast.AnnAssign)
                assert isinstance(statement.target, ast.Name)
                assert isinstance(following.value, ast.Constant)
                text = re.sub(r"\s+", " ", str(following.value.value)).strip()
                meanings[node.name, statement.target.id] = text
    return meanings


PROJECTS = ("MaxText", "torchft", "Forgather", "OpenDiLoCo")

_HEAD = """# Settings

This page is generated: `python -m atoll.settings.reference` prints it.
A run owns these settings; islands take them over and cannot change them.
`atoll status RUN --settings` shows those of a run.
`atoll.settings_of(run)` returns them.
`atoll control RUN set KEY=VALUE` changes one that may change, in a new epoch.
"""

_OTHERS = """
## Names in other projects

A missing name means that the project has no such setting, as far as its sources show.

| setting | MaxText | torchft | Forgather | OpenDiLoCo |
|---|---|---|---|---|
"""


def page() -> str:
    """Return the page of all settings."""
    parts = [_HEAD]
    for table, kind in SECTIONS.items():
        summary_line, *_ = (kind.__doc__ or "").splitlines()
        _, _, title = summary_line.partition(": ")
        parts.append(f"\n## `[{table}]`\n\n{title[:1].upper()}{title[1:]}\n\n")
        parts.append(
            "| key | values | default | changes | meaning |\n|---|---|---|---|---|\n"
        )
        for row in references():
            if row.key.startswith(f"{table}."):
                cells = (
                    f"`{row.key}`",
                    row.values,
                    row.default,
                    row.changes,
                    row.meaning,
                )
                parts.append(f"| {' | '.join(cells)} |\n")
    parts.append(_OTHERS)
    for row in references():
        if row.other_names:
            names = [row.other_names.get(project, "") for project in PROJECTS]
            parts.append(f"| `{row.key}` | {' | '.join(names)} |\n")
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
