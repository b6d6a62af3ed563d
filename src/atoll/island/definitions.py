"""The definition of a run's model: taken from the run, and staged on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.bundle import MAX_BYTES, Bundle, stage, staged
from atoll.clock import SystemClock
from atoll.errors import UsageError
from atoll.exchange import MemoryRun
from atoll.island.anchors import refusal
from atoll.island.environment import (
    definitions_from_environment,
    run_from_environment,
    surroundings_from_environment,
)

BUNDLE_S = 600.0
"""How long a coordinator may take to send a bundle."""


@dataclass(frozen=True)
class Definition:
    """A bundle, where its files are, and whether its run has weights."""

    bundle: Bundle
    directory: Path
    is_founded: bool


BUILD_IT = "build it with atoll.torch.build"


def definition_of(run: MemoryRun | str | None, *, remedy: str = BUILD_IT) -> Definition:
    """Return what defines a run's model. What was staged before is not sent again.

    `remedy` is what to do with a run that has no bundle.

    Raises:
        UsageError: there is no such run, or it has no bundle.
        CorruptError: what came is not what the run's settings name.
        RemoteError: the run does not answer, or refuses.
        DiskError: it cannot be staged.
    """
    run = run_from_environment() if run is None else run
    if isinstance(run, MemoryRun):
        if run.bundle is None:
            raise _nothing(run.id, remedy)
        data = run.bundle.data
        return _staged(run.bundle.digest, lambda: data, run.model is not None)
    if run in ("", "none"):
        raise UsageError(
            f"run={run!r} has no bundle: whoever trains alone brings the model."
        )
    if run.startswith(("http://", "https://")):
        return _at_coordinator(run, remedy)
    return _in_store(run, remedy)


def _staged(digest: str, fetch: Callable[[], bytes], is_founded: bool) -> Definition:
    root = definitions_from_environment().staged
    bundle = staged(root, digest)
    if bundle is None:
        bundle = Bundle.of_archive(fetch(), digest=digest)
    return Definition(bundle, stage(bundle, root), is_founded)


def _nothing(run: str, remedy: str) -> UsageError:
    return UsageError(
        f"The run {run!r} has no bundle, so that every island brings its model's "
        f"definition: {remedy}. A bundle is given when a run begins: `atoll serve "
        "RUN.toml --bundle DIR`."
    )


def _at_coordinator(run: str, remedy: str) -> Definition:
    from atoll.island.reach import reach_to_look

    caller, headers, info = reach_to_look(
        run, surroundings=surroundings_from_environment(), clock=SystemClock()
    )

    def fetch() -> bytes:
        from atoll.http import Fetching, at_most

        fetching = Fetching(at_most(MAX_BYTES, "the bundle"))
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
            raise _nothing(info.run, remedy)
        is_founded = bool(info.model_fingerprint)
        return _staged(info.settings.run.bundle, fetch, is_founded)
    finally:
        caller.close()


def _in_store(run: str, remedy: str) -> Definition:
    from atoll.exchange.bucket.definitions import archive_in
    from atoll.island.meeting import looking

    with looking(run, clock=SystemClock()) as (lookout, _):
        digest = lookout.sight.settings.run.bundle
        if digest is None:
            raise _nothing(lookout.run, remedy)
        store = lookout.store
        return _staged(
            digest, lambda: archive_in(store, digest), lookout.founded is not None
        )
