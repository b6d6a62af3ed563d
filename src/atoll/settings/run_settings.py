"""All that a run owns, in one frozen value."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.errors import AtollWarning
from atoll.fields import shortest_fp32
from atoll.settings import fingerprint, run_file, sections
from atoll.settings.rules import Section, wrong_type


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings that every island of a run must share; the run owns them.

    Each attribute is one table of the run file, `asynchronous` being `[async]`.
    """

    run: sections.RunSection = field(default_factory=sections.RunSection)
    """The run's name, who takes part, and when it ends."""

    sync: sections.SyncSection = field(default_factory=sections.SyncSection)
    """When fragments are sent, and how an island adopts an outcome."""

    wire: sections.WireSection = field(default_factory=sections.WireSection)
    """The precision of updates and outcomes on the wire."""

    outer: sections.OuterSection = field(default_factory=sections.OuterSection)
    """How a round's updates become the next anchor."""

    asynchronous: sections.AsyncSection = field(default_factory=sections.AsyncSection)
    """Rounds that take who arrived."""

    store: sections.StoreSection = field(default_factory=sections.StoreSection)
    """Runs without a coordinator."""

    limits: sections.LimitsSection = field(default_factory=sections.LimitsSection)
    """Bounds beyond which updates are refused, and the longest waits."""

    def __post_init__(self) -> None:
        for table, section in self._by_table().items():
            if not isinstance(section, run_file.SECTIONS[table]):
                raise wrong_type(table, section, run_file.SECTIONS[table].__name__)
        self._check_sparse()

    def _check_sparse(self) -> None:
        if self.wire.up == "topk-2bit" and self.outer.momentum != 0.0:
            warnings.warn(
                "wire.up='topk-2bit' with "
                f"outer.momentum={shortest_fp32(self.outer.momentum)} diverged in "
                "trials. Choose outer.optimizer='sgd' with outer.lr=1.0, which did "
                "not.",
                AtollWarning,
                stacklevel=4,
            )

    @classmethod
    def from_toml(cls, path: str | Path) -> RunSettings:
        """Read a run file; `SettingsError` names the fault and its line."""
        return cls.from_dict(run_file.read_toml(Path(path)))

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any]) -> RunSettings:
        """Make settings from tables as a run file has them, `async` among them."""
        return cls(**run_file.sections_of(tables))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return every value that is set, as tables of a run file.

        `from_dict` of it equals these settings. Numbers are the shortest that round to
        the fp32 value in force.
        """
        return run_file.tables_of(self._by_table())

    def with_values(self, values: Mapping[str, Any]) -> RunSettings:
        """Return settings that differ in `values`, which has dotted keys.

        A value that equals its default counts as not set, so that a default which
        follows another setting still follows it: `{"wire.up": "e3m0"}` turns error
        feedback on.
        """
        changed = fingerprint.non_default(self._by_table()) | dict(values)
        return RunSettings.from_dict(run_file.nested(changed))

    @property
    def fingerprint(self) -> str:
        """Hex digest of the settings that never change during a run."""
        return fingerprint.digest(self._by_table())

    def _by_table(self) -> dict[str, Section]:
        return {
            table: getattr(self, attribute)
            for table, attribute in run_file.ATTRIBUTES.items()
        }
