"""The environment variables of an island: addresses and secrets, nothing else."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import UsageError
from atoll.security import credentials_directory


@dataclass(frozen=True, kw_only=True)
class CredentialPaths:
    """The files of an island's credentials, and its heartbeat interval."""

    credentials: Path
    """The user's credentials, by run."""

    keys: Path
    """The keys of the islands that this user has started."""

    token_file: Path | None = None
    certificate: Path | None = None
    """The island's certificate, for a coordinator that requires one."""

    certificate_key: Path | None = None
    heartbeat_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class DefinitionPolicy:
    """The directories of model definitions, and the consent to run their code."""

    staged: Path
    """Bundles of all runs, by digest."""

    trusted: Path
    """Bundles that this user has consented to, by digest."""

    consent: str | None = None
    """From ATOLL_TRUST_CODE: a digest, or "none" if the user has denied consent."""

    rank: int = 0
    """The rank of this process in its island."""


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


def credentials_from_environment() -> CredentialPaths:
    """Return the paths of this user's credentials.

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
    """Return the directories of definitions, and this user's consent to their code."""
    rank = os.environ.get("RANK", "")  # set by torchrun
    return DefinitionPolicy(
        staged=_cache() / "atoll" / "bundles",
        trusted=credentials_from_environment().credentials.parent / "trusted",
        consent=os.environ.get("ATOLL_TRUST_CODE") or None,
        rank=int(rank) if rank.isdecimal() else 0,
    )


def _cache() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says to ignore a relative path.
    return (
        Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache"
    )


def _path(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value) if value else None


def _seconds(name: str) -> float | None:
    value = os.environ.get(name)
    if not value:
        return None
    try:
        return float(value)
    except ValueError as exc:
        raise UsageError(f"{name}={value!r} is no number of seconds.") from exc
