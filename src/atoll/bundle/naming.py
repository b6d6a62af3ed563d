"""A bundle as the settings of a run name it."""

from __future__ import annotations

from atoll.bundle.definition import Bundle
from atoll.errors import UsageError
from atoll.settings import RunSettings


def defined_by(bundle: Bundle | None, settings: RunSettings) -> RunSettings:
    """Return settings that name a bundle, if one is given.

    Raises:
        UsageError: they name another.
    """
    if bundle is None:
        return settings
    named = settings.run.bundle
    if named not in (None, bundle.digest):
        raise UsageError(
            f"The run file has run.bundle={named!r}, and the directory that was given "
            f"is bundle {bundle.digest}. Give the other's directory, or leave "
            "run.bundle out."
        )
    return settings.with_values({"run.bundle": bundle.digest})
