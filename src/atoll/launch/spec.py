"""What an island is to be, said once for every engine.

Rule 1: there is no field for the run's settings: the run owns them, and an island is
given a run and nothing that must match.
Rule 2: a secret is named, never written: `references` says how.
Rule 3: what no engine could do is refused here; what one cannot, by that one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.errors import UsageError
from atoll.launch.command import check_command
from atoll.launch.references import check_reference

MAX_ISLANDS = 4096
MAX_NAME = 40
"""Characters: with an index behind, a label of DNS takes it, and so does any engine."""

OURS = "ATOLL_"
MAY_BE_GIVEN = frozenset(
    {
        "ATOLL_CERTIFICATE",
        "ATOLL_CERTIFICATE_KEY",
        "ATOLL_HEARTBEAT_S",
        "ATOLL_TOKEN_FILE",
        "ATOLL_TRUST_CODE",
    }
)
"""Variables of ours that say where something is at the island's place, or whose code
may run there."""

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|(API|ACCESS|PRIVATE)_?KEY)$", re.I)
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one island needs of its place; what is None is left to the engine."""

    cpus: float | None = None
    memory_bytes: int | None = None
    accelerators: int = 0
    """GPUs, or whatever `accelerator` names."""

    accelerator: str | None = None
    """Which, in the engine's words: `a100`, `l40s`, `v5e`."""

    time_limit_s: float | None = None
    """After which the engine ends it; islands are told before and leave cleanly."""

    def __post_init__(self) -> None:
        for name in ("cpus", "memory_bytes", "time_limit_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name}={value} is nothing to run with. Give more.")
        if self.accelerators < 0:
            raise UsageError(f"accelerators={self.accelerators} is less than none.")
        if self.accelerator is not None and self.accelerators == 0:
            raise UsageError(
                f"accelerator={self.accelerator!r} is named, and accelerators=0. Say "
                "how many an island has."
            )


MAX_DOUBLED = 100
"""How often a pause is doubled at most: any is longer than the longest then."""


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """When an island whose command failed is started again, and when no more.

    An engine that counts in its own way does what comes nearest, and its page says so.
    """

    most: int = 100
    first_pause_s: float = 1.0
    """Before the first restart; doubled each time, until a life has lasted."""

    longest_pause_s: float = 60.0
    at_once_s: float = 20.0
    """A life that fails within this has died at once."""

    most_at_once: int = 3
    """Deaths at once, one after another, after which it is left dead."""

    def __post_init__(self) -> None:
        if self.most < 0 or self.most_at_once < 1:
            raise UsageError(
                f"most={self.most}, most_at_once={self.most_at_once}: an island may "
                "be restarted 0 times or more, and dies at once after 1 or more."
            )
        if not 0 <= self.first_pause_s <= self.longest_pause_s < math.inf:
            raise UsageError(
                f"first_pause_s={self.first_pause_s} must be within 0 and "
                f"longest_pause_s={self.longest_pause_s}."
            )

    def pause_s(self, num_at_once: int) -> float:
        """Return how long to wait after so many deaths at once, one after another."""
        doubled = min(max(0, num_at_once - 1), MAX_DOUBLED)
        return float(min(self.first_pause_s * 2.0**doubled, self.longest_pause_s))


@dataclass(frozen=True, kw_only=True)
class IslandSpec:
    """What each island of a launch is; they differ in their index alone."""

    command: tuple[str, ...]
    """A script, `-m` and a module, `module:function`, or a program; and arguments."""

    run: str
    """The run's URL: a coordinator's, or a store's. It must be the same seen from
    where the islands are."""

    name: str
    """Island 3 is `name-3`."""

    processes: int = 1
    """Of one island; more than one are started by torchrun."""

    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Variables by name, and where each one's value is: see `references`."""

    directory: str | None = None
    """Where the command starts at the island's place; None is the engine's usual."""

    code: str | None = None
    """The digest of code that was stored with the run, which is fetched to start in;
    None if it is there already."""

    image: str | None = None
    """A container's, with Python, Atoll and what the command needs in it."""

    requirements: tuple[str, ...] = ()
    """What pip is to install where there is no image of one's own."""

    resources: Resources = Resources()
    restarts: Restarts = Restarts()

    def __post_init__(self) -> None:
        check_command(self.command, processes=self.processes)
        check_name(self.name)
        if not self.run:
            raise UsageError("No run was given. Islands need one: a URL or a path.")
        for variable in self.environment:
            _check_variable(variable)
            _require_no_secret(variable)
        for variable, reference in self.secrets.items():
            _check_variable(variable)
            check_reference(variable, reference)
        if both := sorted(self.environment.keys() & self.secrets.keys()):
            raise UsageError(f"{both[0]} is given as a secret and in the open.")
        if self.image is not None and self.requirements:
            raise UsageError(
                f"image={self.image!r} and requirements={self.requirements} exclude "
                "each other: an image has what it needs. Leave one out."
            )
        if self.code is not None and not _DIGEST.fullmatch(self.code):
            raise UsageError(f"code={self.code!r} is no digest of 64 hex digits.")

    def island(self, index: int) -> str:
        """Return the name of an island: the same in all of its lives."""
        return f"{self.name}-{index}"


def check_name(name: str) -> str:
    """Return a name of a launch.

    Raises:
        UsageError: it is none.
    """
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise UsageError(
            f"name={name[:80]!r} cannot begin the names of islands: it has to be lower "
            f"case letters, digits and hyphens, a letter first, at most {MAX_NAME}."
        )
    return name


def _check_variable(variable: str) -> None:
    if not _VARIABLE.fullmatch(variable):
        raise UsageError(f"{variable[:80]!r} is no name of an environment variable.")
    if variable.startswith(OURS) and variable not in MAY_BE_GIVEN:
        raise UsageError(
            f"{variable} cannot be given: the launcher sets what an island is told, "
            "and the run owns its settings. Change those in the run file."
        )


def _require_no_secret(variable: str) -> None:
    if variable not in MAY_BE_GIVEN and _SECRET.search(variable):
        raise UsageError(
            f"{variable} looks like a secret, which is never given by value. Say where "
            f"it is: --secret {variable}=env:{variable}, or file:PATH."
        )
