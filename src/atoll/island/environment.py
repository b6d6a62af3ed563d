"""What an island reads from its environment: addresses and secrets, nothing else."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import UsageError
from atoll.security import credentials_directory


@dataclass(frozen=True, kw_only=True)
class CredentialPaths:
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


@dataclass(frozen=True, kw_only=True)
class DefinitionPolicy:
    """Where models' definitions are put, and whose code may run."""

    staged: Path
    """Of every run, by digest."""

    trusted: Path
    """What this user has consented to, by digest."""

    consent: str | None = None
    """By ATOLL_TRUST_CODE: a digest, or "none" when somebody was asked and said no."""

    rank: int = 0
    """Which of an island's processes this is."""


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


def surroundings_from_environment() -> CredentialPaths:
    """Return where this user's credentials are.

    Raises:
        UsageError: ATOLL_HEARTBEAT_S is no number.
    """
    xdg = os.environ.get("XDG_CONFIG_HOME")
    credentials = credentials_directory(Path.home(), xdg_config_home=xdg)
    return CredentialPaths(
        credentials=credentials,
        keys=credentials.parent / "keys",
        token_file=_path("ATOLL_TOKEN_FILE"),
        certificate=_path("ATOLL_CERTIFICATE"),
        certificate_key=_path("ATOLL_CERTIFICATE_KEY"),
        heartbeat_s=_seconds("ATOLL_HEARTBEAT_S"),
    )


def definitions_from_environment() -> DefinitionPolicy:
    """Return where definitions are, and what this user lets run of them."""
    rank = os.environ.get("RANK", "")  # as torchrun says it
    return DefinitionPolicy(
        staged=_cache() / "atoll" / "bundles",
        trusted=surroundings_from_environment().credentials.parent / "trusted",
        consent=os.environ.get("ATOLL_TRUST_CODE") or None,
        rank=int(rank) if rank.isdecimal() else 0,
    )


def _cache() -> Path:
    said = os.environ.get("XDG_CACHE_HOME")
    # As its specification has it, a relative path is not heeded.
    return Path(said) if said and Path(said).is_absolute() else Path.home() / ".cache"


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
