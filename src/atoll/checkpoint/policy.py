"""When an island saves by itself, where, and what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from atoll.checkpoint.components import COMPONENTS, check_names, chosen_components
from atoll.checkpoint.ranks import Ranks
from atoll.checkpoint.saving import Saver
from atoll.checkpoint.states import Objects
from atoll.errors import UsageError


@dataclass(frozen=True)
class Policy:
    """What `join(..., checkpoint=...)` does for a plain loop.

    Raises:
        UsageError: a component is not known, or a number is out of range.
    """

    dir: str | Path
    """Where checkpoints are kept; every island has a directory of its own."""

    every_rounds: int = 10
    """A checkpoint is saved when so many rounds have ended since the last one."""

    components: Iterable[str] | None = None
    """What is saved. None: all but `model`, which the run owns, and but `data` when the
    run owns the order of the data."""

    also: Mapping[str, object] = field(default_factory=dict)
    """Objects to save that `join` does not know: {"scheduler": s, "data": loader}."""

    keep: int = 3
    """How many checkpoints stay."""

    def __post_init__(self) -> None:
        if self.components is not None:
            chosen = chosen_components(self.components)
            object.__setattr__(self, "components", chosen)
        check_names(self.also)
        if self.every_rounds < 1 or self.keep < 1:
            raise UsageError(
                f"every_rounds={self.every_rounds} and keep={self.keep} must be at "
                "least 1."
            )

    def chosen(self, default: Iterable[str] = COMPONENTS) -> tuple[str, ...]:
        """Return what is saved, where `default` is what None stands for."""
        return chosen_components(self.components, default=default)

    def is_due(self, round: int, saved: int | None) -> bool:
        """Whether to save after `round`; `saved` is the last checkpoint's round."""
        return round - (saved or 0) >= self.every_rounds

    def saver(
        self,
        objects: Objects,
        *,
        default: Iterable[str] = COMPONENTS,
        ranks: Ranks | None = None,
    ) -> Saver:
        """Return what saves and restores these objects and those of `also`.

        Raises:
            UsageError: `also` has what the island saves itself.
        """
        twice = sorted(objects.keys() & self.also.keys())
        if twice:
            raise UsageError(
                f"also= has {', '.join(twice)}, which the island saves by itself. "
                "Leave it out."
            )
        everything = {**objects, **self.also}
        components = self.chosen(default)
        return Saver(
            self.dir, everything, components=components, keep=self.keep, ranks=ranks
        )
