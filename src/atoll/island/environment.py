"""What an island reads from its environment: addresses and secrets, nothing else."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import UsageError
from atoll.security import credentials_directory


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Where an island's credentials are."""

    credentials: Path
    """The user's own, by run."""

    keys: Path
    """Of the islands that this user has started."""

    token_file: Path | None = None
    certificate: Path | None = None
    """The island's own, for a coordinator that asks for one."""

    certificate_key: Path | None = None
    heartbeat_s: float | None = None


def run_from_environment() -> str:
    """Return the run named by ATOLL_RUN.

    Raises:
        UsageError: the variable is not set.
    """
    run = os.environ.get("ATOLL_RUN", "")
    if not run:
        raise UsageError(
            "No run was given and ATOLL_RUN is not set. Pass run=..., or set "
            'ATOLL_RUN; "none" trains alone.'
        )
    return run


def island_from_environment() -> str | None:
    """Return the island's name by ATOLL_ISLAND, or None to let the run choose."""
    return os.environ.get("ATOLL_ISLAND") or None


def surroundings_from_environment() -> Surroundings:
    """Return where this user's credentials are.

    Raises:
        UsageError: ATOLL_HEARTBEAT_S is no number.
    """
    xdg = os.environ.get("XDG_CONFIG_HOME")
    credentials = credentials_directory(Path.home(), xdg_config_home=xdg)
    return Surroundings(
        credentials=credentials,
        keys=credentials.parent / "keys",
        token_file=_path("ATOLL_TOKEN_FILE"),
        certificate=_path("ATOLL_CERTIFICATE"),
        certificate_key=_path("ATOLL_CERTIFICATE_KEY"),
        heartbeat_s=_seconds("ATOLL_HEARTBEAT_S"),
    )


def _path(name: str) -> Path | None:
    said = os.environ.get(name)
    return Path(said) if said else None


def _seconds(name: str) -> float | None:
    said = os.environ.get(name)
    if not said:
        return None
    try:
        return float(said)
    except ValueError as exc:
        raise UsageError(f"{name}={said!r} is no number of seconds.") from exc
