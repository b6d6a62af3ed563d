"""The parts of a checkpoint, by name: who chooses some must not misspell one."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.errors import UsageError
from atoll.settings.rules import nearest

COMPONENTS = ("model", "optimizer", "scheduler", "trainer", "data", "rng", "island")
"""In the order in which they are restored: an island builds on model and optimizer."""

MODEL = "model"
RNG = "rng"


def chosen_components(
    names: Iterable[str] | None, *, default: Iterable[str] = COMPONENTS
) -> tuple[str, ...]:
    """Return the chosen components in our order; None chooses the default.

    Raises:
        UsageError: a name is not one of `COMPONENTS`. A misspelt "model" must not make
            a checkpoint that has no weights.
    """
    if isinstance(names, str):
        raise UsageError(
            f"components={names!r} is a word. Write components=[{names!r}]."
        )
    wanted = set(check_names(default if names is None else names))
    return tuple(name for name in COMPONENTS if name in wanted)


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names as a tuple if each of them is one of `COMPONENTS`."""
    listed = tuple(names)
    for name in listed:
        if name not in COMPONENTS:
            raise UsageError(
                f"{name!r} is no component of a checkpoint. "
                f"Did you mean {nearest(str(name), COMPONENTS)!r}? "
                f"Known are {', '.join(COMPONENTS)}."
            )
    return listed
