"""All that a run owns, in one frozen value."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.errors import AtollWarning, SettingsError
from atoll.fields import shortest_fp32, shown
from atoll.settings import fingerprint, run_file, sections
from atoll.settings.rules import Section, wrong_type

MAX_SINGLE_MOMENTUM = 0.5
"""Above it, rounds of single updates with a buffer of 1 are warned about."""


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

    data: sections.DataSection = field(default_factory=sections.DataSection)
    """How rows of the data are assigned to islands."""

    store: sections.StoreSection = field(default_factory=sections.StoreSection)
    """Runs without a coordinator."""

    limits: sections.LimitsSection = field(default_factory=sections.LimitsSection)
    """Bounds beyond which updates are refused, and the longest waits."""

    def __post_init__(self) -> None:
        for table, section in self._by_table().items():
            if not isinstance(section, run_file.SECTIONS[table]):
                raise wrong_type(table, section, run_file.SECTIONS[table].__name__)
        self._check_sparse()
        self._check_claims()
        if self.sync.is_async:
            self._check_law()
            self._check_single_updates()
        else:
            self._check_no_async()

    def _check_no_async(self) -> None:
        for key, value in fingerprint.non_default({"async": self.asynchronous}).items():
            raise SettingsError(
                f"{key}={shown(value)} has no effect with sync.mode='sync'. "
                "Remove it, or choose mode='async'."
            )

    def _check_law(self) -> None:
        """Refuse settings that have no meaning in asynchronous rounds."""
        if self.outer.optimizer not in ("nesterov", "sgd"):
            raise SettingsError(
                f"outer.optimizer={self.outer.optimizer!r} does not work with "
                "sync.mode='async': delayed Nesterov is defined for nesterov and sgd. "
                "Choose one of them."
            )
        staleness = self.asynchronous.staleness
        if self.outer.merge == "trimmed" and staleness != "none":
            raise SettingsError(
                f"async.staleness={staleness!r} has no meaning with "
                "outer.merge='trimmed': a trimmed mean knows no weights. "
                "Choose staleness='none' or merge='mean'."
            )
        if self.run.decay_round is not None:
            raise SettingsError(
                f"run.decay_round={self.run.decay_round} has no meaning with "
                "sync.mode='async': a round of an asynchronous run has no fixed steps. "
                'Use run.end_tokens and WSD(unit="tokens").'
            )

    def _check_single_updates(self) -> None:
        momentum = self.outer.momentum
        is_single = self.asynchronous.buffer == 1 and self.run.quorum == 1
        if is_single and momentum > MAX_SINGLE_MOMENTUM:
            warnings.warn(
                "async.buffer=1 with run.quorum=1 and "
                f"outer.momentum={shortest_fp32(momentum)}: Nesterov's momentum on "
                "single updates diverged in trials (loss 14.6 against 1.98). "
                "Leave async.buffer unset.",
                AtollWarning,
                stacklevel=4,
            )

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

    def _check_claims(self) -> None:
        if self.data.is_dealt and self.store.decider is not None:
            raise SettingsError(
                f"store.decider={self.store.decider!r} does not work with "
                "data.order='run': claims of rows need a store that can put-if-absent. "
                "Choose another store, or order='islands'."
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

    def require_synchronous(self, host: str) -> None:
        """Return unless rounds take who arrived.

        Raises:
            SettingsError: they do, and nothing closes a round by time in `host`.
        """
        if self.sync.is_async:
            raise SettingsError(
                f"sync.mode='async' does not work in {host}, where no round closes by "
                "time. Join each island to a coordinator, or choose mode='sync'."
            )

    def require_cut_data(self, host: str) -> None:
        """Return unless the run deals rows out.

        Raises:
            SettingsError: it does, and nothing can deal them out in `host`.
        """
        if self.data.is_dealt:
            raise SettingsError(
                f"data.order='run' does not work in {host}, which has no claims of "
                "rows yet. Join each island to a coordinator, or choose "
                "order='islands'."
            )

    @property
    def fingerprint(self) -> str:
        """Hex digest of the settings that never change during a run."""
        return fingerprint.digest(self._by_table())

    def _by_table(self) -> dict[str, Section]:
        return {
            table: getattr(self, attribute)
            for table, attribute in run_file.ATTRIBUTES.items()
        }
