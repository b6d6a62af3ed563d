"""The model definition of a run: fetched, staged here, and trusted by its digest.

Code that comes with a run is loaded only if its digest is trusted: by the environment,
by an argument, or by a person at the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.bundle import MAX_BYTES, Bundle, stage, staged
from atoll.errors import NoSuchFile, UsageError
from atoll.exchange import MemoryRun
from atoll.island import environment
from atoll.island.run_reader import refusal
from atoll.runtime import SystemClock
from atoll.security import private_files

BUNDLE_S = 600.0
"""Timeout of the download of a bundle."""


@dataclass(frozen=True)
class ModelDefinition:
    """A bundle, the directory of its files, and whether its run has weights."""

    bundle: Bundle
    directory: Path
    is_founded: bool


BUILD_IT = "build it with atoll.torch.build"


def definition_of(
    run: MemoryRun | str | None, *, remedy: str = BUILD_IT
) -> ModelDefinition:
    """Return the definition of a run's model. A staged bundle is not fetched again.

    `remedy` goes into the error about a run without a bundle.

    Raises:
        UsageError: there is no such run, or it has no bundle.
        CorruptError: the bundle is not the one named in the run's settings.
        RemoteError: the run does not answer, or refuses.
        DiskError: it cannot be staged.
    """
    run = environment.run_from_environment() if run is None else run
    if isinstance(run, MemoryRun):
        if run.bundle is None:
            raise _no_bundle(run.id, remedy)
        data = run.bundle.data
        return _staged(run.bundle.digest, lambda: data, run.model is not None)
    if run in ("", "none"):
        raise UsageError(
            f"run={run!r} has no bundle: a program that trains alone has the model."
        )
    if run.startswith(("http://", "https://")):
        return _at_coordinator(run, remedy)
    return _in_store(run, remedy)


def _staged(
    digest: str, fetch: Callable[[], bytes], is_founded: bool
) -> ModelDefinition:
    root = environment.definitions_from_environment().staged
    bundle = staged(root, digest)
    if bundle is None:
        bundle = Bundle.of_archive(fetch(), digest=digest)
    return ModelDefinition(bundle, stage(bundle, root), is_founded)


def _no_bundle(run: str, remedy: str) -> UsageError:
    return UsageError(
        f"The run {run!r} has no bundle, so every island must define the model "
        f"itself: {remedy}. A run gets its bundle at its start: `atoll serve "
        "RUN.toml --bundle DIR`."
    )


def _at_coordinator(run: str, remedy: str) -> ModelDefinition:
    from atoll.island.connection import connect_read_only

    caller, headers, info = connect_read_only(
        run, paths=environment.credentials_from_environment(), clock=SystemClock()
    )

    def fetch() -> bytes:
        from atoll.http import Download, at_most

        fetching = Download(at_most(MAX_BYTES, "the bundle"))
        reply = caller.call(
            "GET",
            "/bundle",
            headers=headers,
            fetching=fetching,
            timeout_s=BUNDLE_S,
            is_repeatable=True,
        )
        if reply.status != 200:
            raise refusal(reply)
        return bytes(reply.body)

    try:
        if info.settings.run.bundle is None:
            raise _no_bundle(info.run, remedy)
        is_founded = bool(info.model_fingerprint)
        return _staged(info.settings.run.bundle, fetch, is_founded)
    finally:
        caller.close()


def _in_store(run: str, remedy: str) -> ModelDefinition:
    from atoll.exchange.bucket.create import archive_in
    from atoll.island.store_connection import open_read_only

    with open_read_only(run, clock=SystemClock()) as (reader, _):
        digest = reader.view.settings.run.bundle
        if digest is None:
            raise _no_bundle(reader.run, remedy)
        store = reader.store
        return _staged(
            digest, lambda: archive_in(store, digest), reader.founded is not None
        )


DENIED = "none"
"""The consent, instead of a digest, of a user who has denied it already."""

MAX_NAMES = 12
_MAX_BYTES = 2**12


def require_consent(definition: ModelDefinition) -> None:
    """Return if a bundle has no code, or this user has consented to run it.

    On a terminal the island's first process asks, once.

    Raises:
        UsageError: it may not run; the message names the flag that allows it.
    """
    bundle, policy = definition.bundle, environment.definitions_from_environment()
    if not bundle.code or is_trusted(bundle, policy):
        return
    may_ask = policy.consent != DENIED and policy.rank == 0 and is_at_terminal()
    if may_ask and ask_consent(definition, policy):
        return
    raise UsageError(
        f"The run's bundle has code, which would run here as this user: "
        f"{_listed(bundle.code)}. Read it in {definition.directory}; then let it run "
        f"with `atoll join RUN --trust-code {bundle.digest} -- COMMAND`, or with "
        f"ATOLL_TRUST_CODE={bundle.digest}."
    )


def needs_consent(bundle: Bundle) -> bool:
    """Return whether a bundle needs consent beyond the environment's.

    The same on all ranks: consent stored on one machine is not considered.
    """
    return (
        bool(bundle.code)
        and environment.definitions_from_environment().consent != bundle.digest
    )


def is_trusted(bundle: Bundle, policy: environment.DefinitionPolicy) -> bool:
    """Return whether this user has consented to exactly this code."""
    if policy.consent is not None:
        return policy.consent == bundle.digest
    try:
        stored_digest = private_files.read_private(
            policy.trusted / bundle.digest, content="consent", max_bytes=_MAX_BYTES
        )
    except NoSuchFile:
        return False
    return stored_digest.strip() == bundle.digest.encode()


def is_at_terminal() -> bool:
    """Return whether a user can read and answer a question."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def ask_consent(
    definition: ModelDefinition, policy: environment.DefinitionPolicy
) -> bool:
    """Ask at the terminal whether the code may run; store the consent."""
    bundle = definition.bundle
    sys.stderr.write(
        f"The run's model is defined by code, which would run here as this user.\n"
        f"  bundle  {bundle.digest}\n"
        f"  code    {_listed(bundle.code)}\n"
        f"  read it {definition.directory}\n"
        "Let it run, now and whenever it is the same? [y/N] "
    )
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        return False
    private_files.private_directory(policy.trusted)
    private_files.replace_private(
        policy.trusted / bundle.digest, bundle.digest.encode() + b"\n"
    )
    return True


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + rest
